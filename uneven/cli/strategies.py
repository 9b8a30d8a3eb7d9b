"""`uneven bench strategies`: memory, traffic and time of every strategy, ours and PyTorch's."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from uneven.bench.orders import StrategiesOrder
from uneven.cli.options import with_order
from uneven.cli.output import Json, new_console, new_table, print_json, teller

if TYPE_CHECKING:
    from uneven.bench.strategies.measure import Paired, StrategyRow


@with_order(StrategiesOrder)
def strategies(order: StrategiesOrder, as_json: Json = False) -> None:
    """Memory (measured and by the formula), traffic and time of every strategy, and whether it trains the same model as
    one rank alone. Fresh processes for every row.

    Exit codes: 0 done, 1 a row failed or trained another model, 2 bad input, 3 this machine cannot. Examples:

      uneven bench strategies --quick

      uneven bench strategies --nproc 4 --only fsdp,torch-fsdp

      uneven bench strategies --shares 15,6 --only zero1,zero2,fsdp,tensor

      uneven bench strategies --paired --pairs 60
    """
    from uneven.bench.strategies import measure as bench

    order, tell = bench.resolved(order), teller(as_json)
    if order.is_paired:
        pairs = bench.measure_pairs(order, tell)
        print_json(bench.PairsDocument(order, pairs)) if as_json else _print_pairs(pairs)
        return
    rows = bench.measure_strategies(order, tell)
    if as_json:
        print_json(bench.RowsDocument(order, rows))
    else:
        _print_rows(rows, has_shares=order.shares is not None)
    if not all(row.is_good for row in rows):
        raise typer.Exit(1)


def _print_rows(rows: "Sequence[StrategyRow]", *, has_shares: bool) -> None:
    good = [row for row in rows if row.cause is None]
    ranks = max((len(row.ranks) for row in good), default=0)
    memory = ("params", "gradients", "state", "other", "all", "off", "+step", "peak", "RSS")
    _print("MB on the rank that holds most: measured/by the formula\n", memory, map(_memory, good))
    steps = ("wire", "payload", "ms", "loss", "off", "drift", "worst", "in sync")
    _print("\nPer step; MB sent by a rank\n", steps, map(_step, good))
    if any(_waits_most(row) is not None for row in good):
        title = "\nCollectives, ms a step of the rank that waits longest: hidden behind its work, or exposed\n"
        _print(title, ("in flight", "hidden", "exposed"), map(_communication, good))
    _print_footnote(good)
    if has_shares:
        parts = [[row.name, *(f"{part:.1%}" for part in row.parts())] for row in good if row.is_sharded]
        _print("\nOf what is cut, each rank holds\n", [f"rank {rank}" for rank in range(ranks)], parts)
    for row in rows:
        if row.cause is not None:
            print(f"\n{row.name} failed: {row.cause}")
        for name in sorted({name for rank in row.ranks for name in rank["unequal"]}):
            print(f"\n{row.name}: {name} is not the same on all ranks")


def _print(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console = new_console(100)
    table = new_table("", *headings, left=("",), no_wrap=True, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(title)
    console.print(table)


def _mb(number: float | None, digits: int = 1) -> str:
    return "-" if number is None else f"{number / 1e6:.{digits}f}"


def _memory(row: "StrategyRow") -> list[str]:
    found = row.largest
    held, predicted = found["held"], found["predicted"]
    total, expected = sum(held.values()), sum(predicted.values())
    return [
        row.name,
        *(f"{_mb(held[key])}/{_mb(predicted[key])}" for key in ("params", "gradients", "state")),
        _mb(held["other"]),
        f"{_mb(total)}/{_mb(expected)}",
        f"{total / expected - 1:+.1%}",
        _mb(found["peak"] - total),
        _mb(found["peak"]),
        _mb(found["rss"], 0),
    ]


def _step(row: "StrategyRow") -> list[str]:
    from uneven.bench.undisturbed import mark

    first, sent = row.ranks[0], [rank["wire"] for rank in row.ranks]
    is_torchs = row.name.startswith("torch-")
    return [
        row.name,
        _mb(None if None in sent else max(sent)),
        _mb(None if is_torchs else max(rank["payload"] for rank in row.ranks)),
        mark(f"{1e3 * max(rank['seconds'] for rank in row.ranks):.0f}", row.is_disturbed),
        f"{first['losses'][-1]:.5f}",
        f"{row.loss_difference:+.1e}",
        f"{first['drift']:.1e}",
        f"{first['worst'][1]:.1e}",
        "yes" if row.is_in_sync else "NO",
    ]


def _waits_most(row: "StrategyRow") -> dict[str, float] | None:
    """The rank's communication whose exposed part is largest; None where none was measured."""
    seen = [rank["communication"] for rank in row.ranks if rank.get("communication") is not None]
    return max(seen, key=lambda found: found["exposed_s"], default=None)


def _communication(row: "StrategyRow") -> list[str]:
    from uneven.bench.undisturbed import mark

    found, names = _waits_most(row), ("in_flight_s", "hidden_s", "exposed_s")
    if found is None:
        return [row.name, "-", "-", "-"]
    return [row.name, *(mark(f"{1e3 * found[name]:.1f}", row.is_disturbed) for name in names)]


def _print_pairs(found: "Sequence[Paired]") -> None:
    from uneven.bench.undisturbed import mark

    rows = []
    for pair in found:
        mean, half = pair.interval
        times = [f"{1e3 * sum(own) / len(own):.0f}" for own in (pair.our_s, pair.their_s)]
        marked = [mark(figure, pair.is_disturbed) for figure in (*times, f"{mean:.3f} +- {half:.3f}")]
        verdict = {True: "yes", False: "no", None: "-"}[pair.is_as_fast]
        rows.append([pair.ours, pair.theirs, *marked, f"{len(pair.our_s)}", verdict])
    title = "ratio: its time over ours; at least as fast: the interval lies above 0.97\n"
    _print(title, ("against", "ms", "its ms", "ratio", "pairs", "at least as fast"), rows)
    _print_footnote(found)


def _print_footnote(found: "Sequence[Any]") -> None:
    from uneven.bench.undisturbed import FOOTNOTE

    if any(measured.is_disturbed for measured in found):
        print(f"\n{FOOTNOTE}")
