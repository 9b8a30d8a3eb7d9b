"""The side of `uneven stop`: the same as Ctrl-C in the run's terminal, and the wait for its end. No torch in this file.

One SIGINT to the process that leads the run: it finishes the step, saves and ends with exit code 130
(launch/signals.py, launch/run.py). A process that a script has started in the background may ignore SIGINT; it gets a
SIGTERM, at which it does the same, with exit code 143.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from uneven.errors import RankError
from uneven.launch.cleanup import process_start
from uneven.launch.control.history import ended_runs
from uneven.launch.control.known_runs import KnownRun
from uneven.launch.control.listing import read_status

POLL_S = 0.05
AGAIN_S = 1.5  # between two signals: nearer ones count as one (launch/signals.py)
MOST_SIGNALS = 4  # before a run that is to end at once is given up
TOLD_S = 2.0  # of waiting, after which a line says so


def request_stop(run: KnownRun) -> None:
    """RankError where the run cannot be stopped from here, or has just ended."""
    assert run.here is not None, "a live run"
    if run.leader is not None:
        raise RankError(
            f"run {run.id} is led on {run.leader}, and this machine only takes part: uneven leave {run.id} takes it "
            f"out, and uneven stop {run.id} on {run.leader.split(' ')[0]} stops the run"
        )
    pid = run.here.pid
    if is_over(run):
        raise RankError(f"run {run.id} has just ended")
    try:
        os.kill(pid, signal.SIGTERM if ignores_interrupt(pid) else signal.SIGINT)
    except ProcessLookupError as error:
        raise RankError(f"run {run.id} has just ended") from error


def stop_run(run: KnownRun, wait_s: float, *, now: bool, say: Callable[[str], None]) -> dict[str, object]:
    """Stop it and wait; what is known about its end. RankError where it has not ended in time.

    That is the run's line in the history. Where it has none here (another $UNEVEN_HOME, a history that cannot be
    written) it is the last status that the run has shown, without `result`; without `saved` that is not known.
    `now`: a second signal, and more, as long as it has not ended.
    """
    assert run.here is not None, "a live run"
    last = run.record  # with the status, whose file goes with the run
    request_stop(run)
    began_s = sent_s = time.monotonic()
    signals, is_told = 1, False
    while not is_over(run):
        last = read_status(run.here.folder) or last
        spent_s = time.monotonic() - began_s
        if spent_s > wait_s or (now and signals > MOST_SIGNALS):
            advice = "look again by uneven status" if not now else f"end it by kill -9 {run.record['pid']}"
            raise RankError(f"run {run.id} was told to stop and has not ended within {spent_s:.0f} s; {advice}")
        if now and time.monotonic() - sent_s > AGAIN_S:
            sent_s, signals = time.monotonic(), signals + 1
            with suppress(RankError):
                request_stop(run)
        if not now and not is_told and spent_s > TOLD_S:
            is_told = True
            say(f"run {run.id} ({run.script}) finishes its step and saves")
        time.sleep(POLL_S)
    return _record(run) or {name: last[name] for name in ("slot", "samples", "out", "saved") if last.get(name)}


def _record(run: KnownRun) -> dict[str, Any] | None:
    """Its line in the history, written by the process that was told to stop: a machine may lead a run and take part in
    it by `uneven join` as well, and each of the two processes leaves a line with the run's id."""
    for record in ended_runs():
        if record["id"] == run.id and record.get("leader") is None and record.get("pid") == run.record["pid"]:
            return record
    return None


def is_over(run: KnownRun) -> bool:
    """Whether it is off the list, or its process is gone."""
    assert run.here is not None, "a live run"
    start = run.here.about.get("start")
    return not run.here.folder.exists() or process_start(run.here.pid) != (start or process_start(run.here.pid))


def ignores_interrupt(pid: int, root: Path = Path("/proc")) -> bool:
    """Whether SIGINT has no effect on a process."""
    with suppress(OSError, ValueError):
        for line in (root / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
    return False
