"""`uneven bench sweep`, `report`, `compare`, `check`, `policies`: many runs, and their comparison."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli import bench_options as options
from uneven.cli.sweep_bar import SweepBar
from uneven.cli.tables import print_whole
from uneven.errors import InputError, RankError
from uneven.files import json_text

if TYPE_CHECKING:
    from uneven.bench.policies import Trial
    from uneven.bench.sweep.plan import SweepOrder
    from uneven.bench.sweep.run import Outcome

Json = Annotated[bool, typer.Option("--json", help="One JSON object; no progress.")]
EqualTime = Annotated[
    bool, typer.Option("--equal-time", help="Also runs with as many epochs as fit the best single device's time.")
]
Jobs = Annotated[
    int, typer.Option(min=1, help="On GPUs: seeds after the first run N at a time, for their quality only.")
]


def sweep(
    models: Annotated[str | None, typer.Option(help="Only these, as in lenet,mlp.", show_default="all")] = None,
    modes: Annotated[str | None, typer.Option(help="Only these, as in solo-0,cpu-async.", show_default="all")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each mode; default: 5, 1 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="LeNet and gpt-nano, a few samples, one seed.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All models with their own data and epochs (default).")] = False,
    devices: Annotated[str, typer.Option(help="Two or more, as in cuda:0,cuda:1.")] = "cpu,cpu@0.4",
    data: Annotated[str | None, typer.Option(help="In place of mnist, such as mnist-mini.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Train on the first N samples only.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: each model's own; 2 with --quick.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Per device; default: each model's own.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(min=1, help="Of a step of the exact modes and DDP.")] = None,
    lr_scale: Annotated[float | None, typer.Option(help="Multiplies the lr of the exact modes and DDP.")] = None,
    precision: options.Precision = "fp32",
    compile: options.Compile = "off",
    efficiency: Annotated[bool, typer.Option("--efficiency", help="Measure it by pairs too, minutes each.")] = False,
    equal_time: EqualTime = False,
    out: Annotated[Path, typer.Option(help="Folder; a run goes into MODEL/MODE/seed-S below it.")] = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Repeat finished runs.")] = False,
    jobs: Jobs = 1,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only list what would run.")] = False,
    as_json: Json = False,
) -> None:
    """Every model in every mode that the hardware allows, one fresh process per run; then: uneven bench report.

    Finished runs are kept, so a sweep that was interrupted goes on where it stopped. Examples:

      uneven bench sweep --quick

      uneven bench sweep --models logistic,mlp,lenet --global-batch-size 64 --efficiency --out runs/mnist

      uneven bench sweep --models resnet-20 --devices cuda:0%60,cuda:0%24 --compile graph --seeds 3

      uneven bench sweep --models gpt-nano --devices cuda:0%60,cuda:0%24 --compile graph --jobs 4
    """
    from uneven.bench.sweep.plan import SweepOrder

    if quick and full:
        raise InputError("--quick and --full: choose one")
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

    try:
        with SweepBar(is_quiet) as bar:
            order = provide(order, bar.print_line)
            return order, run_sweep(order, bar.show_run)
    except KeyboardInterrupt:
        print(f"uneven: stopped; finished runs are kept in {order.out}, the same command goes on", file=sys.stderr)
        raise


def _print_plan(order: "SweepOrder", as_json: bool) -> None:
    from uneven.bench.sweep.plan import plan_equal_time, plan_sweep
    from uneven.bench.sweep.run import find_missing, with_present_text

    order = with_present_text(order)
    cells, skipped = plan_sweep(order)
    longer = plan_equal_time(order, cells)
    missing = [*find_missing(order, cells), *find_missing(order, longer)]
    cells += longer
    if as_json:
        names = {"run": missing, "kept": [cell for cell in cells if cell not in missing]}
        planned = {key: [cell.name for cell in some] for key, some in names.items()}
        print(json_text({**planned, "skipped": {one.mode: one.reason for one in skipped}}))
        return
    lines = [f"{'run ' if cell in missing else 'kept'}  {cell.name}" for cell in cells]
    print("\n".join([*lines, *(f"not   {left_out.mode}: {left_out.reason}" for left_out in skipped)]))


def _print_outcome(order: "SweepOrder", outcome: "Outcome", as_json: bool) -> None:
    if as_json:
        print(json_text(outcome.to_json()))
        return
    print(f"{len(outcome.done)} runs done, {len(outcome.kept)} kept, {len(outcome.failed)} failed, in {order.out}")
    for left_out in outcome.skipped:
        print(f"not run: {left_out.mode}: {left_out.reason}")
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}")
    for name in outcome.disturbed:
        print(f"disturbed by other programs, its speed is marked: {name}")
    print(f"next: uneven bench report {order.out}")


def report(
    runs: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="report.md or report.html; default: Markdown on the screen.")] = None,
    as_json: Json = False,
) -> None:
    """Quality over seeds, speed, efficiency and where the time went, per model and mode.

    Examples:

      uneven bench report runs

      uneven bench report runs --out report.html
    """
    from uneven.bench.report.build import build_report, write_report
    from uneven.bench.report.sections import render_markdown

    if out is not None and out.suffix not in (".md", ".html"):
        raise InputError(f"--out {out}: a report is .md or .html")
    found = build_report(runs)
    if as_json:
        print(json_text(found.to_json()))
    elif out is None:
        print(render_markdown(found), end="")
    if out is None:
        return
    text = render_markdown(found)
    if out.suffix == ".html":
        from uneven.bench.report.page import render_page

        text = render_page(found, out.parent)
    write_report(out, text)
    print(f"wrote {out}", file=sys.stderr)


def compare(
    first: Annotated[Path, typer.Argument(help="A run folder or a sweep's.")],
    second: Annotated[Path, typer.Argument(help="The one that may be better.")],
    as_json: Json = False,
) -> None:
    """Is the second better? Quality and speed, paired over the seeds that both have.

    Examples:

      uneven bench compare runs/before runs/after

      uneven bench compare runs/lenet/cpu-async/seed-0 runs/lenet/cpu-cadence/seed-0
    """
    from uneven.bench.report.compare import compare as differences
    from uneven.bench.undisturbed import FOOTNOTE, mark

    found = differences(first, second)
    if as_json:
        print(json_text([difference.to_json() for difference in found]))
        return
    for row in found:
        half = "" if row.quality_half == float("inf") else f" +- {row.quality_half:.4f}"
        speed_half = "" if row.speed_half == float("inf") else f" +- {row.speed_half:.3f}"
        pairs = f"{row.pairs} pair{'s' * (row.pairs > 1)}"
        speed = mark(f"x{row.speed:.3f}{speed_half}", row.is_disturbed)
        print(f"{row.model} {row.mode}: quality {row.quality:+.4f}{half}, speed {speed} ({pairs}); {row.verdict}")
    if any(row.is_disturbed for row in found):
        print(FOOTNOTE)


def pack(
    runs: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="Folder; a run becomes MODEL/MODE/seed-S.json below it.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Finished runs as small files to publish: settings, history, times, versions; no weights.

    `report`, `compare` and `check` read them as they read the runs.

    Examples:

      uneven bench pack runs --out results
    """
    from uneven.bench.report.pack import pack as pack_runs

    files = pack_runs(runs, out)
    size = sum(path.stat().st_size for path in files)
    if as_json:
        print(json_text({"files": [str(path) for path in files], "bytes": size}))
    else:
        print(f"wrote {len(files)} files, {size / 1e3:,.0f} kB, in {out}")


