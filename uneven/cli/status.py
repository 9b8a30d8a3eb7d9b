"""`uneven status`: the runs of this user on this machine, live and ended: where each is, and what each rank does."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli import complete
from uneven.errors import InputError

if TYPE_CHECKING:
    from rich.console import Group

    from uneven.launch.known_runs import KnownRun

EVERY_S = 1.0
WIDTH = 160  # where the output is no terminal


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            help="This run alone: its id or the beginning of it, a script, 'last', a folder.",
            metavar="RUN",
            autocompletion=complete.all_runs,
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Ended runs, too: the last 100.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the runs of yours that are on: by uneven run, by fit in a script or a notebook, and those that this machine
    has joined. For each rank its device and machine, its share of the samples, its speed and what it does.

    Ranks that torchrun, Slurm or another engine has started are its own to list. The id stays the same on all machines
    of a run. Exit code 0, also where no run is on; 2: RUN is not known.

    Examples:

      uneven status

      uneven status --all --json

      uneven status k3f9ad1 --watch
    """
    from uneven.launch.known_runs import choose_known, known_runs, live_runs

    if watch and as_json:
        raise InputError("--watch with --json: JSON is one document; call uneven status --json again and again")
    chosen = None if run is None else choose_known(run)

    def read() -> "list[KnownRun]":
        runs = known_runs() if show_all or chosen is not None else live_runs()
        return runs if chosen is None else [one for one in runs if one.id == chosen.id] or [chosen]

    if as_json:
        print(json.dumps({"runs": [_document(one) for one in read()]}, indent=2))
    elif watch:
        _watch(read, ends=chosen is not None)
    else:
        _console().print(_picture(read(), show_all))


def _document(run: "KnownRun") -> dict[str, Any]:
    return {**run.to_json(), "eta_s": _eta_s(run.record) if run.is_live else None}


def _console() -> Any:
    """No markup: folders and scripts have the names that users give them, as in runs/[lr=0.1]."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _watch(read: Any, *, ends: bool) -> None:
    """Until Ctrl-C; where one run is meant, until it has ended."""
    from rich.live import Live

    console = _console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            runs = read()
            live.update(_picture(runs, any(not run.is_live for run in runs)), refresh=True)
            if ends and not any(run.is_live for run in runs):
                return
            time.sleep(EVERY_S)


def _picture(runs: "list[KnownRun]", has_ended: bool) -> "Group":
    from rich.console import Group
    from rich.text import Text

    live, ended = [run for run in runs if run.is_live], [run for run in runs if not run.is_live]
    parts: list[Any] = [part for run in live for part in (_heading(run), _rank_table(run.record), Text())]
    if not live and not ended:
        parts.append(
            Text("no run of yours is on here" + ("" if has_ended else "; uneven status --all shows ended ones"))
        )
    if ended:
        parts.append(_ended_table(ended))
    return Group(*parts)


def _heading(run: "KnownRun") -> Any:
    from rich.text import Text

    record = run.record
    since = _clock(time.time() - float(record.get("since") or time.time()))
    words = [f"{run.id}  {record.get('script') or 'fit'}", f"pid {record['pid']}", f"on for {since}"]
    words += [f"led on {run.leader}"] if run.leader else []
    lines = ["  ".join(words)]
    place = [str(record.get("policy") or "starting")]
    if record.get("epoch"):
        place.append(f"epoch {record['epoch']}/{record.get('epochs')}")
    if record.get("has_begun"):
        steps = f"/{record['steps']:,}" if record.get("steps") else ""
        total = f"/{record['total']:,}" if record.get("total") else ""
        place += [f"step {record['slot']:,}{steps}", f"samples {record['samples']:,}{total}"]
        place.append(f"{record['samples_per_s']:,.0f} samples/s")
    if (eta_s := _eta_s(record)) is not None:
        place.append(f"ETA {_clock(eta_s)}")
    lines.append("  " + "  ".join(place))
    if record.get("generation"):
        lines.append(f"  generation {record['generation']}, {record.get('lost', 0)} lost: {record.get('why')}")
    if record.get("out"):
        lines.append(f"  out {record['out']}")
    return Text("\n".join(lines))


def _rank_table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 2))
    for heading in ("rank", "device", "machine", "share", "samples/s", "step", "round", "phase"):
        table.add_column(heading, justify="left" if heading in ("device", "machine", "phase") else "right")
    for rank in record.get("ranks", ()):
        share = "-" if rank["share"] is None else f"{100 * rank['share']:.0f} %"
        figures = (share, f"{rank['samples_per_s']:,.0f}", f"{rank['slot']:,}")
        rounds = "-" if rank.get("round") is None else f"{rank['round']:.0f}"
        table.add_row(str(rank["rank"]), rank["device"], rank["machine"], *figures, rounds, rank["phase"])
    return table


def _ended_table(runs: "list[KnownRun]") -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("run", "script", "ended", "result", "took", "samples", "folder"):
        table.add_column(heading, justify="right" if heading in ("took", "samples") else "left")
    for run in runs:
        record = run.record
        ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(record.get("end") or 0.0)))
        samples = "-" if record.get("samples") is None else f"{record['samples']:,}"
        took = _clock(float(record.get("seconds") or 0.0))
        folder = record.get("saved") or record.get("out") or "-"
        result = str(record.get("result") or "-")
        table.add_row(run.id, run.script, ended if record.get("end") else "-", result, took, samples, str(folder))
    return table


def _eta_s(record: dict[str, Any]) -> float | None:
    if not record.get("total") or not record.get("samples_per_s"):
        return None
    return max(0.0, float(record["total"] - record["samples"]) / float(record["samples_per_s"]))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
