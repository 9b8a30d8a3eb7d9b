"""Digests of code, and what differs in a few lines."""

import os
from pathlib import Path

import pytest

from uneven.machines import code


def test_what_differs_is_shown_in_a_few_lines() -> None:
    assert code.differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == ["b", "c", "d"]
    lines = code.short_diff("lr = 1\nx = 2\n", "lr = 3\nx = 2\n", "node2", "train.py")
    assert lines == ["--- node2: train.py", "+++ leader: train.py", "@@ -1,2 +1,2 @@", "-lr = 1", "+lr = 3", " x = 2"]
    long = code.short_diff("\n".join("abc" * 20), "\n".join("xyz" * 20), "node2", "train.py")
    assert len(long) == code.MOST_DIFF_LINES + 1
    assert "lines more" in long[-1]


def test_what_cannot_be_read_is_equal_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of more than the limit had one digest, that of their beginning; a pipe was waited for without end."""
    monkeypatch.setattr(code, "MOST_BYTES", 10)
    (tmp_path / "large.py").write_text("x = 1  # and more")
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("large.py", "pipe.py"):
        found = code.script_digests(tmp_path / name, tmp_path)
        assert found[name].startswith(code.UNREADABLE)
        assert code.differing(found, found) == [name]
