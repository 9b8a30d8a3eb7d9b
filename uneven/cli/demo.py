"""`uneven demo`: LeNet on the embedded digits in every mode, on two devices that do not match, with no network."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli.output import Json, print_json
from uneven.errors import STOPPED, TERMINATED, InputError, MachineError, RankError, Terminated
from uneven.format import format_count

if TYPE_CHECKING:
    from rich.table import Table

    from uneven.bench.demo import DemoDocument, DemoOrder, Results


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 10,000 digits, in each mode.")] = 3,
    devices: Annotated[str, typer.Option(help="Two or more; @0.4 makes one slower by sleeping.")] = "cpu,cpu@0.4",
    modes: Annotated[
        str | None,
        typer.Option(help="Only these, as in solo-0,solo-1,cpu-async.", show_default="all"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Train on the first N digits only.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and order.")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time budget: a slow machine trains fewer digits in each mode.")
    ] = 4.0,
    repeat: Annotated[bool, typer.Option("--repeat/--no-repeat", help="Measure a disturbed mode again.")] = True,
    out: Annotated[Path, typer.Option(help="Folder; a run goes into lenet/MODE/seed-S below it.")] = Path("runs")
    / "demo",
    as_json: Json = False,
) -> None:
    """Train LeNet on 10,000 real digits on a fast and a slow device: each alone, by PyTorch's DDP, by uneven.

    The devices are simulated on this machine's cores, the digits are in the package; about three minutes on two cores.
    Where that is too long for --minutes, each mode trains fewer digits, and one that has no time after all is named.
    A mode that other programs disturbed is measured again where the budget allows it, else marked. Ctrl-C shows what is
    finished by then. Exit codes: 0 done, 1 a mode failed, 2 bad input, 3 this machine cannot, 130 stopped. Examples:

      uneven demo

      uneven demo --devices cpu,cpu@0.25 --modes solo-0,solo-1,torch-ddp,cpu-async
    """
    from uneven.bench.demo import DemoOrder, check, threads, train_modes
    from uneven.bench.demo_length import fit_length
    from uneven.bench.demo_page import write_demo_page
    from uneven.bench.single.modes import limit_threads

    order = DemoOrder(
        devices=devices,
        modes=None if modes is None else tuple(mode.strip() for mode in modes.split(",")),
        epochs=epochs,
        samples=samples,
        seed=seed,
        out=out,
        progress="off" if as_json else "auto",
        budget_s=60 * minutes,
        repeats=repeat,
    )
    results = check(order)
    limit_threads(threads(order))  # before torch is loaded
    if not as_json:
        _announce(order, results)
    end: BaseException | None = None
    try:
        order = fit_length(order, results)
        if results.shortened is not None and not as_json:
            print(f"Note: {results.shortened}", file=sys.stderr, flush=True)
        train_modes(order, results, (lambda _: None) if as_json else _print_progress)
    except (KeyboardInterrupt, Terminated, InputError, MachineError) as error:
        if not results.summaries and not isinstance(error, KeyboardInterrupt | Terminated):
            raise
        end = error
    is_interrupted = isinstance(end, KeyboardInterrupt | Terminated)
    page = write_demo_page(order, results)
    (_print_json if as_json else _print)(order, results, is_interrupted, page)
    if is_interrupted:
        raise typer.Exit(TERMINATED if isinstance(end, Terminated) else STOPPED)
    if end is not None:
        raise end
    if results.failures:
        raise RankError("\n".join(f"{mode}: {why}" for mode, why in results.failures.items()))


def _announce(order: "DemoOrder", results: "Results") -> None:
    from uneven.bench.demo import notes

    epochs, modes = format_count(order.epochs, "epoch"), format_count(len(results.modes), "mode")
    lines = [f"LeNet on the digits inside the package, {epochs}, {modes} on {order.devices}"]
    lines += [f"Note: {note}" for note in notes(order)]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _print_progress(line: str) -> None:
    """Where there is no terminal; there the bars show it."""
    if not sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def _print_json(order: "DemoOrder", results: "Results", is_interrupted: bool, page: Path | None) -> None:
    from uneven.bench.demo import notes

    document: DemoDocument = {
        **results.to_json(),
        "epochs": order.epochs,
        "samples": order.samples,
        "seed": order.seed,
        "out": str(order.out),
        "notes": [*notes(order), *([] if results.shortened is None else [results.shortened])],
        "interrupted": is_interrupted,
        "page": None if page is None else str(page),
    }
    print_json(document)


def _print(order: "DemoOrder", results: "Results", is_interrupted: bool, page: Path | None) -> None:
    from rich.console import Console

    # In a pipe lines stay whole, so that a path in one can be used.
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    if results.summaries:
        console.print(_table(results))
        console.print("\n".join(_explanations(order, results, page)))
    for mode, reason in results.not_run.items():
        if not is_interrupted or mode in {**results.failures, **results.skipped}:
            console.print(f"not measured: {mode} ({reason})")
    if is_interrupted:
        console.print(_describe_unfinished(order, results))


def _table(results: "Results") -> "Table":
    from rich import box
    from rich.table import Table

    from uneven.bench.undisturbed import mark

    rows, is_compared = results.rows, results.alone is not None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mode", no_wrap=True)
    for heading in ("accuracy", "time", *(["speed-up", "efficiency"] if is_compared else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"share {' : '.join(results.devices)}", justify="right")
    for row in rows:
        cells = [row.mode, f"{100 * row.accuracy:.2f} %", mark(f"{row.seconds:.1f} s", row.is_disturbed)]
        if row.speedup is not None and row.efficiency is not None:
            is_marked = row.is_disturbed or results.undisturbed_alone is None
            cells += [mark(f"{row.speedup:.2f}x", is_marked), mark(f"~{100 * row.efficiency:.0f} %", is_marked)]
        shares = " : ".join(f"{100 * share:.0f}" for share in row.shares)
        table.add_row(*cells, f"{shares} %")
    return table


def _explanations(order: "DemoOrder", results: "Results", page: Path | None) -> list[str]:
    from uneven.bench.undisturbed import FOOTNOTE
    from uneven.hardware.yardstick import Yardstick

    lines = [line for line in (results.sentence, results.caution, results.doubt) if line is not None]
    lines += [""] if lines else []
    lines += [FOOTNOTE] if results.disturbed else []
    lines.append("time: training alone, without start-up and evaluation")
    if results.alone is not None:
        clean = results.undisturbed_alone
        measured_gap = "" if clean is None else f"; measured gap between the devices: {Yardstick.of(clean).gap:.2f}"
        lines += [
            f"speed-up: over the fast device alone{measured_gap}",
            "efficiency: of the devices' solo speeds, added up; ~ because the runs came one after the other and "
            "whatever else the machine did counts too ('uneven bench efficiency' measures it)",
        ]
    if page is not None:
        lines.append(f"as a page, with PyTorch's DDP and ours on one time axis: {page}")
    elif find_spec("bokeh") is None:
        lines.append("for this as a page, with every device's time: pip install 'uneven[pages]'")
    return [
        *lines,
        f"trained states, metrics and timelines: {order.out}",
        "next: uneven devices --measure (what this machine's own devices could do together), uneven bench list",
    ]


def _describe_unfinished(order: "DemoOrder", results: "Results") -> str:
    from uneven.bench.demo import folder_of

    known = {**results.summaries, **results.failures, **results.skipped}
    missing = [mode for mode in results.modes if mode not in known]
    if not missing:
        return "interrupted after the last mode"
    line = f"interrupted; not finished: {', '.join(missing)}"
    folder = folder_of(order, missing[0])
    is_kept = (folder / "state.json").exists() and not (folder / "summary.json").exists()
    return f"{line} (what {missing[0]} had learned is in {folder})" if is_kept else line
