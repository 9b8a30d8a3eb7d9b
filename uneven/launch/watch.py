"""The launcher's watch over its rank processes: heartbeats in, deadlines (launch/deadlines.py) checked, failures named.

Called by launch/launcher.py, on the thread that waits for the run. There is no coordinator: the ranks agree among
themselves, and the watch only shows their progress, passes the stop request on, and raises when a rank fails, falls
silent or hangs. It ends no process itself; the launcher does when the watch has returned or raised.
"""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from uneven.comm.store import Store, get_text
from uneven.errors import NOTHING_TRAINED, USER_ERRORS, NotFiniteError, RankError, RefusedError, StoppedError
from uneven.hardware.device import Device
from uneven.launch.deadlines import RankHealth, check_deadlines
from uneven.launch.heartbeat import SAVE_KEY, STOP_KEY, TERMINATED, TERMINATED_KEY, heartbeat_key
from uneven.launch.payload import drop_tensors
from uneven.launch.processes import INTERRUPTED, describe_exit
from uneven.launch.requests import Requests
from uneven.results.progress import Reporter

POLL_S = 0.1
GRACE_S = 1.5  # for the other ranks' error reports, once one has failed
ALONE_S = 3.0  # for a rank before its first step whose peers have been stopped
BEFORE_FIRST = ("setup", "compile", "communication", "wait")
STOP_S = 10.0  # at least, and at least `grace`, for all ranks to stop after the same step


class Ranks(Protocol):
    """The processes of all ranks in rank order, wherever they run. One that failed leaves error-RANK.json."""

    def exit_codes(self) -> list[int | None]:
        """None for a rank that runs; RankError where a machine with ranks is lost."""
        ...


