"""`uneven leave`: ranks of this machine hand in what they have trained and leave their run, which goes on."""

import json
import sys
from typing import Annotated

import typer

from uneven.cli import complete


def leave(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Which run, if several are on: its id, its process id, or its script.",
            metavar="RUN",
            autocompletion=complete.live_runs,
        ),
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", help="This rank alone; may be given several times.", metavar="N")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", help="How long to wait until they have left.", metavar="SECONDS")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take the ranks of this machine out of a run, which continues without them.

    They finish their step and hand in what they have trained (with cadence and async in the next round), so nothing is
    trained again. On a machine that joined by uneven join all of its ranks leave, and that command ends with exit code
    0. On the machine that leads the run, name the ranks (--rank): one has to stay, because it writes the files.

    Exit codes: 0 they have left, 1 they cannot leave, or have not within --wait; the reason is printed.

    Examples:

      uneven leave

      uneven leave --rank 2

      uneven leave 4711 --json
    """
    from uneven.errors import InputError, RankError
    from uneven.launch.control.ask import ask_to_leave, choose_to_leave

    if any(number < 0 for number in rank or ()):
        raise InputError(f"--rank {min(rank or ())}: ranks are numbered from 0, as the run prints them")
    if not wait > 0:  # not a number, too
        raise InputError(f"--wait {wait:g}: allowed are seconds above 0")
    chosen = choose_to_leave(run)
    answer = ask_to_leave(chosen, tuple(rank) if rank else None, wait)
    if as_json:
        print(json.dumps({"run": chosen.pid, "script": chosen.record.get("script"), **answer}, indent=2))
    if "refused" in answer:
        raise RankError(f"cannot leave run {chosen.id} ({chosen.script}): {answer['refused']}")
    print(f"uneven: {answer['left']}", file=sys.stderr)
