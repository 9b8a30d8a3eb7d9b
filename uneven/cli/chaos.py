"""`uneven chaos`: a run whose ranks are killed and stopped at random, by a seed, and a report of how it went on.

Its options are its own and all of `uneven run`, which it starts; --seed is that of the faults.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.options import RUN_OPTIONS, Module, ScriptArgs, ScriptPath, find_sources, typed, with_options
from uneven.cli.output import Json, print_json
from uneven.config.sources import from_outside
from uneven.errors import STOPPED, InputError, RankError
from uneven.launch.find_script import Script, find_script

if TYPE_CHECKING:
    from uneven.bench.chaos.plan import Fault
    from uneven.bench.chaos.report import ChaosReport


Kill = Annotated[str | None, typer.Option(help="SIGKILL at this rate per rank, as in 0.1/min.", metavar="RATE")]
Stop = Annotated[
    str | None, typer.Option(help="SIGSTOP for good: the rank falls silent, as a machine that hangs.", metavar="RATE")
]
Pause = Annotated[str | None, typer.Option(help="SIGSTOP, and SIGCONT after --pause-for.", metavar="RATE")]
PauseFor = Annotated[str, typer.Option("--pause-for", help="How long a paused rank sleeps.", metavar="TIME")]
At = Annotated[
    list[str] | None,
    typer.Option(
        help="One fault by name, as in 10s:kill:1: rank 1, 10 s after the first step; may be repeated.",
        metavar="TIME:FAULT:RANK",
    ),
]
Cut = Annotated[str | None, typer.Option(help="All its network connections are shut down.", metavar="RATE")]
Seed = Annotated[int, typer.Option(min=0, help="Of the faults; the run keeps the seed of its script.")]


@with_options(RUN_OPTIONS)
def chaos(
    script: ScriptPath,
    args: ScriptArgs = None,
    kill: Kill = None,
    stop: Stop = None,
    pause: Pause = None,
    pause_for: PauseFor = "5s",
    at: At = None,
    cut: Cut = None,
    seed: Seed = 0,
    module: Module = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Run a script and kill, stop or cut off its ranks: reports whether any sample was lost.

    Faults come at random by rates per rank, or at times that you name, counted from the first step. The same seed,
    rates and number of ranks give the same faults. Only rank processes of this run on this machine are touched, and
    never the last one. Without --out the run is written to a temporary folder, so that it does not touch the results of
    your script. It takes all options of 'uneven run' except its --seed.

    Exit codes: 0 the run ended and every sample counted exactly once, 1 it did not, 2 bad input, 3 this machine cannot,
    130 stopped by Ctrl-C, and saved.

    Examples:

      uneven chaos train.py --kill 0.1/min --devices cuda:0,cuda:1,cuda:2

      uneven chaos train.py --kill 2/min --cut 1/min --restarts 10 --seed 3 --devices cpu,cpu,cpu --json

      uneven chaos train.py --at 10s:kill:1 --at 30s:stop:2 --devices cpu,cpu,cpu --policy async
    """
    from uneven.bench.chaos.inject import check_cut
    from uneven.bench.chaos.plan import parse_fault, parse_rate, parse_time

    texts = {"kill": kill, "stop": stop, "pause": pause, "cut": cut}
    rates = {kind: parse_rate(f"--{kind}", text) for kind, text in texts.items() if text is not None}
    given = tuple(parse_fault(text) for text in at or [])
    pause_s = parse_time("--pause-for", pause_for)
    if not given and not any(rates.values()):
        raise InputError("no fault was asked for: add --kill 0.1/min, --stop, --pause, --cut, or --at 10s:kill:1")
    if rates.get("cut") or any(fault.kind == "cut" for fault in given):
        check_cut()
    found = find_script(script, args or [], module)
    _check(found, options, given)
    from uneven.bench.chaos.run import ChaosOrder, run_chaos

    out = options.pop("out", None)
    if as_json and options.get("progress") is None:
        options["progress"] = "off"
    order = ChaosOrder(
        arguments=(*found.words, *typed(options), *(["--", *args] if args else [])),
        out=None if out is None else Path(out),
        rates=rates,
        named=given,
        seed=seed,
        pause_s=pause_s,
        hides_stdout=as_json,
    )
    report = run_chaos(order, lambda line: print(f"uneven chaos: {line}", file=sys.stderr, flush=True))
    _print(report, as_json)


def _check(script: Script, options: dict[str, Any], faults: "Sequence[Fault]") -> None:
    """What is wrong whatever happens is said before anything starts; loads no torch."""
    from uneven.bench.chaos.plan import check_ranks
    from uneven.hardware.device import parse_devices
    from uneven.hardware.gpus import usable_devices
    from uneven.launch.script import check_script

    if options.get("engine") is not None:
        raise InputError(f"--engine {options['engine']}: under another launcher a lost rank ends the run; leave it out")
    given = from_outside(find_sources(script, options))
    check_script(script, given)
    if options.get("nodes") is None and options.get("hosts") is None:
        names = given.get("devices", "auto")
        check_ranks(faults, len(usable_devices() if names == "auto" else parse_devices(names)))


def _print(report: "ChaosReport", as_json: bool) -> None:
    code = report.exit_code
    if code in (2, 3) and not report.faults:
        raise typer.Exit(code)  # the run has said what is wrong
    print_json(report) if as_json else print("\n".join(report.lines()))
    if report.stopped:
        raise typer.Exit(code or STOPPED)
    if not report.right:
        raise RankError(report.why)
