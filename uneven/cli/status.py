"""`uneven status`: the runs of this user on this machine, live and ended: where each is, and what each rank does."""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli import complete
from uneven.cli.options import run_argument
from uneven.cli.output import Json, new_console, new_table, print_json
from uneven.errors import InputError
from uneven.format import format_clock

if TYPE_CHECKING:
    from rich.containers import Renderables

    from uneven.launch.control.known_runs import KnownRun

Run = Annotated[
    str | None,
    run_argument("This run alone: its id or the beginning of it, a script, 'last', a folder.", complete.all_runs),
]
EVERY_S = 1.0
WIDTH = 160  # where the output is no terminal
GAP = 2  # spaces before each column of the ranks
HEADINGS = ("rank", "device", "machine", "share", "samples/s", "step", "round", "phase")
SPARE = ("round", "step", "machine", "phase", "share")  # left out where the terminal is narrow, the first one first


@dataclass(frozen=True)
class Listed:
    """What --json prints."""

    runs: list[dict[str, Any]]


def status(
    run: Run = None,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Ended runs, too: the last 100.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second.")] = False,
    as_json: Json = False,
) -> None:
    """Show your runs on this machine: for each rank its device, share of the samples, speed and what it does.

    These are runs of uneven run, of fit in a script or a notebook, and those that this machine has joined. Ranks
    started by torchrun, Slurm or another launcher are not listed. A run has the same id on all its machines. Exit
    codes: 0, also if no run is on; 2 RUN is not known.

    Examples:

      uneven status

      uneven status --all --json

      uneven status k3f9ad1 --watch
    """
    from uneven.launch.control.known_runs import choose_known, known_runs, live_runs

    if watch and as_json:
        raise InputError("--watch with --json: JSON is one document; call uneven status --json again and again")
    chosen = None if run is None else choose_known(run)

    def read() -> "list[KnownRun]":
        runs = known_runs() if show_all or chosen is not None else live_runs()
        return runs if chosen is None else [one for one in runs if one.id == chosen.id] or [chosen]

    if as_json:
        print_json(Listed([{**one.to_json(), "eta_s": _eta_s(one)} for one in read()]))
    elif watch:
        _watch(read, ends=chosen is not None)
    else:
        console = new_console(WIDTH)
        console.print(_picture(read(), show_all, console.width))


def _watch(read: Any, *, ends: bool) -> None:
    """Until Ctrl-C; where one run is meant, until it has ended. A pipe gets one picture below the other."""
    from rich.live import Live

    console = new_console(WIDTH)
    is_terminal = sys.stdout.isatty()  # elsewhere Live would show the last picture alone, at the end
    with Live(console=console, auto_refresh=False) if is_terminal else nullcontext() as live:
        while True:
            runs = read()
            picture = _picture(runs, any(not run.is_live for run in runs), console.width)
            if live is None:
                console.print(picture)
            else:
                live.update(picture, refresh=True)
            if ends and not any(run.is_live for run in runs):
                return
            time.sleep(EVERY_S)


def _picture(runs: "list[KnownRun]", has_ended: bool, width: int) -> "Renderables":
    from rich.containers import Renderables
    from rich.text import Text

    live, ended = [run for run in runs if run.is_live], [run for run in runs if not run.is_live]
    parts: list[Any] = []
    for run in live:
        table = [_rank_table(run.record, width)] if run.record.get("ranks") else []  # none while it waits for machines
        parts += [_heading(run), *table, Text()]
    if not live and not ended:
        parts.append(
            Text("no run of yours is on here" + ("" if has_ended else "; uneven status --all shows ended ones"))
        )
    if ended:
        parts.append(_ended_table(ended))
    return Renderables(parts)


def _heading(run: "KnownRun") -> Any:
    from rich.text import Text

    record = run.record
    since = format_clock(time.time() - float(record.get("since") or time.time()))
    words = [f"{run.id}  {record.get('script') or 'fit'}", f"pid {record['pid']}", f"on for {since}"]
    words += [f"led on {run.leader}"] if run.leader else []
    lines = ["  ".join(words)]
    place = [str(record.get("policy") or record.get("phase") or "starting")]
    if record.get("epoch"):
        place.append(f"epoch {record['epoch']}/{record.get('epochs')}")
    if record.get("has_begun"):
        steps = f"/{record['steps']:,}" if record.get("steps") else ""
        total = f"/{record['total']:,}" if record.get("total") else ""
        place += [f"step {record['slot']:,}{steps}", f"samples {record['samples']:,}{total}"]
        place.append(f"{record['samples_per_s']:,.0f} samples/s")
    if (eta_s := _eta_s(run)) is not None:
        place.append(f"ETA {format_clock(eta_s)}")
    lines.append("  " + "  ".join(place))
    if record.get("generation") or record.get("lost"):
        lines.append(f"  generation {record['generation']}, {record.get('lost', 0)} lost: {record.get('why')}")
    if record.get("out"):
        lines.append(f"  out {record['out']}")
    return Text("\n".join(lines))


def _rank_table(record: dict[str, Any], width: int) -> Any:
    """A line per rank, with the columns that can be read whole in so many characters."""
    from rich.cells import cell_len
    from rich.table import Table

    rows = [_rank_cells(rank) for rank in record.get("ranks", ())]
    wide = {name: max(cell_len(cells[name]) for cells in [{name: name}, *rows]) for name in HEADINGS}
    shown = list(HEADINGS)
    for spare in SPARE:
        if sum(GAP + wide[name] for name in shown) > width:
            shown.remove(spare)
    table = Table(box=None, header_style="bold", padding=(0, 0, 0, GAP))
    for name in shown:
        table.add_column(name, justify="left" if name in ("device", "machine", "phase") else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*(cells[name] for name in shown))
    return table


def _rank_cells(rank: dict[str, Any]) -> dict[str, str]:
    return {
        "rank": str(rank["rank"]),
        "device": rank["device"],
        "machine": rank["machine"],
        "share": "-" if rank["share"] is None else f"{100 * rank['share']:.0f} %",
        "samples/s": f"{rank['samples_per_s']:,.0f}",
        "step": f"{rank['slot']:,}",
        "round": "-" if rank.get("round") is None else f"{rank['round']:.0f}",
        "phase": rank["phase"],
    }


def _ended_table(runs: "list[KnownRun]") -> Any:
    left = ("run", "script", "ended", "result", "folder")
    table = new_table("run", "script", "ended", "result", "took", "samples", "folder", left=left, padding=(0, 2, 0, 0))
    for run in runs:
        record = run.record
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(record.get("end") or 0.0)))
        samples = "-" if record.get("samples") is None else f"{record['samples']:,}"
        took = format_clock(float(record.get("seconds") or 0.0))
        folder = record.get("saved") or record.get("out") or "-"
        result = str(record.get("result") or "-")
        table.add_row(run.id, run.script, ended if record.get("end") else "-", result, took, samples, str(folder))
    return table


def _eta_s(run: "KnownRun") -> float | None:
    record = run.record
    if not run.is_live or not record.get("total") or not record.get("samples_per_s"):
        return None
    return max(0.0, float(record["total"] - record["samples"]) / float(record["samples_per_s"]))
