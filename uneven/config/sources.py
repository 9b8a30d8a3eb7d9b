"""Where the value of each setting comes from: the one place that knows which source takes precedence.

[Note: sources of settings] From weak to strong: the default, what the script passes (`fit`, `Ddp.setup`), run.toml
beside the script or --config FILE, the environment (UNEVEN_EPOCHS=3), a flag of the command line. So whoever starts a
run may always replace what is written down, without editing it. `uneven run` reads all of them, and what it has read
travels to the ranks as data; a script that python starts has its own arguments and the defaults alone.
"""

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from uneven.config.resolve import by_name
from uneven.config.run_config import RunConfig
from uneven.config.setting import Setting, check_names, settings_of
from uneven.config.text import parse_text
from uneven.errors import InputError

RUN_FILE = "run.toml"  # read where it stands beside the script
PREFIX = "UNEVEN_"
DEFAULT, SCRIPT = "default", "script"
_NONE: Mapping[str, Any] = MappingProxyType({})
NEAR = 0.85  # how much a variable must look like that of a setting to be taken for a slip; UNEVEN_DATA is far from all


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
    known = settings_of(RunConfig)
    found = {name: Sourced(one.default, DEFAULT) for name, one in known.items() if not one.is_required}
    found |= {name: Sourced(value, SCRIPT) for name, value in _checked(script, "").items()}
    if file is not None:
        found |= {name: Sourced(value, str(file)) for name, value in read_settings_file(file).items()}
    found |= read_environment(environ)
    found |= {name: Sourced(value, f"flag {known[name].flag}") for name, value in _checked(flags, "").items()}
    return {name: found[name] for name in known if name in found}


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
    for name, value in content.items():
        if isinstance(value, dict):
            raise InputError(f"{path}: [{name}] is a table; write settings above any table, as in epochs = 3")
    known = settings_of(RunConfig)
    plain = {name: None if name in known and is_none(known[name], value) else value for name, value in content.items()}
    return _checked(plain, f"{path}: ")


def is_none(setting: Setting, value: Any) -> bool:
    """Whether a file says None: TOML has no word for it."""
    return setting.takes_none and value == "none"


def read_environment(environ: Mapping[str, str]) -> dict[str, Sourced]:
    """The settings among the variables: UNEVEN_ and the name in capitals. An empty one counts as not set."""
    known = {name.upper(): setting for name, setting in settings_of(RunConfig).items()}
    found: dict[str, Sourced] = {}
    for variable, text in environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or not text:
            continue
        if (setting := known.get(name)) is not None:
            given = {setting.name: parse_text(setting, text, variable)}
            found[setting.name] = Sourced(_checked(given, f"{variable}: ")[setting.name], f"environment {variable}")
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


def _checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings under their own names, as they were written; what is wrong with one is said with where that was."""
    known = settings_of(RunConfig)
    try:
        named = by_name(given)
        check_names(named, known)
        for name, value in named.items():
            known[name].check(known[name].convert(value))
    except InputError as error:
        raise InputError(f"{where}{error}") from error
    return named
