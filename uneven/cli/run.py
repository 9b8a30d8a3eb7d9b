"""`uneven run`: the user's script on every device named. Its options are the fields of RunConfig, every one of them,
and how other machines take part.

The settings given here travel to the ranks as data and take precedence over those in the script.
"""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.numbers import numbers
from uneven.config import RunConfig, Setting, read_skip, settings_of
from uneven.errors import InputError

if TYPE_CHECKING:
    from uneven.machines.options import LeadOptions


def run(script: Path, args: list[str] | None = None, **options: Any) -> None:
    """Run a script that uses uneven, in one process per device. Options given here take precedence over the script's.

    Exit code 0: done. 1: the script or a rank failed. 2: bad input. 3: this machine cannot. 130: stopped by Ctrl-C and
    saved. 143: by SIGTERM.

    Examples:

      uneven run train.py --devices cpu,cpu@0.4

      uneven run train.py --epochs 3 -- --option-of-the-script 5

      uneven run train.py --nodes 2               (prints the line to paste on the other machine)

      uneven run train.py --hosts hosts.toml      (starts the others over ssh)

      srun uneven run train.py                    (as the ranks that Slurm has started)
    """
    engine = options.pop("engine", None)
    machines = read_machines({name: options.pop(name, None) for name in MACHINE_OPTIONS}, options.get("skip"))
    known = settings_of(RunConfig)
    given = {name: parse_option(known[name], value) for name, value in options.items() if value is not None}
    if engine is not None:
        _run_on_engine(engine, script, args or [], given, machines)
        return
    if machines is not None:
        from uneven.launch.lead import lead_script

        lead_script(script, args or [], given, machines)
        return
    from uneven.launch.script import run_script

    run_script(script, args or [], given)


def _run_on_engine(
    engine: str, script: Path, args: list[str], settings: dict[str, Any], machines: "LeadOptions | None"
) -> None:
    if engine != "ray":
        raise InputError(f"--engine {engine}: allowed is ray; torchrun, srun, mpirun and PyTorchJob need no option")
    if machines is not None:
        raise InputError("--engine ray with --nodes or --hosts: Ray knows its machines; leave those out")
    from uneven.launch.ray_engine import run_on_ray

    run_on_ray(script, args, settings)


def read_machines(given: dict[str, Any], skip: str | None) -> "LeadOptions | None":
    """What was said about other machines, checked; None where nothing was. `skip` is the setting."""
    from uneven.machines.hosts import read_hosts
    from uneven.machines.options import lead_options, parse_ports, read_token

    is_one = given["nodes"] is None and given["hosts"] is None
    named = given["token"] is not None or given["token_file"] is not None
    return lead_options(
        nodes=given["nodes"],
        hosts=None if given["hosts"] is None else read_hosts(given["hosts"]),
        token=None if is_one and not named else read_token(given["token"], given["token_file"]),
        bind=given["bind"],
        port=given["port"],
        ports=parse_ports(given["ports"]),
        wait=given["wait"],
        ship=bool(given["ship"]),
        ssh=given["ssh"],
        skip=read_skip(skip),
    )


MACHINES = "Options for several machines"
ENGINE_OPTION = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="ray: one process per GPU of a Ray cluster, or per machine without GPUs. Needs ray (pip install "
        "'uneven[ray]').",
        metavar="ray",
        rich_help_panel=MACHINES,
    ),
]
MACHINE_OPTIONS: dict[str, Any] = {
    "nodes": Annotated[
        str | None,
        typer.Option(
            "--nodes",
            help="Train on so many machines, this one included: 2, or the fewest and the most, 2-4. Prints the line to "
            "type on the others and waits for them.",
            metavar="N|N-M",
            rich_help_panel=MACHINES,
        ),
    ],
    "hosts": Annotated[
        Path | None,
        typer.Option(
            "--hosts",
            help="A TOML file with the other machines ([[hosts]] with address, user, devices, folder, python): starts "
            "'uneven join' on each over ssh, with keys.",
            metavar="FILE",
            rich_help_panel=MACHINES,
        ),
    ],
    "bind": Annotated[
        str | None,
        typer.Option(
            "--bind",
            help="This machine's address, or the name of its interface. Otherwise that of the default route.",
            metavar="ADDRESS",
            rich_help_panel=MACHINES,
        ),
    ],
    "port": Annotated[
        int | None,
        typer.Option("--port", help="The port to join at, otherwise any.", metavar="PORT", rich_help_panel=MACHINES),
    ],
    "ports": Annotated[
        str | None,
        typer.Option(
            "--ports",
            help="Everything that listens here takes a port of this range, for a firewall; Gloo and NCCL choose theirs "
            "from the system's range (net.ipv4.ip_local_port_range).",
            metavar="FIRST-LAST",
            rich_help_panel=MACHINES,
        ),
    ],
    "token": Annotated[
        str | None,
        typer.Option(
            "--token",
            help="What joining machines must know. Otherwise UNEVEN_TOKEN, or one that is made and printed.",
            metavar="TOKEN",
            rich_help_panel=MACHINES,
        ),
    ],
    "token_file": Annotated[
        Path | None,
        typer.Option("--token-file", help="The file with the token.", metavar="FILE", rich_help_panel=MACHINES),
    ],
    "wait": Annotated[
        float | None,
        typer.Option(
            "--wait",
            help="How long to wait for the fewest machines (600), and then for more of them (30).",
            metavar="SECONDS",
            rich_help_panel=MACHINES,
        ),
    ],
    "ship": Annotated[
        bool | None,
        typer.Option(
            "--ship",
            help="Send the text files of the script's folder to machines where they differ and that allow it "
            "(uneven join --allow-ship). Otherwise such a machine is refused, with the difference.",
            rich_help_panel=MACHINES,
        ),
    ],
    "ssh": Annotated[
        str | None,
        typer.Option(
            "--ssh", help="The ssh program of --hosts, also UNEVEN_SSH.", metavar="COMMAND", rich_help_panel=MACHINES
        ),
    ],
}


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
    own += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in {**MACHINE_OPTIONS, "engine": ENGINE_OPTION}.items()
    ]
    parameters = [*own, *(_option(setting) for setting in settings_of(RunConfig).values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_give_options()
