"""`uneven bench strategies`: memory, traffic and time of every strategy, ours and PyTorch's."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.output import new_console, new_table, print_json
from uneven.config.text import numbers
from uneven.errors import InputError

if TYPE_CHECKING:
    from uneven.bench.strategies.measure import Paired, StrategyRow


def strategies(
    quick: Annotated[bool, typer.Option("--quick", help="A small model, 2 ranks, few steps; about a minute.")] = False,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks.", show_default="4, or one per share")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="gpt (25 M params), gpt-medium (5 M), gpt-small (1 M) or gpt-tiny.", show_default="gpt"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or one GPU that all ranks share, as in cuda:0.")] = "cpu",
    shares: Annotated[
        str | None, typer.Option(help="Of memory, one per rank, as in 15,6.", show_default="equal")
    ] = None,
    redundancy: Annotated[int, typer.Option(min=0, max=1, help="Copies of a shard; zero1, zero2 and fsdp.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Of each row; with --paired, of a segment.", show_default="6, paired 3")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Rows, as in fsdp,torch-fsdp.", show_default="all")] = None,
    paired: Annotated[
        bool, typer.Option("--paired", help="Instead: speed against PyTorch's, in turn, on 2 ranks.")
    ] = False,
    pairs: Annotated[int, typer.Option(min=2, help="With --paired: pairs of segments.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with every rank; no progress.")] = False,
) -> None:
    """Memory (measured and by the formula), traffic and time of every strategy, and whether it trains the same model as
    one rank alone. Fresh processes for every row.

    Exit codes: 0 done, 1 a row failed or trained another model, 2 bad input, 3 this machine cannot. Examples:

      uneven bench strategies --quick

      uneven bench strategies --nproc 4 --only fsdp,torch-fsdp

      uneven bench strategies --shares 15,6 --only zero1,zero2,fsdp,tensor

      uneven bench strategies --paired --pairs 60
    """
    from uneven.bench.strategies import measure as bench

    memory = None if shares is None else numbers("--shares", shares)
    if memory is not None and nproc not in (None, len(memory)):
        raise InputError(f"--nproc {nproc} with --shares {shares}: give one share per rank, or leave --nproc out")
    if paired and memory is not None:
        raise InputError("--paired with --shares: PyTorch's strategies have equal shares only; leave --shares out")
    if paired and redundancy:
        raise InputError("--paired with --redundancy: PyTorch's strategies keep no copies; leave --redundancy out")
    order = bench.StrategiesOrder(
        model=model or ("gpt-small" if quick else "gpt-medium" if paired else "gpt"),
        device=device,
        ranks=nproc or (len(memory) if memory else 2 if quick or paired else 4),
        shares=memory,
        steps=steps or (3 if paired else 4 if quick else 6),
        only=None if only is None else tuple(only.split(",")),
        is_quick=quick,
        pairs=pairs,
        redundancy=redundancy,
    )

    def tell(line: str) -> None:
        if not as_json:
            print(line, file=sys.stderr)

    if paired:
        ratios = bench.measure_pairs(order, tell)
        print_json(bench.pairs_to_json(order, ratios)) if as_json else _print_pairs(ratios)
        return
    rows = bench.measure_strategies(order, tell)
    if as_json:
        print_json(bench.rows_to_json(order, rows))
    else:
        _print_rows(rows, has_shares=memory is not None)
    if not all(row.is_good for row in rows):
        raise typer.Exit(1)


def _print_rows(rows: "Sequence[StrategyRow]", *, has_shares: bool) -> None:
    console = new_console(100)
    good = [row for row in rows if row.cause is None]
    console.print("MB on the rank that holds most: measured/by the formula\n")
    console.print(_memory_table(good))
    console.print("\nPer step; MB sent by a rank\n")
    console.print(_step_table(good))
    if any(_waits_most(row) is not None for row in good):
        console.print("\nCollectives, ms a step of the rank that waits longest: hidden behind its work, or exposed\n")
        console.print(_communication_table(good))
    _print_footnote(console, good)
    if has_shares:
        console.print("\nOf what is cut, each rank holds\n")
        console.print(_parts_table(good))
    for row in rows:
        if row.cause is not None:
            console.print(f"\n{row.name} failed: {row.cause}")
        for name in sorted({name for rank in row.ranks for name in rank["unequal"]}):
            console.print(f"\n{row.name}: {name} is not the same on all ranks")


def _table(*headings: str) -> Any:
    return new_table(*headings, left=headings[:1], no_wrap=True, padding=(0, 1, 0, 0))


def _mb(number: float | None, digits: int = 1) -> str:
    return "-" if number is None else f"{number / 1e6:.{digits}f}"


def _memory_table(rows: "Sequence[StrategyRow]") -> Any:
    table = _table("", "params", "gradients", "state", "other", "all", "off", "+step", "peak", "RSS")
    for row in rows:
        found = row.largest
        held, predicted = found["held"], found["predicted"]
        total, expected = sum(held.values()), sum(predicted.values())
        table.add_row(
            row.name,
            *(f"{_mb(held[key])}/{_mb(predicted[key])}" for key in ("params", "gradients", "state")),
            _mb(held["other"]),
            f"{_mb(total)}/{_mb(expected)}",
            f"{total / expected - 1:+.1%}",
            _mb(found["peak"] - total),
            _mb(found["peak"]),
            _mb(found["rss"], 0),
        )
    return table


def _step_table(rows: "Sequence[StrategyRow]") -> Any:
    from uneven.bench.undisturbed import mark

    table = _table("", "wire", "payload", "ms", "loss", "off", "drift", "worst", "in sync")
    for row in rows:
        first = row.ranks[0]
        sent = [rank["wire"] for rank in row.ranks]
        table.add_row(
            row.name,
            _mb(None if None in sent else max(sent)),
            _mb(None if row.name.startswith("torch-") else max(rank["payload"] for rank in row.ranks)),
            mark(f"{1e3 * max(rank['seconds'] for rank in row.ranks):.0f}", row.is_disturbed),
            f"{first['losses'][-1]:.5f}",
            f"{row.loss_difference:+.1e}",
            f"{first['drift']:.1e}",
            f"{first['worst'][1]:.1e}",
            "yes" if row.is_in_sync else "NO",
        )
    return table


def _waits_most(row: "StrategyRow") -> dict[str, float] | None:
    """The rank's communication whose exposed part is largest; None where none was measured."""
    seen = [rank["communication"] for rank in row.ranks if rank.get("communication") is not None]
    return max(seen, key=lambda found: found["exposed_s"], default=None)


