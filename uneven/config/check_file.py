"""Everything that is wrong with a file of settings, at once and with its lines: `uneven config check run.toml`.

`read_settings_file` (sources.py), which a run calls, stops at the first. Both ask the same checks: names, values, and
what settings demand of each other; what depends on the script or on the machine is not known here.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from uneven.config.names import POLICIES
from uneven.config.resolve import by_name
from uneven.config.run_config import RunConfig
from uneven.config.setting import check_names, settings_of
from uneven.config.sources import is_none, load_toml
from uneven.errors import InputError

STAND_INS = {"batch_size": 1, "epochs": 1}  # what a file may leave to the script


class Problem(NamedTuple):
    """One thing that is wrong; `line` counts from 1, None where it is nowhere in the file."""

    line: int | None
    key: str | None
    message: str


class Findings(NamedTuple):
    """What a file says. `settings` are right by themselves; `notes` are conflicts that the script may settle, since
    it may pass the setting that is missing; `problems` remain whatever it passes."""

    settings: dict[str, Any]
    problems: list[Problem]
    notes: list[Problem]


def find_problems(path: Path) -> Findings:
    """InputError where the file cannot be read at all."""
    try:
        content = load_toml(path)
    except InputError as error:
        if (place := re.search(r"\(at line (\d+)", str(error))) is None:
            raise
        return Findings({}, [Problem(int(place[1]), None, str(error).removeprefix(f"{path}: "))], [])
    lines = lines_of_keys(path.read_text(encoding="utf-8"))
    found = Findings({}, [], [])
    for key, value in content.items():
        if (message := _take(key, value, found.settings)) is not None:
            found.problems.append(Problem(lines.get(key), key, message))
    wrong = {problem.key for problem in found.problems}
    for name, message in conflicts_of(found.settings):
        elsewhere = [
            other for other in settings_of(RunConfig) if f"{other}=" in message and other not in found.settings
        ]
        if not wrong & set(elsewhere):  # else it may follow from the value that is wrong
            (found.notes if elsewhere else found.problems).append(Problem(lines.get(name), name, message))
    for some in (found.problems, found.notes):
        some.sort(key=lambda problem: problem.line or 0)
    return found


def _take(key: str, value: Any, settings: dict[str, Any]) -> str | None:
    """Add the one setting under its own name; what is wrong with it, whatever the others are."""
    try:
        settings |= _checked(key, value, settings)
    except InputError as error:
        return str(error)
    return None


def _checked(key: str, value: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """The one setting under its own name; InputError for what is wrong with it, whatever the others are."""
    if isinstance(value, dict):
        raise InputError(f"[{key}] is a table; write settings above any table, as in epochs = 3")
    known = settings_of(RunConfig)
    (name,) = by_name({key: value})
    check_names({name: value}, known)
    if name in before and before[name] != value:
        raise InputError(f"{key} and {name} are one setting under two names; write {name} alone")
    plain = None if is_none(known[name], value) else value
    known[name].check(known[name].convert(plain))
    return {name: plain}


def conflicts_of(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which of these settings, each right by itself, do not go together: (name, why), every one of them.

    RunConfig refuses the first conflict it meets; without the setting that this one begins with the next is met.
    """
    known = settings_of(RunConfig)
    given = {name: known[name].convert(value) for name, value in settings.items()}
    if "policy" in given:
        return _conflicts(given, STAND_INS)
    # The script may name the policy that most of them go with.
    tried = [_conflicts(given, {**STAND_INS, "policy": policy}) for policy in POLICIES]
    return min(tried, key=lambda found: sum("policy=" in message for _, message in found))


def _conflicts(settings: Mapping[str, Any], stand_ins: Mapping[str, Any]) -> list[tuple[str, str]]:
    left = dict(settings)
    found: list[tuple[str, str]] = []
    while (message := _first_conflict({**stand_ins, **left})) is not None:
        places = {name: place.start() for name in left if (place := re.search(rf"\b{name}\b", message))}
        if not places:
            break
        name = min(places, key=places.__getitem__)
        found.append((name, message))
        del left[name]
    return found


def _first_conflict(settings: Mapping[str, Any]) -> str | None:
    try:
        RunConfig(**settings)
    except InputError as error:
        return str(error)
    return None


def lines_of_keys(text: str) -> dict[str, int]:
    """The line of each key at the top of a TOML file, and of each table's name."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if place := re.match(r"""\s*\[{0,2}\s*["']?([A-Za-z0-9_-]+)["']?\s*[.=\]]""", line):
            found.setdefault(place[1], number)
    return found
