"""`uneven run`: the user's script on every device named. Its options are the fields of RunConfig, every one of them,
and how other machines take part.

The settings given here travel to the ranks as data and take precedence over those in the script.
"""

import inspect
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli import complete
from uneven.config import RunConfig, Setting, settings_of
from uneven.config.sources import Sourced, find_run_file, from_outside, resolve_sources
from uneven.config.text import parse_text, read_skip
from uneven.errors import InputError
from uneven.files import json_text
from uneven.launch.find_script import Script, find_script

if TYPE_CHECKING:
    from uneven.machines.options import LeadOptions


def run(
    script: Path, args: list[str] | None = None, module: bool = False, as_json: bool = False, **options: Any
) -> None:
    """Run a script that uses uneven, in one process per device. Options given here take precedence over the script's.

    Exit code 0: done. 1: the script or a rank failed. 2: bad input. 3: this machine cannot. 130: stopped by Ctrl-C and
    saved. 143: by SIGTERM.

    Examples:

      uneven run train.py --devices cpu,cpu@0.4

      uneven run train.py --epochs 3 -- --option-of-the-script 5

      uneven run -m package.train --devices cpu,cpu@0.4

      uneven run train.py --policy auto           (probes for some seconds, as uneven plan does, and takes its advice)

      uneven run train.py --json                  (the results as one JSON document)

      uneven run train.py --nodes 2               (prints the line to paste on the other machine)

      uneven run train.py --hosts hosts.toml      (starts the others over ssh)

      srun uneven run train.py                    (as the ranks that Slurm has started)
    """
    found = find_script(script, args or [], module)
    if not as_json:
        _run(found, options)
        return
    from uneven.launch.external.variables import read_launcher
    from uneven.launch.results_file import collected_results

    begin_s = time.monotonic()
    results: list[dict[str, Any]] = []
    try:
        with collected_results() as results:
            _run(found, options)
    finally:
        engine = read_launcher()
        is_first = engine is None or engine.rank == 0
        is_done = sys.exc_info()[0] is None
        if is_first and (is_done or results):  # a stopped run has a result, too
            document = {"script": str(script), "seconds": round(time.monotonic() - begin_s, 2), "runs": results}
            print(json_text(document), flush=True)


def _run(script: Script, options: dict[str, Any]) -> None:
    engine = options.pop("engine", None)
    sources = find_sources(script, options)
    given = from_outside(sources)
    machines = read_machines({name: options.get(name) for name in MACHINE_OPTIONS}, given.get("skip"))
    if given.get("policy") == "auto" and (engine is not None or machines is not None):
        raise InputError(
            "--policy auto probes the devices of one machine before their ranks start, and not those of several; name "
            "a policy, as in --policy balanced"
        )
    _say_sources(sources)
    if engine is not None:
        _run_on_engine(engine, script, given, machines)
        return
    if machines is not None:
        from uneven.launch.nodes.lead import lead_script

        lead_script(script, given, machines)
        return
    if given.get("policy") == "auto":
        _run_by_plan(script, given)
        return
    from uneven.launch.script import run_script

    run_script(script, given)


def _run_by_plan(script: Script, given: dict[str, Any]) -> None:
    """--policy auto: probe in a process of its own, then run with what it chose."""
    from uneven.launch.external.variables import read_launcher
    from uneven.launch.script import run_script
    from uneven.plan.script import choose_for_script

    if read_launcher() is not None:  # its ranks are running already: each takes the rule
        run_script(script, given)
        return
    settings, plan, lines = choose_for_script(script, given)
    print(*(line.strip() for line in lines), sep="\n", file=sys.stderr)
    run_script(script, settings, plan)


def _run_on_engine(engine: str, script: Script, settings: dict[str, Any], machines: "LeadOptions | None") -> None:
    if engine != "ray":
        raise InputError(f"--engine {engine}: allowed is ray; torchrun, srun and PyTorchJob need no option")
    if machines is not None:
        raise InputError("--engine ray with --nodes or --hosts: Ray knows its machines; leave those out")
    from uneven.launch.external.ray_cluster import run_on_ray

    run_on_ray(script, settings)


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
        ssh=given["ssh"],
        skip=read_skip(skip),
    )


