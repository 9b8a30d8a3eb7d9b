"""`uneven leave`: ranks of this machine hand in what they have trained and leave their run, which goes on."""

from dataclasses import dataclass, field
from typing import Annotated

import typer

from uneven.cli import complete
from uneven.cli.options import Rank, check_seconds, run_argument
from uneven.cli.output import Json, print_json, say
from uneven.errors import InputError, RankError
from uneven.files import ABSENT

Run = Annotated[
    str | None, run_argument("Which run, if several are on: its id, its process id, or its script.", complete.live_runs)
]


@dataclass(frozen=True)
class Left:
    """What --json prints."""

    run: int  # its process id
    script: str | None
    left: str | None = field(default=None, metadata=ABSENT)  # which ranks, in one line
    refused: str | None = field(default=None, metadata=ABSENT)  # why they cannot


def leave(
    run: Run = None,
    rank: Rank = None,
    wait: Annotated[
        float, typer.Option("--wait", help="How long to wait until they have left.", metavar="SECONDS")
    ] = 60.0,
    as_json: Json = False,
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
    from uneven.launch.control.ask import ask_to_leave, choose_to_leave

    if any(number < 0 for number in rank or ()):
        raise InputError(f"--rank {min(rank or ())}: ranks are numbered from 0, as the run prints them")
    check_seconds("--wait", wait)
    chosen = choose_to_leave(run)
    answer = ask_to_leave(chosen, tuple(rank) if rank else None, wait)
    if as_json:
        print_json(Left(chosen.pid, chosen.record.get("script"), **answer))
    if "refused" in answer:
        raise RankError(f"cannot leave run {chosen.id} ({chosen.script}): {answer['refused']}")
    say(answer["left"])
