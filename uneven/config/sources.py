"""From settings as users write them to a checked RunConfig: names, aliases, and which source takes precedence.

[Note: sources of settings] From weak to strong: the default, what the script passes (`fit`, `Ddp.setup`), run.toml
beside the script or --config FILE, the environment (UNEVEN_EPOCHS=3), a flag of the command line. So whoever starts a
run may always replace what is written down, without editing it. `uneven run` reads all of them, and what it has read
travels to the ranks as data; a script that python starts has its own arguments and the defaults alone.
"""

import difflib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from uneven.config.conflicts import conflicts
from uneven.config.run_config import RunConfig
from uneven.config.setting import check_names, settings_of
from uneven.config.text import parse_text
from uneven.errors import InputError

RUN_FILE = "run.toml"  # read where it stands beside the script
PREFIX = "UNEVEN_"
DEFAULT, SCRIPT = "default", "script"
NEAR = 0.85  # how much a variable must look like that of a setting to be taken for a slip; UNEVEN_DATA is far from all
STAND_INS = {"batch_size": 1, "epochs": 1, "policy": "auto"}  # what a file may leave to the script

_NONE: Mapping[str, Any] = MappingProxyType({})
_KNOWN = settings_of(RunConfig)
_ALIASES = {setting.alias: name for name, setting in _KNOWN.items() if setting.alias is not None}


class Sourced(NamedTuple):
    """The value of a setting and where it was written: default, script, the path of a file, environment UNEVEN_X,
    flag --x."""

    value: Any
    source: str

    @property
    def is_from_outside(self) -> bool:
        """Whether it replaces what the script says."""
        return self.source not in (DEFAULT, SCRIPT)

    @property
    def is_flag(self) -> bool:
        return self.source.startswith("flag ")


def by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under their own names; InputError where one is given under two names."""
    for alias, name in _ALIASES.items():
        if alias in settings and name in settings and settings[alias] != settings[name]:
            both = f"{name}={settings[name]!r} and {alias}={settings[alias]!r}"
            raise InputError(f"{both} are one setting under two names; pass {name} alone")
    return {_ALIASES.get(name, name): value for name, value in settings.items()}


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An incomplete set of settings under their own names; InputError for an unknown name or an impossible value.

    `uneven run` calls this before it starts a rank; what depends on the script is checked in `resolve`.
    """
    named = by_name(settings)
    check_names(named, _KNOWN)
    for name, value in named.items():
        _KNOWN[name].check(_KNOWN[name].convert(value))
    return named


def resolve(settings: Mapping[str, Any], overrides: Mapping[str, Any] = _NONE) -> RunConfig:
    """Settings as the user wrote them -> a checked RunConfig; `overrides` (the command line) take precedence."""
    named = {**by_name(settings), **by_name(overrides)}
    check_names(named, _KNOWN)
    if named.get("max_steps") is not None and named.get("epochs") is None:
        _KNOWN["max_steps"].check(named["max_steps"])
        named["epochs"] = named["max_steps"]  # more than enough: an epoch has at least one step; the axis ends them
    for name, setting in _KNOWN.items():
        if setting.is_required and name not in named:
            other = ", or max_steps=..." if name == "epochs" else ""
            raise InputError(f"{name} is missing: pass {name}=...{other} (it has no default)")
    return RunConfig(**{name: _KNOWN[name].convert(value) for name, value in named.items()})


def resolve_sources(
    *,
    script: Mapping[str, Any] = _NONE,
    file: Path | None = None,
    environ: Mapping[str, str] = _NONE,
    flags: Mapping[str, Any] = _NONE,
) -> dict[str, Sourced]:
    """Every setting that has a value, with its source, in the order of RunConfig; required ones may be missing.

    `script` are the settings that the script passes, where they are known; `file` is read; `flags` have the values
    that typer and `parse_text` made. InputError that names the source, for an unknown name or an impossible value.
    What settings demand of each other is checked by `resolve`, which the script calls.
    """
    found = {name: Sourced(one.default, DEFAULT) for name, one in _KNOWN.items() if not one.is_required}
    found |= {name: Sourced(value, SCRIPT) for name, value in check_settings(script).items()}
    if file is not None:
        found |= {name: Sourced(value, str(file)) for name, value in read_settings_file(file).items()}
    found |= read_environment(environ)
    found |= {name: Sourced(value, f"flag {_KNOWN[name].flag}") for name, value in check_settings(flags).items()}
    return {name: found[name] for name in _KNOWN if name in found}