def find_sources(script: Script, options: Mapping[str, Any]) -> dict[str, Sourced]:
    """Every setting with its source but for what the script itself says: [Note: sources of settings]."""
    file = find_run_file(script.path, options.get("config"))
    return resolve_sources(file=file, environ=os.environ, flags=read_flags(options))


def _say_sources(sources: Mapping[str, Sourced]) -> None:
    """One line for what was not typed: a file or a variable may be forgotten. Of many ranks the first one says it."""
    from uneven.launch.external.variables import read_launcher

    quiet = [name for name, found in sources.items() if found.is_from_outside and not found.is_flag]
    engine = read_launcher()
    if quiet and (engine is None or engine.rank == 0):
        shown = ", ".join(f"{name}={sources[name].value} ({sources[name].source})" for name in quiet)
        print(f"uneven: {shown}", file=sys.stderr)


MACHINES = "Options for several machines"
MODULE_OPTION = Annotated[
    bool,
    typer.Option("--module", "-m", help="SCRIPT is a module, as python -m takes it: uneven run -m package.train."),
]
CONFIG_OPTION = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file with settings by name, as in epochs = 3; otherwise run.toml beside the script. Environment "
        "variables (UNEVEN_EPOCHS) and options take precedence over it, and it over the script.",
        metavar="FILE",
    ),
]
JSON_OPTION = Annotated[
    bool,
    typer.Option("--json", help="One JSON object with the results; what the script prints goes to stderr."),
]
ENGINE_OPTION = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="ray: one process per GPU of a Ray cluster, or per machine without GPUs. Needs ray (pip install "
        "'uneven\\[ray]').",  # a plain bracket is markup to rich, which prints the help
        metavar="ray",
        rich_help_panel=MACHINES,
    ),
]
MACHINE_OPTIONS: dict[str, Any] = {
    "nodes": Annotated[
        str | None,
        typer.Option(
            "--nodes",
            help="Train on this many machines, this one included: 2, or the fewest and the most, 2-4. Prints the line "
            "to type on the others and waits for them.",
            metavar="N|N-M",
            rich_help_panel=MACHINES,
        ),
    ],
    "hosts": Annotated[
        Path | None,
        typer.Option(
            "--hosts",
            help="A TOML file with the other machines ([\\[hosts]] with address, user, devices, folder, python): "
            "starts 'uneven join' on each over ssh, with keys.",
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
    "ssh": Annotated[
        str | None,
        typer.Option(
            "--ssh", help="The ssh program of --hosts, also UNEVEN_SSH.", metavar="COMMAND", rich_help_panel=MACHINES
        ),
    ],
}


def read_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the options as typer read them; None: it was not given."""
    known = settings_of(RunConfig)
    given = {name: value for name, value in options.items() if name in known and value is not None}
    return {
        name: parse_text(known[name], value, known[name].flag) if isinstance(value, str) else value
        for name, value in given.items()
    }


def option_of(setting: Setting) -> inspect.Parameter:
    """The option of a setting, as typer wants it: a parameter with an annotation. None: it was not given."""
    (first, *others) = setting.members
    is_text = bool(others) or first not in (int, float, bool)
    names = [setting.flag] if setting.alias is None else [setting.flag, f"--{setting.alias.replace('_', '-')}"]
    if first is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    panel = "Options" if setting.policies is None else f"Options of policy {' and '.join(setting.policies)} alone"
    about = typer.Option(
        *names, help=setting.help, metavar=_metavar(setting), rich_help_panel=panel, autocompletion=_completion(setting)
    )
    kind = (str if is_text else first) | None
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, about]
    )


def _completion(setting: Setting) -> complete.Complete | None:
    """What the shell offers as its value; None: files."""
    if setting.name == "devices":
        return complete.devices
    words = (
        *setting.choices,
        *(["none"] if setting.takes_none else []),
        *(["auto"] if setting.name == "resume" else []),
    )
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
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in {"module": MODULE_OPTION, "as_json": JSON_OPTION}.items()
    ]
    own += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in {"config": CONFIG_OPTION, **MACHINE_OPTIONS, "engine": ENGINE_OPTION}.items()
    ]
    parameters = [*own, *(option_of(setting) for setting in settings_of(RunConfig).values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_give_options()
