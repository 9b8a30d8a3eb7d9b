"""The data folder: which files are accepted, and how failures to write are reported."""

import errno
import gzip
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data import tiny_sets
from tests.data.stand_ins import Site
from uneven.data import cache, fetch
from uneven.data.description import Event, no_progress
from uneven.errors import MachineError


def test_the_folder_is_argument_then_variable_then_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNEVEN_DATA", "/variable")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.data_folder("/argument") == Path("/argument")
    assert cache.data_folder() == Path("/variable")
    monkeypatch.delenv("UNEVEN_DATA")
    assert cache.data_folder() == Path("/xdg/uneven")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.data_folder() == tmp_path / ".cache" / "uneven"


@pytest.mark.parametrize(
    ("place", "is_zipped"),
    [(".", False), (".", True), ("MNIST/raw", False), ("MNIST/raw", True), ("digits", False)],
)
def test_raw_digit_files_are_found_in_their_usual_folders(place: str, is_zipped: bool, tmp_path: Path) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for name, content in tiny_sets.DIGIT_FILES.items():
        path = tmp_path / place / (f"{name}.gz" if is_zipped else name)
        path.write_bytes(gzip.compress(content) if is_zipped else content)
    entry = tiny_sets.digits()
    assert dict(cache.read(entry, cache.locate(entry, tmp_path))) == tiny_sets.DIGIT_FILES
    assert cache.missing_files(entry, tmp_path) == []


def test_an_archive_in_the_data_folder_is_read(tmp_path: Path) -> None:
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in tiny_sets.PHOTO_FILES.items()}
    tiny_sets.tarball(tmp_path / "cifar-10-binary.tar.gz", inside)
    entry = tiny_sets.photos()
    assert dict(cache.read(entry, cache.locate(entry, tmp_path))) == tiny_sets.PHOTO_FILES


def test_an_archive_that_lacks_a_file_is_damaged(tmp_path: Path) -> None:
    inside = {name: content for name, content in tiny_sets.PHOTO_FILES.items() if name != "test_batch.bin"}
    tiny_sets.tarball(tmp_path / "cifar-10-binary.tar.gz", inside)
    entry = tiny_sets.photos()
    with pytest.raises(MachineError, match=r"does not contain test_batch\.bin"):
        list(cache.read(entry, cache.locate(entry, tmp_path)))
    assert [file.name for file in cache.missing_files(entry, tmp_path)] == ["test_batch.bin"]


def test_a_file_with_an_alias_but_another_size_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(b"shopping list")
    assert cache.locate(tiny_sets.play(), tmp_path) == {}
    (tmp_path / "input.txt").write_bytes(tiny_sets.TEXT)
    assert cache.locate(tiny_sets.play(), tmp_path) == {"play.txt": tmp_path / "input.txt"}


@pytest.mark.parametrize("content", [tiny_sets.TEXT[:-1], tiny_sets.TEXT + b"!", tiny_sets.TEXT.swapcase(), b""])
def test_a_damaged_file_names_the_command_that_repairs_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "play").mkdir()
    (tmp_path / "play" / "play.txt").write_bytes(content)
    entry = tiny_sets.play()
    with pytest.raises(MachineError, match=r"play\.txt is damaged .*uneven data get play --force"):
        list(cache.read(entry, cache.locate(entry, tmp_path)))
    assert cache.missing_files(entry, tmp_path) == list(entry.files)


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    with pytest.raises(MachineError) as caught:
        fetch.get(tiny_sets.play(), folder, None, False, no_progress)
    assert f"cannot write play to {folder} (a part of the path is a file)" in str(caught.value)
    assert "UNEVEN_DATA=/some/folder uneven data get play" in str(caught.value)


def test_missing_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, which ignores mode bits, so os.open is replaced.
    def refuse(*args: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), args[0])

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(MachineError, match=r"\(no permission to write\); choose another folder: UNEVEN_DATA="):
        fetch.get(tiny_sets.play(), tmp_path, None, False, no_progress)


@pytest.mark.parametrize("stage", ["download", "store"])
def test_a_full_disk_is_reported_and_no_file_is_left(
    stage: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pages["/input.txt"] = tiny_sets.TEXT
    folder = tmp_path / "data"
    real_open = Path.open

    def full(path: Path, mode: str = "r", *rest: object) -> object:
        if path.suffix == ".part" and mode in ("wb", "ab"):
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_open(path, mode, *rest)  # type: ignore[call-overload]

    def full_at_sync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if stage == "download":
        monkeypatch.setattr(Path, "open", full)
    else:
        monkeypatch.setattr(os, "fsync", full_at_sync)
    with pytest.raises(MachineError, match=rf"cannot write play to {folder} \(no space left\); .*UNEVEN_DATA="):
        fetch.get(tiny_sets.play(f"{site.url}input.txt"), folder, None, False, no_progress)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [".play.lock"]


def test_too_little_space_is_reported_before_downloading(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.pages["/input.txt"] = tiny_sets.TEXT
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(MachineError, match=r"play needs .* MB in .*, which has 0 MB free; .*UNEVEN_DATA="):
        fetch.get(tiny_sets.play(f"{site.url}input.txt"), tmp_path, None, False, no_progress)
    assert site.asked == []


def test_leftovers_of_a_killed_process_are_deleted_except_part_files(tmp_path: Path) -> None:
    work = tmp_path / ".play.work"
    (work / "npm-abc").mkdir(parents=True)
    for name in ("npm-abc/half.tgz", "play.txt.new", "host-input.txt.part"):
        (work / name).write_bytes(b"half")
    with cache.exclusive_work_folder(tiny_sets.play(), tmp_path, no_progress) as given:
        assert given == work
        assert [path.name for path in work.iterdir()] == ["host-input.txt.part"]
    assert not work.exists()


def test_the_lock_is_free_again_after_a_failure(tmp_path: Path) -> None:
    events: list[Event] = []
    with pytest.raises(RuntimeError), cache.exclusive_work_folder(tiny_sets.play(), tmp_path, events.append):
        raise RuntimeError
    with cache.exclusive_work_folder(tiny_sets.play(), tmp_path, events.append):
        pass
    assert events == []  # did not wait for the lock


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tiny_sets.play()
    target = tmp_path / "play" / "play.txt"
    seen: list[bool] = []
    real_sync = os.fsync

    def sync(handle: int) -> None:
        seen.append(target.exists())
        real_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    with cache.exclusive_work_folder(entry, tmp_path, no_progress) as work:
        cache.install(entry, entry.files[0], tiny_sets.TEXT, tmp_path, work)
    assert seen == [False, True]  # the content is on disk before the name, the name is synced after it
    assert target.read_bytes() == tiny_sets.TEXT
