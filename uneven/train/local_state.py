"""What all ranks of a local policy agree upon beside params and buffers: epochs passed, losses, pending events.

A window may span several epochs. The losses inside it are known only as one sum, so these epochs share their mean,
and `first` and `until` say over which slots it was taken. The events that a round leads to are a list: one that a lost
rank interrupts is still in it, and is redone from its start. Where ranks are lost, the furthest one tells the
others all of it as a LocalState (train/elastic/settle_local.py), and LocalSGD goes on from that in the next group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from uneven.policy.lineage import Era, decode
from uneven.policy.recorded import RecordedWindows
from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Windows
from uneven.train.engine import Engine
from uneven.train.local_policy import LocalScale
from uneven.train.synchronizer import EventCall


class EpochEnds:
    """Life cycle: `learn` and `note` with every round that is merged. The same on all ranks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_silent = False  # nothing is reached: a benchmark trains in segments
        self.epoch = 0  # epochs that all ranks have passed
        self.samples = 0  # of the epoch in progress, trained by all ranks
        self.losses = [0.0, 0.0]  # sum and count over all ranks since the last epoch end
        self.pending: list[EventCall] = []

    def state_dict(self) -> dict[str, Any]:
        """As JSON; `epoch` and `pending` only count within a run."""
        return {"losses": self.losses, "epoch_samples": self.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses, self.samples = list(state["losses"]), state["epoch_samples"]

    def learn(self, rows: Sequence[RoundReport]) -> None:
        self.samples += int(sum(row.samples for row in rows))

    def passed(self, rows: Sequence[RoundReport]) -> int:
        """How many epochs all ranks have passed with this round."""
        return max(self.epoch, self.engine.axis.epochs_before(int(min(row.next_slot for row in rows))))

    def note(self, rows: Sequence[RoundReport], event: int | None) -> None:
        """Add the round's losses; list the calls for every epoch that ends with it, and for an event at slot `event`.

        A checkpoint may be taken at the event: everything else that belongs to the round is up to date before that.
        """
        self.losses[0] += sum(row.loss_sum for row in rows)
        self.losses[1] += sum(row.loss_count for row in rows)
        axis, first = self.engine.axis, self.epoch
        stop = self.passed(rows)
        until = axis.epoch_end(stop - 1) if event is None else event
        is_inside = until > axis.epoch_end(stop - 1)  # an event inside the next epoch
        if stop > first:
            self.epoch, self.samples = stop, 0
        if stop == first and not is_inside:
            return
        # All may have got to an event with the round before it; held back by the event, they agree already.
        self.engine.state.reach_slot(max(self.engine.state.trained, until))
        self.pending += self.calls(first, stop, until, is_inside=is_inside)

    def calls(self, first: int, stop: int, until: int, *, is_inside: bool) -> list[EventCall]:
        """The ends of these epochs and an event inside the next one, with the mean loss, which begins anew."""
        loss_sum, count = self.losses
        if stop > first or self.engine.events.has_entry(until):  # a checkpoint alone has no entry
            self.losses = [0.0, 0.0]
        loss = loss_sum / count if count else float("nan")
        ended = [EventCall(epoch, loss, first, until) for epoch in range(first, stop)]
        return [*ended, EventCall(stop, loss, first, until, until)] if is_inside else ended

    @property
    def due(self) -> EventCall | None:
        """The first call that is pending: it stays so until all ranks have been through it."""
        if self.is_silent:
            self.pending.clear()
        return self.pending[0] if self.pending else None


@dataclass(frozen=True)
class LocalState:
    """After the last round of the lineage. Everything in it is plain JSON."""

    eras: list[Era]
    members: tuple[str, ...]  # that `windows` is of, in rank order
    windows: dict[str, Any] | None  # Windows.state_dict
    passed: int  # the last event that all ranks have passed
    lr_scale: tuple[float, bool]
    epoch: int
    epoch_samples: int
    losses: list[float]
    pending: list[EventCall]
    is_stopping: bool
    # Of this settlement:
    ledger: dict[str, Any] = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)  # the logs of members that are gone, as far as they count
    again: list[int] = field(default_factory=list)  # slots that they may have trained, and that are trained again

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "LocalState":
        read = dict(entry)
        read["eras"] = [Era(generation, rounds, tuple(members)) for generation, rounds, members in read["eras"]]
        read["pending"] = [EventCall._make(call) for call in read["pending"]]
        for name in ("members", "lr_scale"):
            read[name] = tuple(read[name])
        return cls(**read)

    @property
    def lost_logs(self) -> list[dict[str, Any]]:
        """As RunState.lost_logs keeps them."""
        return [{**log, "log": decode(log["log"]), "dropped": decode(log["dropped"])} for log in self.lost]

    def start(
        self, windows: Windows | RecordedWindows, scale: LocalScale, members: tuple[str, ...], position: int
    ) -> None:
        """Windows that were just made for these members go on from here, where so many slots are trained."""
        assert isinstance(windows, Windows), "nobody is lost in a replay"
        assert self.windows is not None, "of a run that is no replay"
        windows.go_on(self.windows, self.places(members))
        windows.resume_at(position, self.passed)
        scale.value, scale.is_known = self.lr_scale

    def places(self, members: tuple[str, ...]) -> list[int | None]:
        """Where each of these members was among those that `windows` is of."""
        return [self.members.index(member) if member in self.members else None for member in members]
