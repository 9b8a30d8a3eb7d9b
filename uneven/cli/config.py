"""`uneven config`: where each setting of a run comes from, and what is wrong with a file of settings."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from uneven.cli.options import RUN_OPTIONS, Module, ScriptArgs, ScriptPath, read_flags, with_options
from uneven.cli.output import Json, print_json, say
from uneven.config import RunConfig, Setting, settings_of
from uneven.config.sources import (
    Problem,
    Sourced,
    find_problems,
    find_run_file,
    from_outside,
    lines_of_keys,
    resolve,
    resolve_sources,
)
from uneven.errors import InputError
from uneven.format import format_count
from uneven.hardware.device import parse_devices
from uneven.launch.find_script import find_script

app = typer.Typer(
    no_args_is_help=True,
    help="Show where each setting of a run comes from, check a run.toml.",
    epilog="Example: uneven config check run.toml",
)
# Shown at their defaults too: the first questions about a run.
ESSENTIALS = ("batch_size", "epochs", "policy", "devices", "seed", "precision", "out")
KINDS = ("flag", "environment", "file", "script", "default")  # from strong to weak


@dataclass(frozen=True)
class Row:
    """One setting and where it comes from."""

    value: Any
    source: str  # flag, environment, file, script or default
    where: str | None  # which flag, variable or file
    default: Any
    script: Any  # what the script says itself


@dataclass(frozen=True)
class Shown:
    """What show --json prints."""

    script: str
    file: str | None
    settings: dict[str, Row]


@dataclass(frozen=True)
class Checked:
    """What check --json prints."""

    file: str
    settings: dict[str, Any]  # that are right by themselves
    problems: list[Problem]
    notes: list[Problem]  # what the script may settle


@app.command("show")
@with_options(RUN_OPTIONS)
def show(
    script: ScriptPath,
    args: ScriptArgs = None,
    show_all: Annotated[bool, typer.Option("--all", help="Every setting, those at their defaults too.")] = False,
    module: Module = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Print the settings that a run of the script would have, each with its source: default, script, file, environment
    or flag. What is printed is TOML, for a run.toml.

    The line is that of 'uneven run', with 'config show' in its place. The script is run up to where it calls fit or
    Ddp.setup, on no device, and ends there; what it prints goes to stderr. First come the values that differ from the
    defaults, then some at their defaults.

    Exit codes: 0 shown, 1 the script failed, 2 bad input, or settings that do not go together.

    Examples:

      uneven config show train.py

      uneven config show train.py --epochs 3 --policy async --all

      uneven config show train.py --json
    """
    from uneven.launch.script import script_settings

    target = find_script(script, args or [], module)
    file = find_run_file(target.path, options.get("config"))
    outside = partial(resolve_sources, file=file, environ=os.environ, flags=read_flags(options))
    say(f"running {target} up to where it passes its settings")
    own = script_settings(target, from_outside(outside()))
    found = outside(script=own)
    _check_together(found)
    if as_json:
        print_json(_document(script, file, found, own))
    else:
        print("\n".join(_lines(script, found, own, show_all)))


def _check_together(found: Mapping[str, Sourced]) -> None:
    """InputError for settings that do not go together, with the sources of those that it names."""
    given = {name: one.value for name, one in found.items() if one.source != "default"}
    try:
        resolve(given)
    except InputError as error:
        named = [name for name in given if re.search(rf"\b{name}=|^{name}\b", str(error))]
        sources = ", ".join(f"{name}: {' '.join(_origin(found[name]))}".rstrip() for name in named)
        raise InputError(f"{error} ({sources})" if sources else str(error)) from error


def _origin(one: Sourced) -> tuple[str, str]:
    """The kind of its source, and which one: ("flag", "--epochs"), ("script", "")."""
    kind, _, which = one.source.partition(" ")
    return (kind, which) if kind in KINDS else ("file", one.source)


def _document(script: Path, file: Path | None, found: Mapping[str, Sourced], own: Mapping[str, Any]) -> Shown:
    known = settings_of(RunConfig)
    rows = {}
    for name, one in found.items():
        kind, which = _origin(one)
        default = None if known[name].is_required else known[name].default
        rows[name] = Row(one.value, kind, which or None, default, own.get(name))
    return Shown(str(script), None if file is None else str(file), rows)


def _lines(script: Path, found: Mapping[str, Sourced], own: Mapping[str, Any], show_all: bool) -> list[str]:
    known = settings_of(RunConfig)
    changed = [name for name, one in found.items() if one.source != "default"]
    changed.sort(key=lambda name: KINDS.index(_origin(found[name])[0]))
    unchanged = [name for name in found if name not in changed and (show_all or name in ESSENTIALS)]
    rows = [_row(known[name], found[name], own) for name in (*changed, *unchanged)]
    width = min(max(len(text) for text, _ in rows), 48)
    lines = [f"{text:<{width}}  # {source}" for text, source in rows]
    title = f"# {script}: {len(changed)} of {len(known)} settings are given"
    rest = [] if not unchanged else ["", *lines[len(changed) :]]
    hint = [] if show_all else ["", "# --all shows every setting"]
    return [title, *lines[: len(changed)], *rest, *hint]


def _row(setting: Setting, one: Sourced, own: Mapping[str, Any]) -> tuple[str, str]:
    """A setting as a line of TOML, and its source as a comment. None, which TOML has no word for, is left out."""
    source = " ".join(_origin(one)).rstrip()
    if one.is_from_outside and setting.name in own and own[setting.name] != one.value:
        source += f" (the script has {toml_value(own[setting.name])})"
    if one.value is None and not setting.takes_none:
        return f"# {setting.name} =", f"{source}: {setting.none or 'none'}"
    return f"{setting.name} = {toml_value(one.value)}", source


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps("none" if value is None else str(value))


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A TOML file of settings.")] = Path("run.toml"),
    as_json: Json = False,
) -> None:
    """Find everything that is wrong with a file of settings: unknown names, impossible values, settings that do not go
    together, each with its line and the fix.

    Nothing is run. What a setting in the script may still fix is only a note. What depends on the machine is found when
    the run starts.

    Exit codes: 0 all is well, 2 there are problems.

    Examples:

      uneven config check run.toml

      uneven config check run.toml --json
    """
    found = find_problems(file)
    problems = [*found.problems, *_device_problems(file, found.settings)]
    problems.sort(key=lambda problem: problem.line or 0)
    if as_json:
        print_json(Checked(str(file), found.settings, problems, found.notes))
    else:
        for problem in problems:
            print(f"{_place(file, problem)}: {problem.message}", file=sys.stderr)
        for note in found.notes:
            print(f"{_place(file, note)}: note: unless the script settles it: {note.message}", file=sys.stderr)
    if problems:
        raise InputError(f"{file} has {format_count(len(problems), 'problem')}")
    if not as_json:
        print(f"{file}: {format_count(len(found.settings), 'setting')}, all is well")


def _place(file: Path, problem: Problem) -> str:
    return f"{file}" if problem.line is None else f"{file}:{problem.line}"


def _device_problems(file: Path, settings: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the names of devices; whether this machine has them is another question."""
    names = settings.get("devices", "auto")
    if names == "auto":
        return []
    try:
        parse_devices(names)
    except InputError as error:
        return [Problem(lines_of_keys(file.read_text(encoding="utf-8")).get("devices"), "devices", str(error))]
    return []
