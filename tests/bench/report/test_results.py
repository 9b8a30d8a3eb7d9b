"""The published results in docs/results: the tables are made of the files beside them, and they hold."""

from pathlib import Path

import pytest

from uneven.bench.report.build import build_report
from uneven.bench.report.check import compare_with_references
from uneven.bench.report.sections import render_markdown
from uneven.bench.single.folders import sweeps_in

REPOSITORY = Path(__file__).parents[3]
SETS = sorted(path.name for path in (REPOSITORY / "docs" / "results").iterdir() if path.is_dir())
MOST_BYTES = 60_000  # of a file
FOLDERS = ("/home/", "/tmp/", "/root/")


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def test_there_are_some() -> None:
    """All of them are what `uneven bench report docs/results` and `check` go through."""
    assert SETS
    assert [path.name for path in sweeps_in(Path("docs") / "results")] == SETS


@pytest.mark.parametrize("name", SETS)
def test_the_page_is_what_the_files_say(name: str) -> None:
    """If not: uneven bench report docs/results/NAME --out docs/results/NAME.md."""
    folder = Path("docs") / "results" / name
    assert render_markdown(build_report(folder)) == folder.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", SETS)
def test_they_hold(name: str) -> None:
    rows, broken = compare_with_references(Path("docs") / "results" / name)
    assert rows
    assert broken == []
    assert [(row.model, row.mode) for row in rows if row.faults] == []


@pytest.mark.parametrize("name", SETS)
def test_files_are_small_and_name_no_folder_of_the_machine(name: str) -> None:
    for path in (Path("docs") / "results" / name).rglob("*.json"):
        text = path.read_text()
        assert len(text) <= MOST_BYTES, path
        assert not any(folder in text for folder in FOLDERS), path
