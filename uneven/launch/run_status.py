"""What is known of this process's run: one record, in heartbeats, in progress bars and for `uneven status`.

Held by the process context (launch/context.py). The thread that trains writes the record, as a Report
(train/rank_info.py); the heartbeat takes it to a launcher, a Reporter draws it, and of a run in this process alone
launch/control/listing.py reads it. Over several machines every rank writes its own to the store, and rank 0 draws all:
a launcher of ours sees only the processes of its own machine, and torchrun has none of ours at all.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from uneven.comm.store import Store, get_text
from uneven.hardware.roster import Roster
from uneven.launch.control.rank_log import keep_logs_in, rank_file
from uneven.policy.axis import Axis
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

INTERVAL_S = 0.5  # a person reads no faster, and every rank writes over the network
JOIN_S = 2.0  # for the thread, which may be inside a call of a store that is gone


class Output(Protocol):
    """Where the progress of a rank is shown: a Reporter, or elsewhere by what it sends."""

    def draw(self, statuses: Sequence[Mapping[str, Any]], first: int = 0) -> None: ...
    def epoch_done(self, entry: dict[str, Any]) -> None: ...
    def say(self, lines: Sequence[str]) -> None: ...


class SentLines:
    """An Output for a rank whose launcher shows the progress: what is to be printed travels in the heartbeats."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}  # replaced as a whole: the heartbeat's thread reads it

    def loaded(self) -> None:
        """The payload is read, and its tensors are mapped."""
        self.status = {**self.status, "is_loaded": True}

    def draw(self, statuses: Sequence[Mapping[str, Any]], first: int = 0) -> None:
        """The launcher hears the other ranks itself."""

    def epoch_done(self, entry: dict[str, Any]) -> None:
        self.status = {**self.status, "history": [*self.status.get("history", []), entry]}

    def say(self, lines: Sequence[str]) -> None:
        self.status = {**self.status, "notes": [*self.status.get("notes", []), *lines]}


class RankReport:
    """A Report that keeps a run's figures as one record, and hands all on to where it is shown.

    Each run has its own: a process alone may have two runs at once, each with its own listeners. Every call replaces
    `figures` as a whole, since other threads read them.
    """

    def __init__(
        self, device: str, output: Output, logs: tuple[Path, str] | None = None, *, is_shared: bool = False
    ) -> None:
        """`logs`: the folder of the run, and the name of this rank's log.

        `is_shared`: rank 0 draws this rank together with those of other machines.
        """
        self.figures: dict[str, Any] = {"device": device}
        self.is_shared = is_shared
        self._output, self._logs = output, logs

    def started(self, axis: Axis, place: str) -> None:
        del place
        if self._logs is not None:
            keep_logs_in(*self._logs)
        self._update(total=axis.total_samples, epochs=axis.epochs, steps=axis.total, handles_stop=True)
        self._update(has_max_steps=axis.max_slots is not None)
        self.stepped(0, 0, 0.0, None)

    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float | None) -> None:
        # Of a round that has just been merged there is no loss yet.
        loss = self.figures.get("loss") if loss is None else loss
        self._update(samples=samples, own=own_samples, seconds=training_s, loss=loss)
        if not self.is_shared:
            self._output.draw([self.figures])

    def epoch_done(self, entry: dict[str, Any]) -> None:
        self._output.epoch_done(entry)

    def say(self, lines: Sequence[str]) -> None:
        self._output.say(lines)

    def _update(self, **changes: Any) -> None:
        self.figures = {**self.figures, **changes}


class RunStatus:
    """The figures of the run whose worker was made last in this process, until the next one begins."""

    def __init__(self) -> None:
        self._rank = RankReport("", SentLines())
        self._last: dict[str, Any] = {}
        self._result: dict[str, Any] = {"saved": None}  # what the run came to in the end

    def begin(self, output: Output, rank_info: RankInfo, out: Path | None, *, is_newcomer: bool = False) -> RankReport:
        """Return the report for the worker of a run that begins; its results go to `out`."""
        logs = (out, rank_file(rank_info.rank)) if out is not None and rank_info.is_with_first else None
        is_shared = not rank_info.roster.is_one_machine and not is_newcomer
        self._rank = RankReport(str(rank_info.device), output, logs, is_shared=is_shared)
        self._last, self._result = {}, {"saved": None}
        return self._rank

    def show(self, worker: Worker) -> dict[str, Any]:
        """The status of a worker's run. Called on a heartbeat's thread, at any moment."""
        config, figures = worker.config, self._rank.figures
        where: Mapping[str, Any] = worker.show()
        has_epoch = worker.synchronizer is not None and "total" in figures
        about = {
            "policy": config.policy,
            "out": None if config.out is None else str(config.out),
            "epoch": worker.synchronizer.epoch if worker.synchronizer is not None and has_epoch else None,
        }
        self._last = {**figures, **about, "reached": where["slot"]}
        return {**self._last, **where, "grace": config.grace}

    def leave(self, worker: Worker | None) -> None:
        """The run is over: its last figures, which nobody may have asked for yet."""
        if worker is not None:
            with suppress(Exception):  # it may have failed in the middle of anything, and nothing depends on them
                self.show(worker)

    def last(self) -> dict[str, Any]:
        """Of a run that is over: its figures, and where its state is."""
        return {**self._last, **self._result}

    def reached(self, state: TrainedState) -> None:
        """The run has its result, which the history keeps: the figures reported last are a moment older."""
        self._result = {**self._result, "samples": state.samples, "reached": state.slot}

    def saved_in(self, folder: str | None) -> None:
        """The result has been written."""
        self._result = {**self._result, "saved": folder}


class SharedProgress:
    """Tells rank 0 where the ranks of all machines are, which draws them. Life cycle: `close` ends it."""

    def __init__(self, store: Store, rank_info: RankInfo, output: Output, show: Callable[[], dict[str, Any]]) -> None:
        """`store` is used by the thread alone; `show` says where the rank is, at any moment."""
        # As they are at the start: ranks that are lost stay where they are shown.
        self._rank, self._ranks = rank_info.rank, len(rank_info.roster.devices)
        self._store, self._output = store, output
        self._show = show
        self._closed = threading.Event()
        if self._rank == 0:
            output.say([describe_roster(rank_info.roster)])
        self._thread = threading.Thread(target=self._run, name="uneven-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """With a last exchange, so that a run that is over stands at 100 %."""
        self._closed.set()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            with suppress(RuntimeError):
                self.exchange()

    def exchange(self) -> None:
        """Write this rank's progress, and on rank 0 draw that of all."""
        status = self._show()
        if self._rank > 0:
            self._store.set(f"{self._rank}", json.dumps(status))
        elif isinstance(self._output, Reporter) and self._output.style == "bar":
            texts = [get_text(self._store, f"{rank}") for rank in range(self._ranks)]
            statuses = [json.loads(text) if text else {} for text in texts]
            statuses[self._rank] = status
            self._output.draw(statuses, first=self._rank)

    def _run(self) -> None:
        try:
            while not self._closed.wait(INTERVAL_S):
                self.exchange()
        except RuntimeError:  # the store is gone, and with it the run; others say so
            return


def describe_roster(roster: Roster) -> str:
    """One line: which machines take part, with their devices."""
    machines = [
        f"{host} ({', '.join(str(roster.devices[rank]) for rank in roster.ranks_of(number))})"
        for number, host in enumerate(roster.hosts)
    ]
    return f"  {len(machines)} machines: {', '.join(machines)}"
