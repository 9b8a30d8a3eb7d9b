"""`uneven chaos`: a run whose ranks are killed and stopped at random, by a seed, and a report of how it went on.

Its options are its own and all of `uneven run`, which it starts; --seed is that of the faults.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.run import find_sources, run
from uneven.config import RunConfig, settings_of
from uneven.config.sources import from_outside
from uneven.errors import STOPPED, InputError, RankError
from uneven.launch.find_script import Script, find_script

if TYPE_CHECKING:
    from uneven.bench.chaos.plan import Fault
    from uneven.bench.chaos.report import ChaosReport


def chaos(
    script: Path,
    args: list[str] | None = None,
    module: bool = False,
    kill: str | None = None,
    stop: str | None = None,
    pause: str | None = None,
    pause_for: str = "5s",
    at: list[str] | None = None,
    cut: str | None = None,
    seed: int = 0,
    as_json: bool = False,
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
        arguments=(*found.words, *_flags(options), *(["--", *args] if args else [])),
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
    from uneven.hardware.preflight import usable_devices
    from uneven.launch.script import check_script

    if options.get("engine") is not None:
        raise InputError(f"--engine {options['engine']}: under another launcher a lost rank ends the run; leave it out")
    given = from_outside(find_sources(script, options))
    check_script(script, given)
    if options.get("nodes") is None and options.get("hosts") is None:
        names = given.get("devices", "auto")
        check_ranks(faults, len(usable_devices() if names == "auto" else parse_devices(names)))


def _flags(options: dict[str, Any]) -> list[str]:
    """The options of `uneven run` that were given, as they were typed."""
    known, found = settings_of(RunConfig), list[str]()
    for name, value in options.items():
        flag = known[name].flag if name in known else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif value is not None:
            found += [flag, str(value)]
    return found


def _print(report: "ChaosReport", as_json: bool) -> None:
    code = report.code
    if code in (2, 3) and not report.faults:
        raise typer.Exit(code)  # the run has said what is wrong
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print("\n".join(report.lines()))
    if report.is_stopped:
        raise typer.Exit(code or STOPPED)
    if not report.is_right:
        raise RankError(report.why)


OWN: dict[str, tuple[Any, Any]] = {
    "kill": (str | None, typer.Option("--kill", help="SIGKILL at this rate per rank, as in 0.1/min.", metavar="RATE")),
    "stop": (
        str | None,
        typer.Option(
            "--stop", help="SIGSTOP for good: the rank falls silent, as a machine that hangs.", metavar="RATE"
        ),
    ),
    "pause": (str | None, typer.Option("--pause", help="SIGSTOP, and SIGCONT after --pause-for.", metavar="RATE")),
    "pause_for": (str, typer.Option("--pause-for", help="How long a paused rank sleeps.", metavar="TIME")),
    "at": (
        list[str] | None,
        typer.Option(
            "--at",
            help="One fault by name, as in 10s:kill:1: rank 1, 10 s after the first step; may be repeated.",
            metavar="TIME:FAULT:RANK",
        ),
    ),
    "cut": (str | None, typer.Option("--cut", help="All its network connections are shut down.", metavar="RATE")),
    "seed": (int, typer.Option("--seed", min=0, help="Of the faults; the run keeps the seed of its script.")),
    "as_json": (bool, typer.Option("--json", help="The report as one JSON object; no progress.")),
}


def _parameters() -> Iterator[inspect.Parameter]:
    """Those of `uneven run`, with the faults in the place of its seed."""
    theirs = dict(inspect.signature(run).parameters)
    plain = inspect.signature(chaos).parameters
    yield theirs.pop("script")
    yield theirs.pop("args")
    for name, (kind, about) in OWN.items():
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=plain[name].default, annotation=Annotated[kind, about]
        )
    for name, parameter in theirs.items():
        if name not in OWN:
            yield parameter


def _give_options() -> None:
    parameters = list(_parameters())
    chaos.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    chaos.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_give_options()