def _communication_table(rows: "Sequence[StrategyRow]") -> Any:
    from uneven.bench.undisturbed import mark

    table = _table("", "in flight", "hidden", "exposed")
    for row in rows:
        found = _waits_most(row)
        if found is None:
            table.add_row(row.name, "-", "-", "-")
            continue
        figures = (found[key] for key in ("in_flight_s", "hidden_s", "exposed_s"))
        table.add_row(row.name, *(mark(f"{1e3 * seconds:.1f}", row.is_disturbed) for seconds in figures))
    return table


def _parts_table(rows: "Sequence[StrategyRow]") -> Any:
    table = _table("", *(f"rank {rank}" for rank in range(max(len(row.ranks) for row in rows))))
    for row in rows:
        if row.is_sharded:
            table.add_row(row.name, *(f"{part:.1%}" for part in row.parts()))
    return table


def _print_pairs(found: "Sequence[Paired]") -> None:
    from uneven.bench.undisturbed import mark

    table = _table("", "against", "ms", "its ms", "ratio", "pairs", "at least as fast")
    for pair in found:
        mean, half = pair.interval()
        figures = (
            f"{1e3 * sum(pair.our_s) / len(pair.our_s):.0f}",
            f"{1e3 * sum(pair.their_s) / len(pair.their_s):.0f}",
            f"{mean:.3f} +- {half:.3f}",
        )
        marked = [mark(figure, pair.is_disturbed) for figure in figures]
        verdict = {True: "yes", False: "no", None: "-"}[pair.is_as_fast]
        table.add_row(pair.ours, pair.theirs, *marked, f"{len(pair.our_s)}", verdict)
    console = new_console()
    console.print("ratio: its time over ours; at least as fast: the interval lies above 0.97\n")
    console.print(table)
    _print_footnote(console, found)


def _print_footnote(console: Any, found: "Sequence[Paired | StrategyRow]") -> None:
    from uneven.bench.undisturbed import FOOTNOTE

    if any(measured.is_disturbed for measured in found):
        console.print(f"\n{FOOTNOTE}")
