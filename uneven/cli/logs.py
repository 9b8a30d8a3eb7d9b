"""`uneven logs`: what the processes of a run have printed, live or afterwards."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli import complete
from uneven.cli.options import Rank, run_argument
from uneven.cli.output import Json, print_json, say
from uneven.errors import InputError
from uneven.launch.control.read_logs import Line, LogReader

if TYPE_CHECKING:
    from uneven.launch.control.known_runs import KnownRun

POLL_S = 0.2
Run = Annotated[
    str | None, run_argument("Its id or the beginning of it, a script, 'last', or a run's folder.", complete.all_runs)
]


@dataclass(frozen=True)
class Printed:
    """What --json prints."""

    id: str
    lines: list[Line]


def logs(
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the end of the run.")] = False,
    rank: Rank = None,
    lines: Annotated[int | None, typer.Option("--lines", "-n", help="The last lines alone.", metavar="LINES")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="With the time of each line.")] = False,
    as_json: Json = False,
) -> None:
    """Print what the processes of a run have printed, in the order of time.

    The lines of a rank are in OUT/logs/rank-N.log, those of the launcher in OUT/logs/launcher.log; each keeps 10 to 20
    MB. A run without `out` has logs only while it is on. A machine that has joined has the logs of its own ranks. Not
    kept are progress bars, what C libraries print, and what a script that calls fit prints itself, outside of the
    ranks.

    Exit codes: 0; 2 RUN is not known, or has no logs; 130 Ctrl-C with --follow, which does not stop the run. Examples:

      uneven logs k3f9ad1 -f

      uneven logs last --rank 1 -n 20

      uneven logs runs/my-run --json
    """
    from uneven.launch.control.known_runs import choose_known

    if lines is not None and lines < 0:
        raise InputError(f"--lines {lines}: allowed are whole numbers from 0 on")
    if follow and as_json:
        raise InputError("--follow with --json: JSON is one document; leave one of them out")
    chosen = choose_known(run)
    reader = LogReader(chosen.log_folders, rank or None)
    found = reader.read()
    if not found and not chosen.is_live:
        raise InputError(f"run {chosen.id}: {_why_none(chosen, rank)}")
    if not found and rank and not follow:  # the run is on, and the rank may still come
        say(f"run {chosen.id}: {_why_none(chosen, rank)}")
    found = found if lines is None else found[max(0, len(found) - lines) :]
    if as_json:
        print_json(Printed(chosen.id, found))
        return
    is_named = rank is None or len(rank) > 1
    _print(found, is_named, timestamps)
    if follow and chosen.is_live:
        _follow(chosen, reader, is_named, timestamps)


def _follow(chosen: "KnownRun", reader: LogReader, is_named: bool, timestamps: bool) -> None:
    from uneven.launch.control.known_runs import known_runs

    is_live = True
    while is_live:
        time.sleep(POLL_S)
        # This machine may lead the run and take part in it, too: two processes, with logs of their own.
        now = next((one for one in known_runs() if (one.id, one.leader) == (chosen.id, chosen.leader)), None)
        is_live = now is not None and now.is_live
        if now is not None:
            reader.folders = now.log_folders
        _print(reader.read(), is_named, timestamps)


def _print(lines: list[Line], is_named: bool, timestamps: bool) -> None:
    for line in lines:
        stamp = f"{line.time} " if timestamps else ""
        name = f"{line.name:8} | " if is_named else ""
        sys.stdout.write(f"{stamp}{name}{line.text}\n")
    sys.stdout.flush()


def _why_none(chosen: "KnownRun", rank: list[int] | None) -> str:
    folders = [folder for folder in chosen.log_folders if folder.is_dir()]
    if folders and rank:
        have = ", ".join(sorted(path.name.removesuffix(".log") for path in Path(folders[-1]).glob("rank-*.log")))
        return f"--rank {', '.join(map(str, rank))} has printed nothing; there is {have or 'no rank'}"
    if chosen.record.get("out") is None or chosen.leader is not None:
        return "it has ended, and had no folder for its logs here: add out='runs/my-run' (--out)"
    return f"there are no logs in {chosen.record['out']}"
