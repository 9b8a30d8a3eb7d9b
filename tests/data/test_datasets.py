"""Sets by name: what is accepted from the data folder, what is downloaded, and errors that name the next command."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data import tiny_sets
from tests.data.stand_ins import Site
from tests.data.tiny_sets import read_folder
from uneven.data import datasets
from uneven.data.datasets import Event
from uneven.errors import InputError, MachineError

Known = Callable[..., None]


@pytest.fixture
def play(site: Site, known: Known) -> Site:
    """The text on the local server."""
    known(tiny_sets.play(f"{site.url}input.txt"))
    site.pages["/input.txt"] = tiny_sets.TEXT
    return site


@pytest.fixture
def digits(site: Site, known: Known) -> Site:
    known(tiny_sets.digits(site.url))
    site.pages = tiny_sets.gz_pages()
    return site


def test_the_names() -> None:
    assert datasets.names() == ("mnist-mini", "mnist", "cifar10", "shakespeare")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"'minst'; choose one of mnist-mini, mnist, .*uneven data list"):
        datasets.load("minst")


def test_every_set_is_well_described() -> None:
    for entry in datasets.DATA_SETS.values():
        assert entry.title
        assert entry.licence
        assert bool(entry.files) == bool(entry.mirrors) == bool(entry.num_bytes)
        assert all(len(sha256) == 64 for sha256 in entry.files.values())
        assert all(url.startswith("https://") for urls in entry.mirrors for url in urls)
    assert datasets.find_set("cifar10").num_bytes == 60_000 * 3073


def test_loading_downloads_only_on_request_and_once(digits: Site) -> None:
    with pytest.raises(MachineError, match=r"digits is not on this machine .*get it with: uneven data get digits"):
        datasets.load("digits")
    assert digits.asked == []
    loaded = datasets.load("digits", download=True)
    assert isinstance(loaded, datasets.ImageArrays)
    assert np.array_equal(loaded.train_images[:, 0], tiny_sets.DIGITS[: tiny_sets.NUM_TRAIN])
    assert np.array_equal(loaded.test_labels, tiny_sets.DIGIT_LABELS[tiny_sets.NUM_TRAIN :])
    num_asked = len(digits.asked)
    datasets.load("digits", download=True)
    datasets.load("digits")
    assert len(digits.asked) == num_asked


@pytest.mark.usefixtures("play")
def test_a_folder_can_be_passed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    datasets.load("play", folder=other, download=True)
    assert (other / "play" / "play.txt").is_file()
    with pytest.raises(MachineError, match=r"get it with: UNEVEN_DATA=.*/third uneven data get play"):
        datasets.load("play", folder=tmp_path / "third")


@pytest.mark.usefixtures("play")
def test_presence_lists_the_paths(tmp_path: Path) -> None:
    assert [item.is_here for item in datasets.presence()] == [False]
    datasets.get("play")
    [item] = datasets.presence()
    assert item.places == (tmp_path / "play" / "play.txt",)


def test_the_folder_is_argument_then_variable_then_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNEVEN_DATA", "/variable")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.data_folder("/argument") == Path("/argument")
    assert datasets.data_folder() == Path("/variable")
    monkeypatch.delenv("UNEVEN_DATA")
    assert datasets.data_folder() == Path("/xdg/uneven")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert datasets.data_folder() == tmp_path / ".cache" / "uneven"


def test_an_archive_that_a_user_has_put_there_is_unpacked_without_a_network(known: Known, tmp_path: Path) -> None:
    known(tiny_sets.photos())
    place = tmp_path / "photos"
    place.mkdir()
    (place / "cifar-10-binary.tar.gz").write_bytes(tiny_sets.photos_tarball())
    datasets.get("photos")
    found = read_folder(place)
    assert {name: found[name] for name in tiny_sets.PHOTO_FILES} == tiny_sets.PHOTO_FILES
    inside = {name: content for name, content in tiny_sets.PHOTO_FILES.items() if name != "test_batch.bin"}
    (place / "cifar-10-binary.tar.gz").write_bytes(tiny_sets.tarball(inside))
    (place / "test_batch.bin").unlink()
    with pytest.raises(MachineError, match=r"test_batch\.bin"):
        datasets.get("photos")


@pytest.mark.parametrize("content", [tiny_sets.TEXT[:-1], tiny_sets.TEXT + b"!", tiny_sets.TEXT.swapcase(), b""])
@pytest.mark.usefixtures("play")
def test_a_damaged_file_names_the_command_that_repairs_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "play").mkdir()
    (tmp_path / "play" / "play.txt").write_bytes(content)
    with pytest.raises(MachineError, match=r"play\.txt is damaged .*uneven data get play --force"):
        datasets.load("play")
    assert datasets.missing_files(tiny_sets.play(), tmp_path) == ["play.txt"]


def test_an_archive_from_a_mirror_is_unpacked(site: Site, known: Known, tmp_path: Path) -> None:
    known(tiny_sets.photos(f"{site.url}cifar-10-binary.tar.gz"))
    site.pages["/cifar-10-binary.tar.gz"] = tiny_sets.photos_tarball()
    fetched = datasets.get("photos")
    assert fetched.source == site.url.removeprefix("http://").rstrip("/")
    assert read_folder(tmp_path / "photos") == tiny_sets.PHOTO_FILES
    assert datasets.get("photos").source == ""


@pytest.mark.parametrize("fault", ["checksum", "unreadable", "absent"])
def test_a_mirror_that_fails_leads_to_the_next_which_is_asked_only_for_what_is_missing(
    fault: str, site: Site, known: Known, tmp_path: Path
) -> None:
    pages = tiny_sets.gz_pages()
    site.pages = {"/second" + path: page for path, page in pages.items()}
    site.pages |= {"/first" + path: page for path, page in pages.items()}
    wrong = {
        "checksum": pages["/train-images-idx3-ubyte.gz"],
        "unreadable": b"<html>sign in to the hotel's network",
    }
    site.pages.pop("/first/t10k-images-idx3-ubyte.gz")
    if fault in wrong:
        site.pages["/first/t10k-images-idx3-ubyte.gz"] = wrong[fault]
    known(tiny_sets.digits(f"{site.url}first/", f"{site.url}second/"))
    events: list[Event] = []
    datasets.get("digits", progress=events.append)
    assert read_folder(tmp_path / "digits") == tiny_sets.DIGIT_FILES
    assert "/second/train-images-idx3-ubyte.gz" not in site.asked
    [failure] = [event.text for event in events if "failed" in event.text]
    reason = {"checksum": "wrong content", "unreadable": "unreadable", "absent": "HTTP 404"}
    assert reason[fault] in failure


def test_when_all_mirrors_fail_one_line_names_the_reasons_and_the_ways_out(site: Site, known: Known) -> None:
    known(tiny_sets.digits(f"{site.url}first/", "http://127.0.0.1:9/"))
    with pytest.raises(MachineError) as caught:
        datasets.get("digits")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("HTTP 404", "127.0.0.1:9: ", "uneven data get digits", str(datasets.data_folder()), "mnist-mini"):
        assert part in message
    assert read_folder(datasets.data_folder() / "digits") == {}


def test_force_downloads_again_and_keeps_the_old_files_on_failure(play: Site, tmp_path: Path) -> None:
    datasets.get("play")
    assert datasets.get("play", force=True).source
    assert len(play.asked) == 2
    play.pages.clear()
    with pytest.raises(MachineError):
        datasets.get("play", force=True)
    assert read_folder(tmp_path / "play") == {"play.txt": tiny_sets.TEXT}


def test_a_damaged_file_alone_is_fetched_again(digits: Site, tmp_path: Path) -> None:
    datasets.get("digits")
    (tmp_path / "digits" / "t10k-labels-idx1-ubyte").write_bytes(b"damaged")
    digits.asked.clear()
    datasets.get("digits")
    assert digits.asked == ["/t10k-labels-idx1-ubyte.gz"]
    assert read_folder(tmp_path / "digits") == tiny_sets.DIGIT_FILES


@pytest.mark.usefixtures("play")
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if event.done is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        datasets.get("play", progress=interrupt)
    assert read_folder(tmp_path / "play") == {}


def test_a_transfer_that_breaks_off_is_a_failure_of_the_mirror(play: Site, tmp_path: Path) -> None:
    play.cuts = [5]
    with pytest.raises(MachineError, match="truncated at 5 of"):
        datasets.get("play")
    assert read_folder(tmp_path / "play") == {}


def test_a_server_that_does_not_respond_times_out(play: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "TIMEOUT_S", 0.1)
    play.gate.clear()
    with pytest.raises(MachineError, match="timed out"):
        datasets.get("play")


def test_a_folder_that_cannot_be_created_is_named(play: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    with pytest.raises(MachineError) as caught:
        datasets.get("play", folder)
    assert f"cannot write play to {folder} (a part of the path is a file)" in str(caught.value)
    assert "UNEVEN_DATA=/some/folder uneven data get play" in str(caught.value)
    assert play.asked == []


@pytest.mark.usefixtures("play")
def test_a_full_disk_is_reported_and_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=rf"cannot write play to {tmp_path} \(no space left\); .*UNEVEN_DATA="):
        datasets.get("play")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("play")
def test_a_file_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "play" / "play.txt"
    seen: list[bool] = []
    real_sync = os.fsync

    def sync(handle: int) -> None:
        seen.append(target.exists())
        real_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    datasets.get("play")
    assert seen == [False, True]  # the content is on disk before the name, the name is synced after it
    assert target.read_bytes() == tiny_sets.TEXT
