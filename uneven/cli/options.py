"""The options that verbs share: every setting of a run, those of several machines, and those of an order.

A verb that takes all options of `uneven run` declares its own, and `**options`, and is decorated by `with_options`; a
benchmark takes an `order` and is decorated by `with_order`. Typer makes the command line from its signature.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import typer

from uneven.cli import complete
from uneven.config import RunConfig, Setting, settings_of
from uneven.config.names import POLICIES
from uneven.config.sources import Sourced, find_run_file, resolve_sources
from uneven.config.text import numbers, parse_text, read_skip
from uneven.errors import InputError
from uneven.launch.find_script import Script

if TYPE_CHECKING:
    from uneven.machines.options import LeadOptions

_Verb = TypeVar("_Verb", bound=Callable[..., Any])
MACHINES = "Options for several machines"
Rank = Annotated[
    list[int] | None, typer.Option("--rank", help="This rank alone; may be given several times.", metavar="N")
]

ScriptPath = Annotated[Path, typer.Argument(help="The Python script to run, once per device.")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(help="The script's own arguments; its options after --.")]
Module = Annotated[
    bool,
    typer.Option("--module", "-m", help="SCRIPT is a module, as python -m takes it: uneven run -m package.train."),
]
CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file with settings by name, as in epochs = 3; otherwise run.toml beside the script. Environment "
        "variables (UNEVEN_EPOCHS) and options take precedence over it, and it over the script.",
        metavar="FILE",
    ),
]


def _machine_option(kind: Any, flag: str, help: str, metavar: str) -> Any:
    return Annotated[kind | None, typer.Option(flag, help=help, metavar=metavar, rich_help_panel=MACHINES)]


MACHINE_OPTIONS: dict[str, Any] = {
    "nodes": _machine_option(
        str,
        "--nodes",
        "Train on this many machines, this one included: 2, or the fewest and the most, 2-4. Prints the line to type "
        "on the others and waits for them.",
        "N|N-M",
    ),
    "hosts": _machine_option(
        Path,
        "--hosts",
        "A TOML file with the other machines ([\\[hosts]] with address, user, devices, folder, python): starts 'uneven "
        "join' on each over ssh, with keys.",  # a plain bracket is markup to rich, which prints the help
        "FILE",
    ),
    "bind": _machine_option(
        str,
        "--bind",
        "This machine's address, or the name of its interface. Otherwise that of the default route.",
        "ADDRESS",
    ),
    "port": _machine_option(int, "--port", "The port to join at, otherwise any.", "PORT"),
    "ports": _machine_option(
        str,
        "--ports",
        "Everything that listens here takes a port of this range, for a firewall; Gloo and NCCL choose theirs from the "
        "system's range (net.ipv4.ip_local_port_range).",
        "FIRST-LAST",
    ),
    "token": _machine_option(
        str,
        "--token",
        "What joining machines must know. Otherwise UNEVEN_TOKEN, or one that is made and printed.",
        "TOKEN",
    ),
    "token_file": _machine_option(Path, "--token-file", "The file with the token.", "FILE"),
    "wait": _machine_option(
        float, "--wait", "How long to wait for the fewest machines (600), and then for more of them (30).", "SECONDS"
    ),
    "ssh": _machine_option(str, "--ssh", "The ssh program of --hosts, also UNEVEN_SSH.", "COMMAND"),
}
ENGINE = _machine_option(
    str,
    "--engine",
    "ray: one process per GPU of a Ray cluster, or per machine without GPUs. Needs ray (pip install 'uneven\\[ray]').",
    "ray",
)


def option_of(setting: Setting) -> Any:
    """The option of a setting, as typer wants it: a type with an annotation. None: it was not given."""
    (first, *others) = setting.members
    is_text = bool(others) or first not in (int, float, bool)
    names = [setting.flag] if setting.alias is None else [setting.flag, f"--{setting.alias.replace('_', '-')}"]
    if first is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    panel = "Options" if setting.policies is None else f"Options of policy {' and '.join(setting.policies)} alone"
    completion = _completion(setting)
    about = typer.Option(
        *names, help=setting.help, metavar=_metavar(setting), rich_help_panel=panel, autocompletion=completion
    )
    return Annotated[(str if is_text else first) | None, about]


def _completion(setting: Setting) -> complete.Complete | None:
    """What the shell offers as its value; None: files."""
    if setting.name == "devices":
        return complete.devices
    none, newest = ["none"] if setting.takes_none else [], ["auto"] if setting.name == "resume" else []
    words = (*setting.choices, *none, *newest)
    return complete.one_of(words) if words else None


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


SETTING_OPTIONS = {name: option_of(setting) for name, setting in settings_of(RunConfig).items()}
RUN_OPTIONS = {"config": CONFIG, **MACHINE_OPTIONS, "engine": ENGINE, **SETTING_OPTIONS}


def with_options(options: Mapping[str, Any]) -> Callable[[_Verb], _Verb]:
    """Put options in the place of a verb's `**options`, but for those that it has itself; None: it was not given."""

    def give(verb: _Verb) -> _Verb:
        own = [one for one in inspect.signature(verb).parameters.values() if one.kind is not one.VAR_KEYWORD]
        names = {one.name for one in own}
        parameters = own + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in options.items()
            if name not in names
        ]
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        verb.__annotations__ = {one.name: one.annotation for one in parameters}
        return verb

    return give


