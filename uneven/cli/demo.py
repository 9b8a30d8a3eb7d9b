"""`uneven demo`: LeNet on the embedded digits in every mode, on two devices that do not match, with no network."""

import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from uneven.bench.orders import DemoOrder
from uneven.cli.options import with_order
from uneven.cli.output import Json, new_table, print_json, teller
from uneven.errors import STOPPED, TERMINATED, InputError, MachineError, RankError, Terminated
from uneven.format import format_count

if TYPE_CHECKING:
    from uneven.bench.demo import ModeRow, Results


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What --json prints."""

    devices: tuple[str, ...]
    modes: list["ModeRow"]
    sentence: str  # the verdict
    disturbed: list[str]
    failures: dict[str, str]  # mode: why
    skipped: dict[str, str]  # mode: why
    missing: list[str]
    epochs: int
    samples: int | None
    out: str
    notes: list[str]
    interrupted: bool
    page: str | None


@with_order(DemoOrder)
def demo(order: DemoOrder, as_json: Json = False) -> None:
    """Train LeNet on 10,000 real digits on a fast and a slow device: each alone, by PyTorch's DDP, by uneven.

    The devices are simulated on this machine's cores, the digits are in the package; about three minutes on two cores.
    Where that is too long for --minutes, each mode trains fewer digits, and one that has no time after all is named.
    A mode that other programs disturbed is measured again where the budget allows it, else marked. Ctrl-C shows what is
    finished by then. Exit codes: 0 done, 1 a mode failed, 2 bad input, 3 this machine cannot, 130 stopped. Examples:

      uneven demo

      uneven demo --devices cpu,cpu@0.25 --modes solo-0,solo-1,torch-ddp,cpu-async
    """
    from uneven.bench.demo import check, fit_length, notes, threads, train_modes
    from uneven.bench.modes import limit_threads

    order = replace(order, progress="off" if as_json else "auto")
    results = check(order)
    limit_threads(threads(order))  # before torch is loaded

    tell = teller(as_json)
    tell(f"LeNet on the digits inside the package, {format_count(len(results.modes), 'mode')} on {order.devices}")
    for note in notes(order):
        tell(f"Note: {note}")
    end: BaseException | None = None
    try:
        order = fit_length(order, results)
        if results.shortened is not None:
            tell(f"Note: {results.shortened}")
        # On a terminal the bars show it.
        train_modes(order, results, lambda line: None if sys.stderr.isatty() else tell(line))
    except (KeyboardInterrupt, Terminated, InputError, MachineError) as error:
        if not results.summaries and not isinstance(error, KeyboardInterrupt | Terminated):
            raise
        end = error
    is_interrupted = isinstance(end, KeyboardInterrupt | Terminated)
    _show(order, results, is_interrupted, as_json)
    if is_interrupted:
        raise typer.Exit(TERMINATED if isinstance(end, Terminated) else STOPPED)
    if end is not None:
        raise end
    if results.failures:
        raise RankError("\n".join(f"{mode}: {why}" for mode, why in results.failures.items()))


def _show(order: DemoOrder, results: "Results", is_interrupted: bool, as_json: bool) -> None:
    """The verdict, on the page and here."""
    from uneven.bench.demo import notes
    from uneven.bench.demo_page import demo_verdict, read_timelines, write_demo_page

    timelines = read_timelines(order, results)
    found = demo_verdict(results, timelines)
    page = write_demo_page(order, results, timelines, found)
    if as_json:
        document = Demo(
            devices=results.devices,
            modes=results.rows,
            sentence=found.sentence,
            disturbed=results.disturbed,
            failures=results.failures,
            skipped=results.skipped,
            missing=list(results.not_run),
            epochs=order.epochs,
            samples=order.samples,
            out=str(order.out),
            notes=[*notes(order), *([] if results.shortened is None else [results.shortened])],
            interrupted=is_interrupted,
            page=None if page is None else str(page),
        )
        print_json(document)
        return
    from rich.console import Console

    # In a pipe lines stay whole, so that a path in one can be used.
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    headings, rows = results.table()
    table = new_table(*headings, left=("mode",), no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if rows:
        console.print(table)
    lines = [" ".join(part for part in (found.sentence, found.rest) if part), "", *results.remarks()]
    if page is not None:
        lines.append(f"as a page, with PyTorch's DDP and ours on one time axis: {page}")
    elif find_spec("bokeh") is None:
        lines.append("for this as a page, with every device's time: pip install 'uneven[pages]'")
    lines.append(f"trained states, metrics and timelines: {order.out}")
    lines.append("next: uneven devices --measure (what this machine's own devices could do), uneven bench list")
    console.print("\n".join(lines))
