"""`uneven run`: the user's script on every device named. Its options are the fields of RunConfig, every one of them,
and how other machines take part.

The settings given here travel to the ranks as data and take precedence over those in the script.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.options import RUN_OPTIONS, Module, ScriptArgs, ScriptPath, find_sources, read_machines, with_options
from uneven.cli.output import print_json, say
from uneven.config.sources import Sourced, from_outside
from uneven.errors import InputError
from uneven.launch.find_script import Script, find_script
from uneven.launch.results_file import RunResult, collected_results

if TYPE_CHECKING:
    from uneven.machines.options import LeadOptions


@dataclass(frozen=True)
class Ran:
    """What --json prints."""

    script: str
    seconds: float  # all of it, start-up included
    runs: list[RunResult]


@with_options(RUN_OPTIONS)
def run(
    script: ScriptPath,
    args: ScriptArgs = None,
    module: Module = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with the results; what the script prints goes to stderr.")
    ] = False,
    **options: Any,
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

    begin_s = time.monotonic()
    results: list[RunResult] = []
    try:
        with collected_results() as results:
            _run(found, options)
    finally:
        engine = read_launcher()
        is_first = engine is None or engine.rank == 0
        is_done = sys.exc_info()[0] is None
        if is_first and (is_done or results):  # a stopped run has a result, too
            print_json(Ran(str(script), round(time.monotonic() - begin_s, 2), results))


def _run(script: Script, options: dict[str, Any]) -> None:
    engine = options.pop("engine", None)
    sources = find_sources(script, options)
    given = from_outside(sources)
    machines = read_machines(options, given.get("skip"))
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


def _say_sources(sources: Mapping[str, Sourced]) -> None:
    """One line for what was not typed: a file or a variable may be forgotten. Of many ranks the first one says it."""
    from uneven.launch.external.variables import read_launcher

    quiet = [name for name, found in sources.items() if found.is_from_outside and not found.is_flag]
    engine = read_launcher()
    if quiet and (engine is None or engine.rank == 0):
        shown = ", ".join(f"{name}={sources[name].value} ({sources[name].source})" for name in quiet)
        say(shown)
