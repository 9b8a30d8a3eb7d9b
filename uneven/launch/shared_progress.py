"""The progress of ranks on several machines, shown by rank 0: each rank writes its own to the store, rank 0 reads all.

Made by launch/context.py around the report of a rank, where the roster has several machines. A launcher of ours sees
only the processes of its own machine, and torchrun has none of ours at all; the store is what all of them reach.
"""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from uneven.comm.store import Store, get_text
from uneven.hardware.roster import Roster
from uneven.launch.heartbeat import HeartbeatReport
from uneven.results.progress import Reporter
from uneven.train.rank_info import RankInfo, Report

INTERVAL_S = 0.5  # a person reads no faster, and every rank writes over the network
JOIN_S = 2.0  # for the thread, which may be inside a call of a store that is gone
SENT = ("device", "total", "steps", "has_max_steps", "own", "seconds", "loss")


class SharedProgress:
    """A Report (train/rank_info.py) that hands everything on, and tells rank 0.

    Life cycle: made with the worker, `connect` when the group has formed, `close` when the run has left it.
    """

    def __init__(self, report: Report, rank_info: RankInfo) -> None:
        self._report, self._rank_info = report, rank_info
        # As they are at the start: ranks that are lost stay where they are shown.
        self._roster, self._rank = rank_info.roster, rank_info.rank
        self._kept = HeartbeatReport(str(rank_info.device))
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def connect(self, store: Store, show: Callable[[], dict[str, Any]]) -> None:
        """`store` is used by the thread alone; `show` says where the rank is, at any moment."""
        self._store, self._show = store, show
        if self._rank == 0:
            self._report.say([describe_roster(self._roster)])
        self._thread = threading.Thread(target=self._run, name="uneven-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """With a last exchange, so that a run that is over stands at 100 %."""
        self._closed.set()
        if self._thread is None:
            return
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            with suppress(RuntimeError):
                self.exchange()

    def exchange(self) -> None:
        """Write this rank's progress, and on rank 0 draw that of all."""
        status = {**self._show(), **self._kept.status}
        if self._rank_info.rank > 0:
            sent = {name: status[name] for name in (*SENT, "phase", "rounds", "machine", "host") if name in status}
            self._store.set(f"{self._rank}", json.dumps(sent))
        elif isinstance(self._report, Reporter) and self._report.style == "bar":
            texts = [get_text(self._store, f"{rank}") for rank in range(len(self._roster.devices))]
            statuses = [json.loads(text) if text else {} for text in texts]
            statuses[self._rank] = status
            self._report.devices(statuses, first=self._rank)

    def _run(self) -> None:
        try:
            while not self._closed.wait(INTERVAL_S):
                self.exchange()
        except RuntimeError:  # the store is gone, and with it the run; others say so
            return

    def started(self, axis: Any, place: str) -> None:
        self._kept.started(axis, place)
        self._report.started(axis, place)

    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float | None) -> None:
        self._kept.stepped(samples, own_samples, training_s, loss)
        self._report.stepped(samples, own_samples, training_s, loss)

    def epoch_done(self, entry: dict[str, Any]) -> None:
        self._kept.epoch_done(entry)
        self._report.epoch_done(entry)

    def say(self, lines: Sequence[str]) -> None:
        self._report.say(lines)


def describe_roster(roster: Roster) -> str:
    """One line: which machines take part, with their devices."""
    machines = [
        f"{host} ({', '.join(str(roster.devices[rank]) for rank in roster.ranks_of(number))})"
        for number, host in enumerate(roster.hosts)
    ]
    return f"  {len(machines)} machines: {', '.join(machines)}"
