"""`uneven plan`: will several devices pay for this script, and how; some seconds of probing, then predictions.

It takes the settings of `uneven run`, which replace those in the script.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.options import CONFIG, SETTING_OPTIONS, Module, ScriptArgs, find_sources, typed, with_options
from uneven.cli.output import Json, new_console, new_table, print_json, print_whole, say
from uneven.config.sources import from_outside
from uneven.errors import InputError
from uneven.format import format_bytes
from uneven.launch.find_script import Script, find_script

if TYPE_CHECKING:
    from uneven.plan.plan import Plan
    from uneven.plan.predict import Prediction

LEFT_OUT = ("resume", "replay", "overwrite", "progress")  # settings that a plan has no use for
OPTIONS = {"config": CONFIG, **{name: one for name, one in SETTING_OPTIONS.items() if name not in LEFT_OUT}}


@with_options(OPTIONS)
def plan(
    script: Annotated[Path, typer.Argument(help="The script that is to be trained.")],
    args: ScriptArgs = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long to measure all devices together, at least 1.")
    ] = 10.0,
    module: Module = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Predict the speed of your script with every policy, on every subset of the devices, and recommend one.

    The script runs up to its fit, builder or own loop. What it was about to train is measured for some seconds, on all
    devices together and on each alone; nothing of that is kept. With --out FOLDER the plan is written there, and a run
    with --policy auto and the same FOLDER uses it.

    Exit codes: 0 a plan, 1 a rank failed while it was measured, 2 bad input, 3 this machine cannot, 130 Ctrl-C.

    Examples:

      uneven plan train.py --devices cpu,cpu@0.4

      uneven plan train.py --devices cuda:0,cpu --seconds 30 --json

      uneven plan train.py --out runs/planned && uneven run train.py --out runs/planned --policy auto
    """
    found = find_script(script, args or [], module)
    given = from_outside(find_sources(found, options))
    given = {name: value for name, value in given.items() if name not in LEFT_OUT}
    out = given.pop("out", None)
    given.pop("policy", None)  # of a run.toml, or the environment
    if options.get("policy") not in (None, "auto"):
        raise InputError(f"--policy {options['policy']}: a plan compares all of them; leave it out")
    from uneven.launch.script import check_script

    check_script(found, given)
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise InputError(f"out={str(out)!r} is a file; name a folder, as in --out runs/my-run")
    from uneven.launch.results_file import stdout_to_stderr
    from uneven.plan.plan import write_plan
    from uneven.plan.script import plan_script

    with stdout_to_stderr():
        made = plan_script(found, {**given, "policy": "auto"}, seconds)
    if out is not None:
        write_plan(made, Path(out))
    if as_json:
        print_json(made.to_json())
    else:
        _print(made)
    if out is not None:
        say(f"the plan is in {out}; take it with: {shlex.join(run_command(found, Path(out), options))}")


def run_command(script: Script, out: Path, options: Mapping[str, Any]) -> list[str]:
    """The run that takes the plan: with the same options and arguments, since a plan of others is not taken.

    `options` are as typer read them; what run.toml and the environment say, they say to the run, too.
    """
    same = {name: value for name, value in options.items() if name not in ("out", "policy")}
    command = ["uneven", "run", *script.words, "--out", str(out), "--policy", "auto", *typed(same)]
    return [*command, "--", *script.args] if script.args else command


def _print(made: "Plan") -> None:
    console = new_console(120)
    job = made.probe.job
    console.print(
        f"{job.samples_per_epoch:,} samples an epoch, batch {job.batch_size} per device; measured for "
        f"{made.probe.seconds:.0f} s\n"
    )
    figures = ("s/epoch", "samples/s", "efficiency", "gain", "shares", "memory")
    table = new_table("policy", "devices", *figures, left=("policy", "devices"))
    for one in made.predictions:
        is_taken = (one.policy, one.devices) == (made.advice.policy, made.advice.devices)
        table.add_row(*_row(one), style="bold" if is_taken else None)
    print_whole(table)
    if made.strategies:
        policy = made.strategies[0].policy
        console.print(
            f"\nstrategies with {policy} on all devices: memory of each, and s/epoch by the bytes that they move"
        )
        for kind in made.strategies:
            sizes = "  ".join(format_bytes(size) for size in kind.memory_bytes)
            console.print(f"  {kind.strategy:6} {sizes}  ~{kind.seconds_per_epoch:,.2f}")
    console.print()
    for line in made.notes:
        console.print(f"note: {line}", soft_wrap=True)
    console.print(f"recommendation: {made.advice.reason}", soft_wrap=True, style="bold")


def _row(one: "Prediction") -> list[str]:
    return [
        one.name,
        ",".join(one.devices),
        f"{one.seconds_per_epoch:,.2f}",
        f"{one.samples_per_s:,.0f}",
        f"{one.efficiency:.2f}",
        f"{one.gain:.2f}x",
        ":".join(f"{100 * share:.0f}" for share in one.shares),
        format_bytes(max(one.memory_bytes)),
    ]
