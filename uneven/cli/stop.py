"""`uneven stop`: a run of this user finishes its step, saves and ends, as after Ctrl-C in its terminal."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from uneven.cli import complete
from uneven.cli.options import check_seconds, run_argument
from uneven.cli.output import Json, print_json, say
from uneven.errors import InputError, RankError

ABOUT = "Its id or the beginning of it, as uneven status shows it, a script or a folder."
Run = Annotated[str | None, run_argument(ABOUT, complete.live_runs)]


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    id: str
    script: str | None
    result: str | None
    saved: str | None  # the folder of its state


@dataclass(frozen=True)
class Stopped:
    """What --json prints."""

    stopped: list[Ended]
    failed: list[str]  # why


def stop(
    run: Run = None,
    stop_all: Annotated[bool, typer.Option("--all", help="All your runs that this machine leads.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="A second Ctrl-C 1.5 s later: what is not saved by then is lost.")
    ] = False,
    wait: Annotated[float, typer.Option("--wait", help="How long to wait for its end.", metavar="SECONDS")] = 600.0,
    as_json: Json = False,
) -> None:
    """Stop a run, as Ctrl-C in its terminal does: it finishes its step, saves, and ends with exit code 130 (143 if it
    was started in the background so that it ignores Ctrl-C). Waits for its end, and prints where its state is.

    If only one run is on, you may leave RUN out. Stop a run over several machines where it is led; take out a machine
    that has joined with uneven leave. Ctrl-C during the wait ends only the wait.

    Exit codes: 0 it has ended, 1 it has not, or is led elsewhere, 2 RUN is not known, or not yours. Examples:

      uneven stop k3f9ad1

      uneven stop train.py --now

      uneven stop runs/my-run --json
    """
    from uneven.launch.control.ask import stop_run
    from uneven.launch.control.known_runs import choose_known, live_runs

    check_seconds("--wait", wait)
    if stop_all and run is not None:
        raise InputError(f"--all with run {run!r}: name one run, or all of them")
    chosen = [one for one in live_runs() if one.leader is None] if stop_all else [choose_known(run, live_only=True)]
    ended, failed = list[Ended](), list[str]()
    for one in chosen:
        try:
            record = stop_run(one, wait, now=now, say=say)
        except RankError as error:
            failed.append(str(error))
            continue
        slot = f" after {record['slot']:,} steps" if record.get("slot") else ""
        say(f"run {one.id} ({one.script}) {record.get('result', 'has ended')}{slot}; {_where(record)}")
        ended.append(Ended(one.id, one.record.get("script"), record.get("result"), record.get("saved")))
    if as_json:
        print_json(Stopped(ended, failed))
    if failed:
        raise RankError("\nuneven: ".join(failed))
    if not chosen:
        say("no run of yours is led here")


def _where(record: dict[str, Any]) -> str:
    """Where the state of a run that has ended is, as far as that is known (launch/control/ask.py)."""
    if record.get("saved"):
        return f"its state is in {record['saved']}"
    if "saved" in record:
        return "nothing was saved"
    look = f"; look in {record['out']}" if record.get("out") else ""
    return f"whether it has saved is not known: this shell's history of runs (UNEVEN_HOME) has no line about it{look}"
