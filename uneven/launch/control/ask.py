"""What other terminals ask of a run: that it stops (`uneven stop`), or that ranks leave it (`uneven leave`).

A stop is the same as Ctrl-C in the run's terminal: one SIGINT to the process that leads it, which finishes the step,
saves and ends with exit code 130 (launch/signals.py, launch/run.py). A process that a script has started in the
background may ignore SIGINT; it gets a SIGTERM, at which it does the same, with exit code 143. Whoever is to leave is
named in a file (launch/control/leave_requests.py). Both wait for what becomes of it. No torch in this file.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from uneven.errors import RankError
from uneven.launch.control.known_runs import KnownRun, choose_known, ended_runs, live_runs, read_status
from uneven.launch.control.leave_requests import AskedToLeave

POLL_S = 0.05
AGAIN_S = 1.5  # between two signals: nearer ones count as one (launch/signals.py)
MOST_SIGNALS = 4  # before a run that is to end at once is given up
TOLD_S = 2.0  # of waiting, after which a line says so
NO_RUN = (
    "no run of yours is on here that a rank could leave (uneven run, uneven join, or fit on several devices); ranks "
    "that torchrun or Slurm has started cannot: their job ends with one of them"
)


def choose_to_leave(named: str | None) -> KnownRun:
    """The run that is meant; InputError where it is not clear which, RankError where there is none."""
    if not live_runs():
        raise RankError(NO_RUN)
    return choose_known(named, live_only=True)


def ask_to_leave(run: KnownRun, ranks: Sequence[int] | None, wait_s: float) -> Mapping[str, Any]:
    """What the launcher answers: {"left": one line} or {"refused": why}."""
    assert run.folder is not None, "a live run"
    try:
        asked = AskedToLeave(run.folder, None if ranks is None else tuple(ranks))
    except OSError as error:
        raise RankError(f"run {run.id} has just ended") from error
    end_s = time.monotonic() + wait_s
    try:
        while time.monotonic() < end_s:
            if (answer := asked.answer()) is not None:
                return answer
            if asked.is_run_over:
                return {"left": f"run {run.id} has ended"}
            time.sleep(POLL_S)
    finally:
        asked.close()
    return {"refused": f"they have not left within {wait_s:g} s (--wait), and were told to stay"}


def stop_run(run: KnownRun, wait_s: float, *, now: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Stop a live run and wait; what is known about its end. RankError where it has not ended in time.

    That is the run's line in the history. Where it has none here (another $UNEVEN_HOME, a history that cannot be
    written) it is the last status that the run has shown, without `result`; without `saved` that is not known.
    `now`: a second signal, and more, as long as it has not ended.
    """
    assert run.folder is not None, "a live run"
    last = run.record  # with the status, whose file goes with the run
    _signal(run)
    began_s = sent_s = time.monotonic()
    signals, is_told = 1, False
    while not run.is_over:
        last = read_status(run.folder) or last
        spent_s = time.monotonic() - began_s
        if spent_s > wait_s or (now and signals > MOST_SIGNALS):
            advice = "look again by uneven status" if not now else f"end it by kill -9 {run.pid}"
            raise RankError(f"run {run.id} was told to stop and has not ended within {spent_s:.0f} s; {advice}")
        if now and time.monotonic() - sent_s > AGAIN_S:
            sent_s, signals = time.monotonic(), signals + 1
            with suppress(RankError):
                _signal(run)
        if not now and not is_told and spent_s > TOLD_S:
            is_told = True
            say(f"run {run.id} ({run.script}) finishes its step and saves")
        time.sleep(POLL_S)
    # A machine may lead a run and take part in it by `uneven join` as well: both processes leave a line with its id.
    own = {"id": run.id, "leader": None, "pid": run.pid}
    lines = (line for line in ended_runs() if own == {name: line.get(name) for name in own})
    return next(lines, {name: last[name] for name in ("slot", "samples", "out", "saved") if last.get(name)})


def _signal(run: KnownRun) -> None:
    """RankError where the run cannot be stopped from here, or has just ended."""
    if run.leader is not None:
        raise RankError(
            f"run {run.id} is led on {run.leader}, and this machine only takes part: uneven leave {run.id} takes it "
            f"out, and uneven stop {run.id} on {run.leader.split(' ')[0]} stops the run"
        )
    try:
        if run.is_over:
            raise ProcessLookupError
        os.kill(run.pid, signal.SIGTERM if ignores_interrupt(run.pid) else signal.SIGINT)
    except ProcessLookupError as error:
        raise RankError(f"run {run.id} has just ended") from error


def ignores_interrupt(pid: int, root: Path = Path("/proc")) -> bool:
    """Whether SIGINT has no effect on a process."""
    with suppress(OSError, ValueError):
        for line in (root / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
    return False