class Watch:
    """Life cycle: one per launched run; `wait()` once. Processes, members and devices are in the same order."""

    def __init__(
        self,
        processes: Ranks,
        store: Store,
        folder: Path,
        members: Sequence[str],
        devices: Sequence[Device],
        reporter: Reporter,
    ) -> None:
        self._processes, self._store, self._folder, self._reporter = processes, store, folder, reporter
        now = time.monotonic()
        self._ranks = [RankHealth(member, device, now, now) for member, device in zip(members, devices, strict=True)]
        self._stop_sent_s: float | None = None
        self._was_rank_terminated = False
        self._alone_since_s = now
        self._saves = 0  # checkpoints asked for
        self._are_tensors_mapped = False

    def wait(self, requests: Requests) -> None:
        """Until every rank has ended well; raises when one does not. `requests` are passed on to the ranks."""
        while True:
            codes = self._processes.exit_codes()  # before the heartbeats, so that the last ones are read
            now = time.monotonic()
            self._read_heartbeats(now)
            ended_well = (0,) if self._stop_sent_s is None else (0, INTERRUPTED)
            if all(code in ended_well for code in codes):
                return
            if any(code not in (None, *ended_well) for code in codes):
                raise self._failure(requests)
            check_deadlines(self._ranks, [rank for rank, code in enumerate(codes) if code is None], now)
            self._drop_mapped_tensors()
            self._pass_on(requests, now)
            if self._stop_sent_s is not None:
                self._check_left_alone(codes, now)
                self._check_stopping(self._stop_sent_s, now, requests.grace)
            time.sleep(POLL_S)

    def _pass_on(self, requests: Requests, now_s: float) -> None:
        """Requests of this process to the ranks, and a rank's SIGTERM to this process: one of them stops the run."""
        graces = [rank.status["grace"] for rank in self._ranks if "grace" in rank.status]
        requests.grace = max(graces, default=requests.grace)
        if requests.save.is_set():
            requests.save.clear()
            self._saves += 1
            self._store.set(SAVE_KEY, str(self._saves))
        if not self._was_rank_terminated and get_text(self._store, TERMINATED_KEY) is not None:
            self._was_rank_terminated = True
            requests.on_rank_terminated()
        if requests.stop.is_set() and self._stop_sent_s is None:
            self._store.set(STOP_KEY, TERMINATED if requests.is_terminated else "1")
            self._stop_sent_s = now_s

    def _read_heartbeats(self, now_s: float) -> None:
        for rank in self._ranks:
            text = get_text(self._store, heartbeat_key(rank.member))
            if text is not None:
                rank.update(json.loads(text), now_s)
        self._reporter.ranks([rank.status for rank in self._ranks])

    def _check_stopping(self, sent_s: float, now_s: float, grace_s: float) -> None:
        """StoppedError where nothing was trained yet, RankError where the ranks do not obey the stop request."""
        statuses = [rank.status for rank in self._ranks]
        # A rank without a heartbeat has trained nothing; of the others only heartbeats count that were sent after they
        # had read the request, for at most STOP_S: on a busy machine the last one may be older than their first step.
        are_fresh = all(status.get("was_stop_read") for status in statuses if status)
        has_begun = any(status.get("handles_stop") for status in statuses)
        if not has_begun and (are_fresh or now_s - sent_s > STOP_S):
            raise StoppedError(NOTHING_TRAINED)
        if any(status.get("phase") in ("evaluation", "checkpoint", "user") for status in statuses):
            self._stop_sent_s = now_s  # these may last: the time to stop counts from their end
        elif now_s - sent_s > max(STOP_S, grace_s, 3 * max(rank.longest_step_s for rank in self._ranks)):
            raise RankError("the ranks did not stop when asked and were ended; nothing was saved")

    def _was_terminated_at_start(self) -> bool:
        """Whether SIGTERM hit a process that could not handle it yet, since Python itself was only starting there."""
        has_begun = any(rank.status.get("handles_stop") for rank in self._ranks)
        return not has_begun and -signal.SIGTERM in self._processes.exit_codes()

    def _check_left_alone(self, codes: Sequence[int | None], now_s: float) -> None:
        """StoppedError where a script was stopped before its run in some processes, and others wait to form the group.

        Not at the first look: a rank that stops after its very first step may have left, and the last heartbeat of one
        that still saves may be older than that step.
        """
        running = [rank.status for rank, code in zip(self._ranks, codes, strict=True) if code is None]
        waits = all(not status.get("slot") and status.get("phase", "setup") in BEFORE_FIRST for status in running)
        if INTERRUPTED not in codes or not running or not waits:
            self._alone_since_s = now_s
        elif now_s - self._alone_since_s > ALONE_S:
            raise StoppedError(NOTHING_TRAINED)

    def _drop_mapped_tensors(self) -> None:
        """Once all ranks have mapped the payload's tensors, their files need no names any more."""
        if not self._are_tensors_mapped and all(rank.status.get("is_loaded") for rank in self._ranks):
            self._are_tensors_mapped = True
            drop_tensors(self._folder)

    def _failure(self, requests: Requests) -> Exception:
        """The cause of a failed run: a rank that was killed, else the first one that failed by itself."""
        if self._was_terminated_at_start():
            requests.on_rank_terminated()
            return StoppedError(NOTHING_TRAINED)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and any(code is None for code in self._processes.exit_codes()):
            time.sleep(0.02)
        errors = {}
        for number, code in enumerate(self._processes.exit_codes()):
            path = self._folder / f"error-{number}.json"
            if path.exists():
                errors[number] = json.loads(path.read_text())
            elif code not in (None, 0):
                assert code is not None
                return RankError(f"{self._ranks[number].name(number)} {describe_exit(code)}")
        # A rank whose peer is gone fails too, a moment later, and its message is about the connection.
        by_itself = {number: error for number, error in errors.items() if "peer" not in error["what"]} or errors
        number = min(by_itself, key=lambda number: float(errors[number]["time"]))
        error, name = errors[number], self._ranks[number].name(number)
        if error["kind"] in USER_ERRORS:
            kind = USER_ERRORS[error["kind"]]
            # All ranks raise those alike, and they name the rank or machine that is the cause.
            return kind(error["message"] if kind in (NotFiniteError, RefusedError) else f"{name}: {error['message']}")
        what = error["what"] + (f"\n  at {error['place']}" if error.get("place") else "")
        return RankError(f"{name} failed: {what}\n\nTraceback of {error['member']}:\n{error['traceback']}")