def check(
    runs: Annotated[Path, typer.Argument(help="A folder of runs, or of packed ones.")] = Path("runs"),
    baseline: Annotated[Path | None, typer.Option(help="Hold the runs against this instead.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write these runs as a baseline instead.")] = None,
    as_json: Json = False,
) -> None:
    """A gate: fails (exit code 1) where a model and mode is worse than what was published, or than a baseline.

    Without --baseline, quality is held against the published figure, against one device alone (or PyTorch's DDP at the
    same batch), and at equal time; packed results also against their checksums. Runs of less than a tenth of their
    recipe's epochs are "short": their quality is held against nothing. With --baseline, quality and efficiency are held
    against those of other runs.

    Examples:

      uneven bench check runs

      uneven bench check runs --save baseline.json

      uneven bench check runs --baseline baseline.json
    """
    from uneven.bench.report.compare import check as faults_of
    from uneven.bench.report.compare import write_baseline

    if baseline is not None and save is not None:
        raise InputError("pass either --baseline FILE, to check, or --save FILE, to make one")
    if save is not None:
        write_baseline(runs, save)
        print(f"wrote {save}", file=sys.stderr)
        if as_json:
            print(json_text({"baseline": str(save), "faults": []}))
        return
    if baseline is None:
        _check_references(runs, as_json)
        return
    faults = faults_of(runs, baseline)
    if as_json:
        print(json_text({"faults": faults}))
    elif not faults:
        print("no worse than the baseline")
    if faults:
        raise RankError("worse than the baseline:\n" + "\n".join(f"  {fault}" for fault in faults))


