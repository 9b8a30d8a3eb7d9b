"""`uneven run`: the user's script on every device named. Its options are the fields of RunConfig, every one of them.

The settings given here travel to the ranks as data and take precedence over those in the script.
"""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from uneven.cli.numbers import numbers
from uneven.config import RunConfig, Setting, settings_of


def run(script: Path, args: list[str] | None = None, **options: Any) -> None:
    """Run a script that uses uneven, in one process per device. Options given here take precedence over the script's.

    Exit code 0: done. 1: the script or a rank failed. 2: bad input. 3: this machine cannot. 130: stopped by Ctrl-C and
    saved. 143: by SIGTERM.

    Examples:

      uneven run train.py --devices cpu,cpu@0.4

      uneven run train.py --epochs 3 -- --option-of-the-script 5
    """
    from uneven.launch.script import run_script

    known = settings_of(RunConfig)
    given = {name: parse_option(known[name], value) for name, value in options.items() if value is not None}
    run_script(script, args or [], given)


def parse_option(setting: Setting, value: Any) -> Any:
    """An option as typer read it -> the setting's value; what is wrong with it is found by the setting's own check."""
    if not isinstance(value, str):
        return value
    if setting.takes_none and value == "none":
        return None
    if setting.is_list:
        entries = numbers(setting.flag, value)
        if int not in setting.members:
            return entries
        whole = tuple(int(entry) if entry.is_integer() else entry for entry in entries)
        return whole if len(whole) > 1 else whole[0]
    if int in setting.members and value.isdecimal():
        return int(value)
    return number_or_word(value) if float in setting.members else value


def number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _option(setting: Setting) -> inspect.Parameter:
    """The option of a setting, as typer wants it: a parameter with an annotation. None: it was not given."""
    (first, *others) = setting.members
    is_text = bool(others) or first not in (int, float, bool)
    names = [setting.flag] if setting.alias is None else [setting.flag, f"--{setting.alias.replace('_', '-')}"]
    if first is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    panel = "Options" if setting.policies is None else f"Options of policy {' and '.join(setting.policies)} alone"
    about = typer.Option(*names, help=setting.help, metavar=_metavar(setting), rich_help_panel=panel)
    kind = (str if is_text else first) | None
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, about]
    )


def _metavar(setting: Setting) -> str | None:
    words = [*(["NUMBER"] if float in setting.members else []), *setting.choices]
    if setting.takes_none:
        words.append("none")
    if Path in setting.members:
        words = ["FOLDER"]
    elif setting.is_list or int in setting.members:
        words = [*(["N"] if int in setting.members else []), *(["N,N,..."] if setting.is_list else [])]
        words += ["'N steps'"] if str in setting.members else []
    return "|".join(words) or None


def _give_options() -> None:
    """Put the settings into the signature of `run`, from which typer makes the command line."""
    own = [
        inspect.Parameter(
            "script",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[Path, typer.Argument(help="The Python script to run, once per device.")],
        ),
        inspect.Parameter(
            "args",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[
                list[str] | None, typer.Argument(help="The script's own arguments; its options after --.")
            ],
        ),
    ]
    parameters = [*own, *(_option(setting) for setting in settings_of(RunConfig).values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_give_options()