def from_outside(sources: Mapping[str, Sourced]) -> dict[str, Any]:
    """What replaces the script's own settings, as `uneven run` hands it to the ranks."""
    return {name: found.value for name, found in sources.items() if found.is_from_outside}


def find_run_file(script: Path, config: Path | None = None) -> Path | None:
    """The file with the settings of a script: the one that --config names, else run.toml beside it, else none."""
    beside = script.parent / RUN_FILE
    return config if config is not None else beside if beside.is_file() else None


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, by name and checked; InputError that names the file and the key."""
    content = load_toml(path)
    try:
        return check_settings({key: _toml_value(key, value) for key, value in content.items()})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _toml_value(key: str, value: Any) -> Any:
    """TOML has no word for None: a file says "none"."""
    if isinstance(value, dict):
        raise InputError(f"[{key}] is a table; write settings above any table, as in epochs = 3")
    return None if value == "none" and key in _KNOWN and _KNOWN[key].takes_none else value


def read_environment(environ: Mapping[str, str]) -> dict[str, Sourced]:
    """The settings among the variables: UNEVEN_ and the name in capitals. An empty one counts as not set."""
    known = {name.upper(): setting for name, setting in _KNOWN.items()}
    found: dict[str, Sourced] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or not text:
            continue
        if (setting := known.get(name)) is not None:
            try:
                (value,) = check_settings({setting.name: parse_text(setting, text, variable)}).values()
            except InputError as error:
                raise InputError(f"{variable}: {error}") from error
            found[setting.name] = Sourced(value, f"environment {variable}")
        elif close := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
            raise InputError(f"the environment variable {variable} is no setting; did you mean {PREFIX}{close[0]}?")
    return found


def load_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; InputError that names the file where it cannot be read."""
    for name in ("tomllib", "tomli"):  # Python 3.10 has none of its own
        try:
            reader = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        try:
            content: dict[str, Any] = reader.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InputError(f"{path}: {reason}") from error
        return content
    raise InputError(f"{path}: TOML files need Python 3.11, or: pip install tomli")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a file; `line` counts from 1, None where it is nowhere in the file."""

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
    """Everything that is wrong with a file of settings, where a run stops at the first: `uneven config check`.

    InputError where the file cannot be read at all.
    """
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
        elsewhere = {other for other in _KNOWN if f"{other}=" in message and other not in found.settings}
        if not wrong & elsewhere:  # else it may follow from the value that is wrong
            (found.notes if elsewhere else found.problems).append(Problem(lines.get(name), name, message))
    return found


def _take(key: str, value: Any, settings: dict[str, Any]) -> str | None:
    """Add the one setting under its own name; what is wrong with it, whatever the others are."""
    try:
        ((name, plain),) = check_settings({key: _toml_value(key, value)}).items()
    except InputError as error:
        return str(error)
    if settings.setdefault(name, plain) != plain:
        return f"{key} and {name} are one setting under two names; write {name} alone"
    return None


def conflicts_of(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which of these settings, each right by itself, do not go together: (name, why), once for each."""
    config = RunConfig.unchecked(**STAND_INS | {name: _KNOWN[name].convert(value) for name, value in settings.items()})
    found: dict[str, str] = {}
    for message in conflicts(config, _KNOWN):
        name = next(word for word in re.findall(r"\w+", message) if word in settings)
        found.setdefault(name, message)
    return list(found.items())


def lines_of_keys(text: str) -> dict[str, int]:
    """The line of each key at the top of a TOML file, and of each table's name."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if place := re.match(r"""\s*\[{0,2}\s*["']?([A-Za-z0-9_-]+)["']?\s*[.=\]]""", line):
            found.setdefault(place[1], number)
    return found
