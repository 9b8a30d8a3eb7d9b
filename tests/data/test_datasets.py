"""The public interface: names, loading, and errors that name the next command."""

from pathlib import Path

import numpy as np
import pytest

import uneven.data
from tests.data import tiny_sets
from tests.data.stand_ins import Site
from uneven.data import catalog, datasets
from uneven.errors import InputError, MachineError


@pytest.fixture
def tiny_catalog(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    """The catalog with digits and play in place of the real sets, both on the local server."""
    entries = (tiny_sets.digits(site.url), tiny_sets.play(f"{site.url}input.txt"))
    monkeypatch.setattr(catalog, "CATALOG", {entry.name: entry for entry in entries})
    monkeypatch.setattr(datasets, "CATALOG", {entry.name: entry for entry in entries})
    monkeypatch.setenv("UNEVEN_DATA", str(tmp_path))
    monkeypatch.setenv("UNEVEN_SOURCES", "mirror")
    site.pages = tiny_sets.gz_pages() | {"/input.txt": tiny_sets.TEXT}
    return site


def test_the_names() -> None:
    assert datasets.names() == ("mnist-mini", "mnist", "cifar10", "shakespeare", "shakespeare-plays")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"'minst'; choose one of mnist-mini, mnist, .*uneven data list"):
        datasets.load("minst")


def test_loading_downloads_only_on_request(tiny_catalog: Site) -> None:
    with pytest.raises(MachineError, match=r"digits is not on this machine .*get it with: uneven data get digits"):
        datasets.load("digits")
    assert tiny_catalog.asked == []


def test_loading_with_download_fetches_once(tiny_catalog: Site) -> None:
    digits = datasets.load("digits", download=True)
    assert isinstance(digits, datasets.ImageArrays)
    assert np.array_equal(digits.train_images[:, 0], tiny_sets.DIGITS[: tiny_sets.NUM_TRAIN])
    assert np.array_equal(digits.test_labels, tiny_sets.DIGIT_LABELS[tiny_sets.NUM_TRAIN :])
    num_asked = len(tiny_catalog.asked)
    datasets.load("digits", download=True)
    datasets.load("digits")
    assert len(tiny_catalog.asked) == num_asked


def test_a_folder_can_be_passed(tiny_catalog: Site, tmp_path: Path) -> None:
    del tiny_catalog
    other = tmp_path / "other"
    datasets.load("play", folder=other, download=True)
    assert (other / "play" / "play.txt").is_file()
    with pytest.raises(MachineError, match=r"get it with: UNEVEN_DATA=.*/third uneven data get play"):
        datasets.load("play", folder=tmp_path / "third")


def test_presence_lists_the_paths(tiny_catalog: Site, tmp_path: Path) -> None:
    del tiny_catalog
    assert [item.is_here for item in datasets.presence()] == [False, False]
    datasets.get("play")
    [_, play] = datasets.presence()
    assert play.places == (tmp_path / "play" / "play.txt",)


def test_shakespeare_never_becomes_the_plays(tmp_path: Path) -> None:
    plays = tmp_path / "shakespeare-plays"
    plays.mkdir()
    (plays / "shakespeare-plays.txt").write_bytes(b"x" * 5_057_280)
    with pytest.raises(MachineError, match="shakespeare is not on this machine"):
        datasets.load("shakespeare", folder=tmp_path)
    assert "uneven data get shakespeare-plays" in catalog.describe("shakespeare").alternative


def test_every_set_is_well_described() -> None:
    for entry in catalog.CATALOG.values():
        assert entry.title
        assert entry.licence
        for file in entry.files:
            assert len(file.sha256) == 64
            assert file.num_bytes > 0
        for source in entry.sources:
            assert source.num_bytes > 0
            assert source.kind != "pip" or len(getattr(source, "sha256", "")) == 64
    assert catalog.describe("cifar10").num_bytes == 60_000 * 3073


def test_no_registry_is_named_in_the_code() -> None:
    # The clients know the user's own registries; an address in the code would go around them.
    [place] = uneven.data.__path__
    sources = list(Path(place).glob("*.py"))
    assert len(sources) > 10
    for path in sources:
        for host in ("npmjs", "pypi.org", "pythonhosted"):
            assert host not in path.read_text()