def read_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the options as typer read them; None: it was not given."""
    known = settings_of(RunConfig)
    return {
        name: parse_text(known[name], value, known[name].flag) if isinstance(value, str) else value
        for name, value in options.items()
        if name in known and value is not None
    }


def typed(options: Mapping[str, Any]) -> Iterator[str]:
    """The options that were given, as they were typed."""
    known = settings_of(RunConfig)
    for name, value in options.items():
        flag = known[name].flag if name in known else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag.removeprefix('--')}"
        elif value is not None:
            yield from (flag, str(value))


def find_sources(script: Script, options: Mapping[str, Any]) -> dict[str, Sourced]:
    """Every setting with its source but for what the script itself says: [Note: sources of settings]."""
    file = find_run_file(script.path, options.get("config"))
    return resolve_sources(file=file, environ=os.environ, flags=read_flags(options))


def read_machines(options: Mapping[str, Any], skip: str | None) -> "LeadOptions | None":
    """What was said about other machines, checked; None where nothing was. `skip` is the setting."""
    from uneven.machines.hosts import read_hosts
    from uneven.machines.options import lead_options, parse_ports, read_token

    said = {name: options.get(name) for name in MACHINE_OPTIONS}
    is_one = said["nodes"] is None and said["hosts"] is None
    has_token = said["token"] is not None or said["token_file"] is not None
    return lead_options(
        nodes=said["nodes"],
        hosts=None if said["hosts"] is None else read_hosts(said["hosts"]),
        token=None if is_one and not has_token else read_token(said["token"], said["token_file"]),
        bind=said["bind"],
        port=said["port"],
        ports=parse_ports(said["ports"]),
        wait=said["wait"],
        ssh=said["ssh"],
        skip=read_skip(skip),
    )


def run_argument(help: str, known: complete.Complete) -> Any:
    """Which run a verb is about; None: the only one."""
    return typer.Argument(help=help, metavar="RUN", autocompletion=known)


def check_seconds(flag: str, seconds: float) -> None:
    if not seconds > 0:  # not a number, too
        raise InputError(f"{flag} {seconds:g}: allowed are seconds above 0")


COMPLETIONS = {
    "model": complete.one_of(complete.MODELS),
    "policy": complete.one_of((*POLICIES, "torch-ddp")),
    "precision": complete.one_of(("fp32", "bf16", "fp16", "auto")),
    "compile": complete.one_of(("off", "default", "graph")),
    "backend": complete.one_of(("auto", "nccl", "cpu", "shm", "gloo")),
    "devices": complete.devices,
}


def with_order(kind: Any) -> Callable[[_Verb], _Verb]:
    """Put the options of an order (bench/orders.py) in the place of a verb's `order`, which is made from them."""
    hints = get_type_hints(kind, include_extras=True)
    typed_fields = [one for one in fields(kind) if get_origin(hints[one.name]) is Annotated]

    def give(verb: _Verb) -> _Verb:
        @wraps(verb)
        def call(**given: Any) -> Any:
            values = {one.name: given.pop(one.name) for one in typed_fields}
            typed = {name: value for name, value in values.items() if value is not None}
            return verb(order=kind(**{name: _read(hints[name], name, typed[name]) for name in typed}), **given)

        parameters = []
        for own in inspect.signature(verb).parameters.values():
            if own.name != "order":
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            parameters += [_order_option(one, hints[one.name]) for one in typed_fields]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return cast("_Verb", call)

    return give


def _order_option(one: "Field[Any]", hint: Any) -> inspect.Parameter:
    plain, how = get_args(hint)
    flag = f"--{one.name.replace('_', '-')}"
    about = typer.Option(
        *(how.flags or flag).split(),
        help=how.help,
        min=how.least,
        max=how.most,
        show_default=how.shown or True,
        autocompletion=COMPLETIONS.get(one.name),
    )
    is_text = how.read is not None or _entry_of(plain) is not None
    default: Any = inspect.Parameter.empty if one.default is MISSING else one.default
    if isinstance(default, tuple):
        default = None if how.shown else ",".join(map(str, default))
    text: Any = str | None if default is None else str
    annotation = Annotated[text if is_text else plain, about]  # type: ignore[valid-type]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _entry_of(kind: Any) -> Any:
    """The type of the entries of a list with commas; None for another type."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((get_args(one)[0] for one in members if get_origin(one) is tuple), None)


def _read(hint: Any, name: str, value: Any) -> Any:
    plain, how = get_args(hint)
    entry, option = _entry_of(plain), (how.flags or f"--{name.replace('_', '-')}").split()[0]
    if entry is None:
        return value if how.read is None else how.read(value)
    if entry is not str:
        return tuple(entry(number) for number in numbers(option, value))
    found = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
    if not found:
        raise InputError(f"{option} {value!r} has no name")
    return found
