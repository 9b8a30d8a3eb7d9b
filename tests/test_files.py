import errno
import os
from pathlib import Path

import pytest

from uneven import MachineError
from uneven.files import make_out_folder, write_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, b"old")

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_older_run_is_moved_aside(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for number in range(3):
        make_out_folder(out)
        (out / "result").write_text(str(number))
    assert (out / "result").read_text() == "2"
    assert (tmp_path / "run.1" / "result").read_text() == "0"
    assert (tmp_path / "run.2" / "result").read_text() == "1"


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EACCES, "no permission"), (errno.ENOSPC, "no space left"), (errno.EROFS, "read-only")],
)
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(MachineError, match=words) as caught:
        make_out_folder(tmp_path / "run")
    assert "out=" in str(caught.value)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="part of the path is a file"):
        make_out_folder(tmp_path / "file" / "run")
