"""`uneven bench sweep` and `policies`: many runs. Their comparison is in cli/bench_results.py."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli import options
from uneven.cli.output import Json, new_console, new_table, print_json, print_whole, say
from uneven.errors import InputError, RankError
from uneven.launch.find_script import find_script

if TYPE_CHECKING:
    from uneven.bench.policies import Trial
    from uneven.bench.sweep.plan import SweepOrder
    from uneven.bench.sweep.run import Outcome


@dataclass(frozen=True)
class Swept:
    """What sweep --json prints."""

    done: list[str]
    kept: list[str]
    failed: dict[str, str]  # run: why
    disturbed: list[str]
    skipped: dict[str, str]  # mode: why


@dataclass(frozen=True)
class Planned:
    """What sweep --dry-run --json prints."""

    run: list[str]
    kept: list[str]
    skipped: dict[str, str]


Efficiency = Annotated[bool, typer.Option("--efficiency", help="Also measure efficiency by pairs; takes minutes each.")]
EqualTime = Annotated[
    bool, typer.Option("--equal-time", help="Also runs with as many epochs as fit the best single device's time.")
]


def sweep(
    models: Annotated[str | None, typer.Option(help="Only these, as in lenet,mlp.", show_default="all")] = None,
    modes: Annotated[str | None, typer.Option(help="Only these, as in solo-0,cpu-async.", show_default="all")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each mode; default: 5, 1 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="LeNet and gpt-nano, a few samples, one seed.")] = False,
    devices: Annotated[str, typer.Option(help="Two or more, as in cuda:0,cuda:1.")] = "cpu,cpu@0.4",
    data: Annotated[str | None, typer.Option(help="In place of mnist, such as mnist-mini.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Train on the first N samples only.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: each model's own; 2 with --quick.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Per device; default: each model's own.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(min=1, help="Of a step of the exact modes and DDP.")] = None,
    lr_scale: Annotated[float | None, typer.Option(help="Multiplies the lr of the exact modes and DDP.")] = None,
    precision: options.Precision = "fp32",
    compile: options.Compile = "off",
    efficiency: Efficiency = False,
    equal_time: EqualTime = False,
    out: options.RunsFolder = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Repeat finished runs.")] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="On GPUs: seeds after the first run N at a time, for their quality only.")
    ] = 1,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only list what would run.")] = False,
    as_json: Json = False,
) -> None:
    """Train every model in every mode that the hardware allows, one fresh process per run; then use uneven bench
    report.

    Finished runs are kept, so the same command continues an interrupted sweep. Examples:

      uneven bench sweep --quick

      uneven bench sweep --models logistic,mlp,lenet --global-batch-size 64 --efficiency --out runs/mnist

      uneven bench sweep --models resnet-20 --devices cuda:0%60,cuda:0%24 --compile graph --seeds 3

      uneven bench sweep --models gpt-nano --devices cuda:0%60,cuda:0%24 --compile graph --jobs 4
    """
    from uneven.bench.sweep.plan import SweepOrder

    order = SweepOrder(
        models=_names(models, "--models"),
        modes=_names(modes, "--modes"),
        seeds=seeds,
        devices=devices,
        is_quick=quick,
        data=data,
        samples=samples,
        epochs=epochs,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        lr_scale=lr_scale,
        precision=precision,
        compile=compile,
        has_efficiency=efficiency,
        has_equal_time=equal_time,
        out=out,
        is_forced=force,
        jobs=jobs,
        command=shlex.join(["uneven", *sys.argv[1:]]),
    )
    if dry:
        _print_plan(order, as_json)
        return
    order, outcome = _run(order, is_quiet=as_json)
    _print_outcome(order, outcome, as_json)
    if outcome.failed:
        raise RankError(f"{len(outcome.failed)} of {len(outcome.failed) + len(outcome.done)} runs failed")


def _run(order: "SweepOrder", is_quiet: bool) -> tuple["SweepOrder", "Outcome"]:
    from uneven.bench.sweep.run import provide
    from uneven.bench.sweep.run import sweep as run_sweep

    def tell(line: str) -> None:
        if not is_quiet:
            print(line, file=sys.stderr, flush=True)

    def tell_run(name: str, number: int, many: int, seconds: float) -> None:
        left = f" about {seconds / number * (many - number) / 60:.0f} min left" if number else ""
        tell(f"{number + 1}/{many} {name}{left}")

    try:
        provide(order, tell)
        return order, run_sweep(order, tell_run)
    except KeyboardInterrupt:
        say(f"stopped; finished runs are kept in {order.out}, the same command goes on")
        raise


def _print_plan(order: "SweepOrder", as_json: bool) -> None:
    from uneven.bench.sweep.plan import plan_equal_time, plan_sweep
    from uneven.bench.sweep.run import find_missing

    cells, skipped = plan_sweep(order)
    longer = plan_equal_time(order, cells)
    missing = [*find_missing(order, cells), *find_missing(order, longer)]
    cells += longer
    if as_json:
        kept = [cell.name for cell in cells if cell not in missing]
        print_json(Planned([cell.name for cell in missing], kept, {one.mode: one.reason for one in skipped}))
        return
    lines = [f"{'run ' if cell in missing else 'kept'}  {cell.name}" for cell in cells]
    print("\n".join([*lines, *(f"not   {left_out.mode}: {left_out.reason}" for left_out in skipped)]))


def _print_outcome(order: "SweepOrder", outcome: "Outcome", as_json: bool) -> None:
    if as_json:
        skipped = {one.mode: one.reason for one in outcome.skipped}
        print_json(Swept(outcome.done, outcome.kept, outcome.failed, outcome.disturbed, skipped))
        return
    print(f"{len(outcome.done)} runs done, {len(outcome.kept)} kept, {len(outcome.failed)} failed, in {order.out}")
    for left_out in outcome.skipped:
        print(f"not run: {left_out.mode}: {left_out.reason}")
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}")
    for name in outcome.disturbed:
        print(f"disturbed by other programs, its speed is marked: {name}")
    print(f"next: uneven bench report {order.out}")


def policies(
    script: Annotated[Path, typer.Argument(help="Your script, which trains with uneven.")],
    args: options.ScriptArgs = None,
    module: options.Module = False,
    devices: Annotated[str, typer.Option(help="As in cpu,cpu@0.4 or auto.")] = "auto",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data, in each policy.")] = 3,
    policies: Annotated[str | None, typer.Option(help="Only these, as in balanced,async.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same for all.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder; a run goes into POLICY below it.")] = Path("runs") / "policies",
    as_json: Json = False,
) -> None:
    """Train your own script with each policy: loss, time, efficiency, and which policy to take.

    The epochs given here take precedence over the script's; a loop of your own runs over range(ddp.epochs).

    Examples:

      uneven bench policies train.py --devices cuda:0,cuda:1 --epochs 3

      uneven bench policies examples/fit.py --devices cpu,cpu@0.4 --policies balanced,async
    """
    from uneven.bench.policies import ALL, PoliciesOrder, Trial, try_policies

    chosen = _names(policies, "--policies") or ALL
    found = find_script(script, args or [], module)
    order = PoliciesOrder(script=found, devices=devices, epochs=epochs, policies=chosen, seed=seed, out=out)
    trial = Trial()
    is_cut = False
    try:
        try_policies(order, trial, lambda policy: None if as_json else print(f"training: {policy}", file=sys.stderr))
    except KeyboardInterrupt:
        is_cut = True
    if as_json:
        print_json(trial.to_json())
    elif trial.rows or not is_cut:
        _print_trial(trial)
    if is_cut:
        done = {row.policy for row in trial.rows}
        say(f"stopped; not finished: {', '.join(one for one in chosen if one not in done)}")
        raise typer.Exit(130)
    if trial.failed:
        raise RankError("\n".join(f"{policy}: {why}" for policy, why in trial.failed.items()))


def _print_trial(trial: "Trial") -> None:
    from uneven.bench.undisturbed import FOOTNOTE, mark

    names = list(dict.fromkeys(name for row in trial.rows for name in row.metrics))
    table = new_table("policy", "loss", *names, "train s", "samples/s", "efficiency", left=("policy",))
    for row in trial.rows:
        found = [f"{row.metrics[name]:.4f}" if name in row.metrics else "" for name in names]
        efficiency = "" if row.efficiency is None else f"~{row.efficiency:.2f}"
        figures = (f"{row.train_s:.1f}", f"{row.samples_per_s:,.0f}", efficiency)
        table.add_row(row.policy, f"{row.loss:.4f}", *found, *(mark(figure, row.is_disturbed) for figure in figures))
    console = new_console()
    print_whole(console, table)
    if any(row.is_disturbed for row in trial.rows):
        console.print(f"\n{FOOTNOTE}, and none is recommended")
    if trial.recommended is not None:
        policy, reason = trial.recommended
        console.print(f"\nRecommended: {policy} ({reason}).")


def _names(text: str | None, option: str) -> tuple[str, ...] | None:
    """Each name once; None where the option was not given."""
    if text is None:
        return None
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise InputError(f"{option} {text!r} has no name")
    return found
