"""The glossary and the code use the same words, and words that were given up do not come back.

Identifiers are compared word by word: `is_phantom` contains the word "phantom", `GradientRoad` the word "road". Strings
and comments are not looked at: there a word may be plain English.
"""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "glossary.md"
FILES = sorted((ROOT / "uneven").rglob("*.py"))

# Words of an earlier private language, as words inside an identifier; CONTRIBUTING.md says what to use instead.
BANNED = {
    *("pace", "paces", "rig", "rigs", "seat", "seats", "road", "roads", "course", "company", "circle", "phantom"),
    *("landing", "holding", "opening", "terms", "spread", "another", "meet", "rejoin", "conclude", "posts", "cutting"),
    *("remains", "somebody", "brought"),
}
# These are plain English inside a longer name, and an old word of ours as a whole one.
BANNED_ALONE = {"hold", "TOGETHER", "Learned", "set_out", "max_lead", "sum_"}
# And these have a word of PyTorch's in that room: shard, unshard and reshard; RankStatus.
BANNED_IN_ROOM = {"parallel": {"piece", "pieces", "drop", "whole"}, "train": {"word", "words"}}
# (file under uneven/, identifier) -> why it is right there.
EXCEPTIONS: dict[tuple[str, str], str] = {}


# Strings, comments, numbers and then identifiers: what tokenize finds, in a fraction of its time.
TOKEN = re.compile(
    r"""(?:[rbfRBF]{1,2}(?=["']))?(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3})"""
    r"""|(?:[rbfRBF]{1,2}(?=["']))?(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
    r"""|\#[^\n]*|\d\w*|([^\W\d]\w*)""",
    re.DOTALL,
)


@cache
def identifiers(path: Path) -> frozenset[str]:
    return frozenset(TOKEN.findall(path.read_text())) - {""}


@cache
def words_in(identifier: str) -> frozenset[str]:
    return frozenset(word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier))


def is_banned(path: Path, identifier: str) -> bool:
    room, name = path.relative_to(ROOT / "uneven").parts[0], str(path.relative_to(ROOT / "uneven"))
    if (name, identifier) in EXCEPTIONS:
        return False
    banned = BANNED | BANNED_IN_ROOM.get(room, set())
    return identifier in BANNED_ALONE or bool(words_in(identifier) & banned)


def rows() -> list[tuple[str, str, str]]:
    """(word, name in the code, file or room) of both tables."""
    lines = re.findall(r"^\| ([^|]+) \| [^|]+ \| `(\w+)` \| `([^`]+)` \|$", PAGE.read_text(), flags=re.MULTILINE)
    return [(word, name, place) for word, name, place in lines]


def test_every_row_of_the_tables_is_read() -> None:
    tables = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows()) == len(tables) - 2  # two headers


@pytest.mark.parametrize(("word", "name", "place"), rows())
def test_every_word_is_an_identifier_where_the_glossary_says(word: str, name: str, place: str) -> None:
    files = sorted((ROOT / place).rglob("*.py")) if place.endswith("/") else [ROOT / place]
    assert any(name in identifiers(path) for path in files), f"{word}: no {name}"


def test_no_identifier_uses_a_word_that_was_given_up() -> None:
    hits = [f"{path}: {name}" for path in FILES for name in sorted(identifiers(path)) if is_banned(path, name)]
    assert hits == []


def test_exceptions_are_still_needed() -> None:
    used = {(str(path.relative_to(ROOT / "uneven")), name) for path in FILES for name in identifiers(path)}
    assert set(EXCEPTIONS) <= used


def test_identifiers_are_those_outside_of_strings_and_comments(tmp_path: Path) -> None:
    source = 'one = f"{two}" + "th\'r\\"ee" + 0x1f  # four\nfive.six(r"""se\n"v"en""", b\'\', \'8\')'
    (tmp_path / "code.py").write_text(source)
    assert identifiers(tmp_path / "code.py") == {"one", "five", "six"}


def test_words_of_an_identifier_are_found() -> None:
    assert words_in("GradientRoad") == {"gradient", "road"}
    assert words_in("_is_phantom") == {"is", "phantom"}
    assert words_in("DDPBucketed") == {"ddp", "bucketed"}
    assert words_in("spreadsheet") == {"spreadsheet"}
