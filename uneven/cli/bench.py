"""`uneven bench`: run a benchmark model or several, measure how fast and how good they are, read the results.

Each verb is an order (bench/orders.py), a call and what it prints.
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.bench import orders
from uneven.cli.bench_results import check, report
from uneven.cli.options import Module, ScriptArgs, with_order
from uneven.cli.output import Json, new_table, print_json, print_whole, say, teller
from uneven.cli.strategies import strategies
from uneven.errors import STOPPED, RankError
from uneven.launch.find_script import find_script

if TYPE_CHECKING:
    from uneven.bench.policies import Trial
    from uneven.bench.scaling import Scaling
    from uneven.bench.single.folders import Summary
    from uneven.bench.sweep.plan import Cell, Skipped
    from uneven.bench.sweep.run import Outcome

app = typer.Typer(
    no_args_is_help=True,
    help="Train the benchmark models and measure them.",
    epilog="Example: uneven bench list",
)


@dataclass(frozen=True)
class ModelRow:
    """One benchmark model."""

    name: str
    title: str
    data: str
    params: int
    batch_size: int
    epochs: int
    metric: str
    published: float | None
    source: str | None  # of the published figure


@dataclass(frozen=True)
class Listed:
    """What list --json prints."""

    models: list[ModelRow]
    modes: tuple[str, ...]


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


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """The benchmark models and modes.

    Example: uneven bench list
    """
    from uneven.bench import models
    from uneven.bench.modes import NAMES

    rows = [
        ModelRow(
            name=one.name,
            title=one.title,
            data=one.data,
            params=one.num_params,
            batch_size=one.batch_size,
            epochs=one.epochs,
            metric=one.metric,
            published=one.published.value if one.published else None,
            source=one.published.source if one.published else None,
        )
        for one in map(models.get, models.NAMES + models.LARGE)
    ]
    if as_json:
        print_json(Listed(rows, NAMES))
        return
    headings = ("model", "data", "params", "batch", "epochs", "metric", "published")
    table = new_table(*headings, left=("model", "data", "metric", "published"))
    for row in rows:
        published = "-" if row.published is None else f"{row.published:g}"
        sizes = (f"{row.params:,}", f"{row.batch_size}", f"{row.epochs}")
        table.add_row(row.name, row.data, *sizes, row.metric, published)
    print_whole(table)
    print(f"\nmodes: {', '.join(NAMES)} (see --devices)\nnext:  uneven bench run --model lenet --data mnist-mini")


@app.command("run")
@with_order(orders.Order)
def run(order: orders.Order, as_json: Json = False) -> None:
    """Train one model in one mode and write its folder.

    Exit codes: 0 done, 1 a rank failed, 2 bad input, 3 this machine cannot, 130 stopped and saved. Examples:

      uneven bench run --model lenet --data mnist-mini

      uneven bench run --model lenet --data mnist-mini --mode cpu-balanced --devices cpu,cpu@0.4

      uneven bench run --model resnet-graph --mode sync --devices cpu,cpu@0.4 --samples 512 --epochs 1

      uneven bench run --model resnet-20 --devices cuda:0 --compile graph --seed 1
    """
    from uneven.bench.modes import limit_threads, resolve_mode

    limit_threads(len(resolve_mode(order.mode, order.devices).cores))  # before torch is loaded
    from uneven.bench.single.run import run_single

    summary = run_single(replace(order, progress="off" if as_json else "auto"))
    print_json(summary) if as_json else print(result_line(summary))


def result_line(summary: "Summary") -> str:
    """The outcome of one run; a second line where its time is disturbed."""
    from uneven.bench.undisturbed import FOOTNOTE, mark

    published = f" (published {summary.published:g})" if summary.published else ""
    seconds = mark(f"{summary.train_seconds:.1f} s", summary.is_disturbed)
    line = (
        f"{summary.model} {summary.mode} on {', '.join(summary.devices)}, {summary.data}: "
        f"{summary.metric} {summary.quality[summary.metric]:.4f}{published} in {seconds}"
    )
    return f"{line}\n{FOOTNOTE}" if summary.is_disturbed else line


@app.command("efficiency")
@with_order(orders.EfficiencyOrder)
def efficiency(order: orders.EfficiencyOrder, as_json: Json = False) -> None:
    """Joint speed over the sum of the devices' solo speeds, by alternating segments; a minute or more.

    Examples:

      uneven bench efficiency --model lenet --batch-size 256 --data mnist-mini

      uneven bench efficiency --model lenet --policy torch-ddp --devices cpu,cpu@0.4

      uneven bench efficiency --model resnet-20 --policy async --devices cuda:0%60,cuda:0%24 --compile graph
    """
    from uneven.bench.efficiency import PairsReporter, measure_efficiency, sentences

    reporter = PairsReporter("off" if as_json else "lines")
    try:
        result = measure_efficiency(order, reporter)
    finally:
        reporter.close()
    print_json(result) if as_json else print("\n".join(sentences(result)))


@app.command("sweep")
@with_order(orders.SweepOrder)
def sweep(
    order: orders.SweepOrder,
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
    from uneven.bench.sweep.run import planned, provide
    from uneven.bench.sweep.run import sweep as run_sweep

    if dry:
        _print_plan(*planned(order), as_json)
        return
    tell = teller(as_json)
    try:
        provide(order, tell)
        outcome = run_sweep(replace(order, command=shlex.join(["uneven", *sys.argv[1:]])), tell)
    except KeyboardInterrupt:
        say(f"stopped; finished runs are kept in {order.out}, the same command goes on")
        raise
    _print_outcome(outcome, order.out, as_json)
    if outcome.failed:
        raise RankError(f"{len(outcome.failed)} of {len(outcome.failed) + len(outcome.done)} runs failed")


def _print_plan(cells: "list[Cell]", missing: "list[Cell]", skipped: "list[Skipped]", as_json: bool) -> None:
    if as_json:
        kept = [cell.name for cell in cells if cell not in missing]
        print_json(Planned([cell.name for cell in missing], kept, {one.mode: one.reason for one in skipped}))
        return
    lines = [f"{'run ' if cell in missing else 'kept'}  {cell.name}" for cell in cells]
    print("\n".join([*lines, *(f"not   {left_out.mode}: {left_out.reason}" for left_out in skipped)]))


def _print_outcome(outcome: "Outcome", out: Path, as_json: bool) -> None:
    skipped = {one.mode: one.reason for one in outcome.skipped}
    if as_json:
        print_json(Swept(outcome.done, outcome.kept, outcome.failed, outcome.disturbed, skipped))
        return
    print(f"{len(outcome.done)} runs done, {len(outcome.kept)} kept, {len(outcome.failed)} failed, in {out}")
    lines = [f"not run: {mode}: {reason}" for mode, reason in skipped.items()]
    lines += [f"failed: {name}: {reason}" for name, reason in outcome.failed.items()]
    lines += [f"disturbed by other programs, its speed is marked: {name}" for name in outcome.disturbed]
    print("\n".join([*lines, f"next: uneven bench report {out}"]))


@app.command("policies")
@with_order(orders.PoliciesOrder)
def policies(
    script: Annotated[Path, typer.Argument(help="Your script, which trains with uneven.")],
    order: orders.PoliciesOrder,
    args: ScriptArgs = None,
    module: Module = False,
    as_json: Json = False,
) -> None:
    """Train your own script with each policy: loss, time, efficiency, and which policy to take.

    The epochs given here take precedence over the script's; a loop of your own runs over range(ddp.epochs).

    Examples:

      uneven bench policies train.py --devices cuda:0,cuda:1 --epochs 3

      uneven bench policies examples/fit.py --devices cpu,cpu@0.4 --policies balanced,async
    """
    from uneven.bench.policies import Trial, try_policies

    found, tell = find_script(script, args or [], module), teller(as_json)
    trial = Trial()
    is_cut = False
    try:
        try_policies(found, order, trial, lambda policy: tell(f"training: {policy}"))
    except KeyboardInterrupt:
        is_cut = True
    if as_json:
        print_json(trial)
    elif trial.policies or not is_cut:
        _print_trial(trial)
    if is_cut:
        done = {row.policy for row in trial.policies}
        say(f"stopped; not finished: {', '.join(one for one in order.policies if one not in done)}")
        raise typer.Exit(STOPPED)
    if trial.failed:
        raise RankError("\n".join(f"{policy}: {why}" for policy, why in trial.failed.items()))


def _print_trial(trial: "Trial") -> None:
    from uneven.bench.undisturbed import FOOTNOTE, mark

    names = list(dict.fromkeys(name for row in trial.policies for name in row.metrics))
    table = new_table("policy", "loss", *names, "train s", "samples/s", "efficiency", left=("policy",))
    for row in trial.policies:
        found = [f"{row.metrics[name]:.4f}" if name in row.metrics else "" for name in names]
        efficiency = "" if row.efficiency is None else f"~{row.efficiency:.2f}"
        figures = (f"{row.train_s:.1f}", f"{row.samples_per_s:,.0f}", efficiency)
        table.add_row(row.policy, f"{row.loss:.4f}", *found, *(mark(figure, row.is_disturbed) for figure in figures))
    print_whole(table)
    if any(row.is_disturbed for row in trial.policies):
        print(f"\n{FOOTNOTE}, and none is recommended")
    if trial.recommended is not None:
        print(f"\nRecommended: {trial.recommended.policy} ({trial.recommended.reason}).")


@app.command("scaling")
@with_order(orders.ScalingOrder)
def scaling(order: orders.ScalingOrder, as_json: Json = False) -> None:
    """Samples/s of 1, 2, ... ranks and the law Speedup = N / (1 + alpha (N - 1)) that fits them.

    Beside the fitted alpha stands the one that each run's timeline tells: communication and waiting over computation.

    Examples:

      uneven bench scaling --model lenet --data mnist-mini --ranks 1,2

      uneven bench scaling --model gpt-nano --samples 512 --repeats 5
    """
    from uneven.bench.scaling import measure_scaling

    found = measure_scaling(order, teller(as_json))
    print_json(found) if as_json else _print_scaling(found)


def _print_scaling(found: "Scaling") -> None:
    from uneven.bench.undisturbed import FOOTNOTE, mark

    headings = ("ranks", f"{found.unit}/s", "speed-up", "predicted", "off by")
    table = new_table(*headings, "comm / compute", "alpha", "by timeline")
    for point in found.points:
        half = "" if point.half_width == float("inf") else f" +- {point.half_width:,.0f}"
        predicted, off = "-", "-"
        if point.predicted is not None and not point.is_disturbed:
            predicted, off = f"{point.predicted:.2f}", f"{point.speedup / point.predicted - 1.0:+.1%}"
        figures = (f"{point.per_s:,.0f}{half}", f"{point.speedup:.2f}")
        told = (point.overhead, point.alpha, point.by_timeline)
        cells = ["-" if one is None else f"{one:.{digits}f}" for one, digits in zip(told, (3, 3, 2), strict=True)]
        table.add_row(str(point.ranks), *(mark(one, point.is_disturbed) for one in figures), predicted, off, *cells)
    print_whole(table)
    if any(one.is_disturbed for one in found.points):
        print(f"\n{FOOTNOTE}")
    if found.alpha is not None:
        print(f"\nSpeedup = N / (1 + {found.alpha:.3f} (N - 1))")


for verb in (report, check, strategies):
    app.command(verb.__name__)(verb)
