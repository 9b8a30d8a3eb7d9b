"""The figures of this process's run for `uneven status`: those that are reported for the progress anyway.

Held by the process context (launch/context.py). The figures travel to the launcher in the heartbeats; of a run in this
process alone launch/control/listing.py reads them.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from uneven.launch.control.rank_log import keep_logs_in, rank_file
from uneven.launch.heartbeat import HeartbeatReport
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo, Report
from uneven.train.worker import Worker

KEPT = ("device", "total", "epochs", "steps", "samples", "own", "seconds", "loss")


class RunReport:
    """A Report (train/rank_info.py) that hands everything on to that of the run, and keeps its figures.

    Each run has its own RunReport: a process alone may have two runs at once, each with its own listeners.
    """

    def __init__(self, report: Report, device: str, logs: tuple[Path, str] | None) -> None:
        """`logs`: the folder of the run, and the name of this rank's log."""
        self._report, self._logs = report, logs
        self.kept = HeartbeatReport(device)

    def started(self, axis: Any, place: str) -> None:
        self.kept.started(axis, place)
        if self._logs is not None:
            keep_logs_in(*self._logs)
        self._report.started(axis, place)

    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float | None) -> None:
        self.kept.stepped(samples, own_samples, training_s, loss)
        self._report.stepped(samples, own_samples, training_s, loss)

    def epoch_done(self, entry: dict[str, Any]) -> None:
        self._report.epoch_done(entry)

    def say(self, lines: Sequence[str]) -> None:
        self._report.say(lines)


class Shown:
    """The figures of the run whose worker was made last in this process."""

    def __init__(self) -> None:
        self.saved: str | None = None  # where the state of the last run is
        self._kept = HeartbeatReport("")
        self._last: dict[str, Any] = {}
        self._result: dict[str, Any] = {}  # what the run came to in the end

    def keep(self, report: Report, rank_info: RankInfo, out: Path | None) -> Report:
        """Return the report for the worker of a run that begins; its results go to `out`."""
        logs = (out, rank_file(rank_info.rank)) if out is not None and rank_info.is_with_first else None
        own = RunReport(report, str(rank_info.device), logs)
        self._kept, self.saved, self._last, self._result = own.kept, None, {}, {}
        return own

    def show(self, worker: Worker) -> dict[str, Any]:
        """The status of a worker's run. Called on a heartbeat's thread, at any moment."""
        config, kept = worker.config, self._kept.status
        figures = {name: kept[name] for name in KEPT if name in kept}
        where: Mapping[str, Any] = worker.show()
        epoch = None if worker.synchronizer is None or "total" not in kept else worker.synchronizer.epoch
        about = {"policy": config.policy, "out": None if config.out is None else str(config.out), "epoch": epoch}
        self._last = {**figures, **about, "reached": where["slot"]}
        return {**self._last, **where, "grace": config.grace}

    def leave(self, worker: Worker | None) -> None:
        """The run is over: its last figures, which nobody may have asked for yet."""
        if worker is not None:
            with suppress(Exception):  # it may have failed in the middle of anything, and nothing depends on them
                self.show(worker)

    def last(self) -> dict[str, Any]:
        """Of a run that is over: its figures, and where its state is."""
        return {**self._last, **self._result, "saved": self.saved}

    def reached(self, state: TrainedState) -> None:
        """The run has its result, which the history keeps: the figures reported last are a moment older."""
        self._result = {"samples": state.samples, "reached": state.slot}
