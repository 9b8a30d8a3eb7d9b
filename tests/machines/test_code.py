"""Digests of code, and what differs."""

import os
from pathlib import Path

import pytest

from uneven.machines import code


def test_files_that_differ_or_are_on_one_side_alone_are_named() -> None:
    assert code.differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == ["b", "c", "d"]


def test_what_cannot_be_read_is_equal_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of more than the limit had one digest, that of their beginning; a pipe was waited for without end."""
    monkeypatch.setattr(code, "MOST_BYTES", 10)
    (tmp_path / "large.py").write_text("x = 1  # and more")
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("large.py", "pipe.py"):
        found = code.script_digests(tmp_path / name, tmp_path)
        assert found[name].startswith(code.UNREADABLE)
        assert code.differing(found, found) == [name]