def _check_references(runs: Path, as_json: bool) -> None:
    """Every mode against what was published and one device alone, as a table."""
    from uneven.bench.report.references import compare_with_references

    rows, broken = compare_with_references(runs)
    faults = [*broken, *(f"{row.model} {row.mode}: {fault}" for row in rows for fault in row.faults)]
    if as_json:
        print(json_text({"faults": faults, "rows": [row.to_json() for row in rows]}))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold")
        for heading in ("", "model", "mode", "seeds", "quality", "at worst", "reference", "timed"):
            is_name = heading in ("model", "mode", "reference", "")
            table.add_column(heading, justify="left" if is_name else "right", no_wrap=True)
        for row in rows:
            published = "" if row.published is None else f"{row.published:g}"
            other = "" if row.reference_quality is None else f"{row.reference} {row.reference_quality:.4g}"
            equal = "" if row.equal_time is None or row.mode.startswith("solo-") else f"{row.equal_time:.4g}"
            verdict = "fails" if row.faults else "short" if row.is_short else "holds"
            table.add_row(verdict, row.model, row.mode, str(row.seeds), f"{row.quality:.4g}", published, other, equal)
        print_whole(Console(highlight=False, markup=False, emoji=False), table)
    if faults:
        raise RankError("does not hold:\n" + "\n".join(f"  {fault}" for fault in faults))


def policies(
    script: Annotated[Path, typer.Argument(help="A script of yours that trains by uneven.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments; its options after --.")] = None,
    devices: Annotated[str, typer.Option(help="As in cpu,cpu@0.4 or auto.")] = "auto",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data, in each policy.")] = 3,
    policies: Annotated[str | None, typer.Option(help="Only these, as in balanced,async.", show_default="all")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same for all.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder; a run goes into POLICY below it.")] = Path("runs") / "policies",
    as_json: Json = False,
) -> None:
    """Your own script under each policy, on your devices: loss, time, efficiency, and which one to take.

    The epochs given here take precedence over the script's; a loop of your own runs over range(ddp.epochs).

    Examples:

      uneven bench policies train.py --devices cuda:0,cuda:1 --epochs 3

      uneven bench policies examples/fit.py --devices cpu,cpu@0.4 --policies balanced,async
    """
    from uneven.bench.policies import ALL, PoliciesOrder, Trial, try_policies

    chosen = _names(policies, "--policies") or ALL
    order = PoliciesOrder(
        script=script, args=tuple(args or ()), devices=devices, epochs=epochs, policies=chosen, seed=seed, out=out
    )
    trial = Trial()
    is_cut = False
    try:
        try_policies(order, trial, lambda policy: None if as_json else print(f"training: {policy}", file=sys.stderr))
    except KeyboardInterrupt:
        is_cut = True
    if as_json:
        print(json_text(trial.to_json()))
    else:
        _print_trial(trial)
    if is_cut:
        raise typer.Exit(130)
    if trial.failed:
        raise RankError("\n".join(f"{policy}: {why}" for policy, why in trial.failed.items()))


def _print_trial(trial: "Trial") -> None:
    from rich.console import Console
    from rich.table import Table

    from uneven.bench.undisturbed import FOOTNOTE, mark

    names = list(dict.fromkeys(name for row in trial.rows for name in row.metrics))
    table = Table(box=None, header_style="bold")
    for heading in ("policy", "loss", *names, "train s", "samples/s", "efficiency"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in trial.rows:
        found = [f"{row.metrics[name]:.4f}" if name in row.metrics else "" for name in names]
        efficiency = "" if row.efficiency is None else f"~{row.efficiency:.2f}"
        figures = (f"{row.train_s:.1f}", f"{row.samples_per_s:,.0f}", efficiency)
        table.add_row(row.policy, f"{row.loss:.4f}", *found, *(mark(figure, row.is_disturbed) for figure in figures))
    console = Console(highlight=False, markup=False, emoji=False)
    print_whole(console, table)
    if any(row.is_disturbed for row in trial.rows):
        console.print(f"\n{FOOTNOTE}, and none is recommended", markup=False)
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
