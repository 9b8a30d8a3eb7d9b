"""What docs/how-it-works.md names exists: files, settings, names in the code, links, drawings. Its arithmetic holds."""

import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from uneven.config import POLICIES, RunConfig
from uneven.hardware.yardstick import Yardstick
from uneven.policy.finish import Cost, equal_finish, finish_ms
from uneven.policy.scale import effective_ranks

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-it-works.md"
TEXT = PAGE.read_text()
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
LINKS = sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT)))
PATHS = [word for word in QUOTED if "/" in word]
NAMES = sorted({name for word in QUOTED if "/" not in word for name in re.findall(r"[A-Za-z_]\w*", word)})
SETTINGS = {field.name for field in fields(RunConfig)}


def test_it_names_enough_to_be_worth_checking() -> None:
    assert len(PATHS) >= 20
    assert len(SETTINGS & set(NAMES)) >= 10
    assert set(POLICIES) <= set(NAMES)
    assert TEXT.isascii()


@pytest.mark.parametrize("path", PATHS)
def test_every_file_and_room_named_exists(path: str) -> None:
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


def test_every_other_name_is_one_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in sorted((ROOT / "uneven").rglob("*.py")))
    assert [name for name in NAMES if not re.search(rf"\b{name}\b", code)] == []


def test_every_name_given_a_value_is_a_setting() -> None:
    given = {match[1] for word in QUOTED if (match := re.match(r"(\w+)=", word))}
    assert given
    assert given <= SETTINGS


def test_every_setting_named_is_explained_in_the_settings() -> None:
    rows = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "settings.md").read_text(), flags=re.MULTILINE)
    assert sorted(SETTINGS & set(NAMES) - set(rows)) == []


@pytest.mark.parametrize("link", LINKS)
def test_every_link_leads_somewhere(link: str) -> None:
    path, _, heading = link.partition("#")
    text = (PAGE.parent / path).read_text() if path else TEXT
    if heading:
        headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def test_every_picture_is_shown_somewhere() -> None:
    there = {f"images/{path.name}" for path in (ROOT / "docs" / "images").iterdir()}
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert there == set(re.findall(r"\]\((images/[^)]+)\)", pages))


def row(first: str) -> list[float]:
    (line,) = re.findall(rf"^\| {first} \|(.+)\|$", TEXT, flags=re.MULTILINE)
    return [float(cell.strip(" %x")) for cell in line.split("|")]


def test_the_bound_of_equal_batches_is_as_computed() -> None:
    pairs = [(gap, 1.0) for gap in row("gap")]
    assert row("equal batches reach at most") == [round(100 * Yardstick.of(pair).ddp_bound) for pair in pairs]
    assert row("over the fast device alone") == [round(Yardstick.of(pair).ddp_over_fast, 2) for pair in pairs]


def test_the_example_of_rounding_is_as_computed() -> None:
    costs = [Cost(0.0, 1.0), Cost(0.0, 2.5)]
    assert equal_finish(costs, 16) == (12, 4)
    assert finish_ms(costs, (11, 5)) == 12.5
    assert "11.43 : 4.57" in TEXT
    assert round(16 * 2.5 / 3.5, 2) == 11.43
    assert f"{effective_ranks([2.5, 1.0]):.2f} at a gap of 2.5" in TEXT


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="the drawings need matplotlib: pip install -e '.[docs]'")
def test_the_drawings_can_be_drawn_and_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        command = [sys.executable, str(ROOT / "tools" / "draw_policies.py"), str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True, timeout=200)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert {f"images/{name}" for name in one} == {link for link in LINKS if link.startswith("images/")}
