import errno
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from uneven import InputError, MachineError
from uneven.data.datasets import data_folder
from uneven.files import make_out_folder, release_out_folder, temporary_folder, write_atomically
from uneven.install import builds
from uneven.launch.control.known_runs import state_folder


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


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_is_for_those_whom_the_umask_lets_read_it(tmp_path: Path, umask: int, mode: int) -> None:
    """It was readable for everybody, also where the user had forbidden that."""
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "state.json", b"{}")
    finally:
        os.umask(before)
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == mode


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, b"page")
        assert path.is_fifo()
        assert os.read(reader, 10) == b"page"
    finally:
        os.close(reader)


def test_what_is_in_dev_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise AssertionError(f"would replace {names}")

    monkeypatch.setattr(os, "replace", refuse)
    write_atomically(Path("/dev/null"), b"page")


def test_an_earlier_runs_files_are_moved_aside_and_no_others(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for number in range(3):
        moved = make_out_folder(out)
        (out / "log.json").write_text(str(number))
        (out / "epoch-1").mkdir()
        (out / "epoch-1" / "state.json").write_text('{"slot": 1, "samples": 2, "param_groups": []}')
        for damaged in ("step-2", ".step-4.partial-word_1", "superseded-1/step-6"):
            (out / damaged).mkdir(parents=True)
            (out / damaged / "rank-0.safetensors").touch()
        (out / "notes.txt").write_text("mine")
        assert moved == (None if number == 0 else tmp_path / f"run.{number}")
    assert [(folder / "log.json").read_text() for folder in (tmp_path / "run.1", tmp_path / "run.2", out)] == list(
        "012"
    )
    assert all(
        (tmp_path / "run.1" / name).is_dir() for name in ("epoch-1", "step-2", ".step-4.partial-word_1", "superseded-1")
    )
    assert not (tmp_path / "run.1" / "notes.txt").exists()
    assert make_out_folder(tmp_path / "run.1") == tmp_path / "run.1.1"  # moved or not, it is a run's own


def test_a_folder_that_is_not_a_runs_own_is_refused_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "proj")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path / "proj")
    for out in ("../proj", ".", "/", "../link"):
        with pytest.raises(InputError, match=r"no run of uneven wrote \(.*overwrite=True \(--overwrite\)"):
            make_out_folder(Path(out))
    for out, words in (
        ("../file", "is a file; name a folder"),
        ("../nowhere", "to nothing"),
        ("../loop", "to nothing"),
    ):
        with pytest.raises(InputError, match=words):
            make_out_folder(Path(out))
    assert sorted(tmp_path.rglob("*")) == before


def test_overwrite_touches_only_files_of_ours(tmp_path: Path) -> None:
    out = tmp_path / "proj"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    (out / "epoch-notes").mkdir()
    with pytest.raises(InputError, match="holds epoch-notes, which no run of uneven wrote"):
        make_out_folder(out, overwrite=True)
    (out / "epoch-notes").rename(out / "notes")
    for _ in range(2):
        assert make_out_folder(out, overwrite=True) is None
        (out / "state.json").write_text("{}")
        (out / "epoch-notes").mkdir(exist_ok=True)
    assert sorted(path.name for path in out.iterdir()) == [
        *(".uneven", "epoch-notes", "notes", "state.json", "thesis.tex"),
    ]
    make_out_folder(out, overwrite=True)
    assert not (out / "state.json").exists()
    assert (out / "epoch-notes").is_dir()


def test_a_run_that_wrote_nothing_takes_its_folder_away_again(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for out in (there, tmp_path / "runs" / "one"):
        make_out_folder(out)
        release_out_folder(out)
    assert list(tmp_path.iterdir()) == [there]
    make_out_folder(there)
    (there / "state.json").write_text("{}")
    release_out_folder(there)
    assert (there / "state.json").exists()


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EACCES, "no permission"), (errno.ENOSPC, "no space left"), (errno.EROFS, "read-only")],
)
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(MachineError, match=words) as caught:
        make_out_folder(tmp_path / "run")
    assert "out=" in str(caught.value)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="part of the path is a file"):
        make_out_folder(tmp_path / "file" / "run")


def test_a_user_without_a_home_folder_can_use_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without a name and without HOME: every command ended in a traceback of pathlib."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "UNEVEN_HOME", "UNEVEN_DATA", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for folder in (builds.home({}), data_folder(), state_folder()):
        assert folder.parts[:2] in (("/", ".local"), ("/", ".cache"))


def test_without_a_folder_for_temporary_files_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(MachineError, match="set TMPDIR"):
        temporary_folder()
