"""What all ranks of a local policy agree upon beside params and buffers, as the furthest tells the others.

train/elastic/settle_local.py makes and sends it when ranks are lost; LocalSGD goes on from it in the next group.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from uneven.policy.ledger import Ledger
from uneven.policy.lineage import Era, decode
from uneven.policy.recorded import RecordedWindows
from uneven.policy.windows import Windows
from uneven.train.epoch_ends import EventCall
from uneven.train.lr_scale import LocalScale


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
    saves: list[int]  # slots that were asked for ...
    evaluations: list[int]  # ... while the run was on
    dropped: tuple[int, int]
    skipped: list[tuple[int, int]]  # (epoch, samples) that a loop of the user's own left out ...
    skipped_slots: int  # ... and the steps that they would have been
    epoch_sizes: list[int] = field(default_factory=list)  # of a stream without length
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
        read["pending"] = [EventCall(*call) for call in read["pending"]]
        read["skipped"] = [(epoch, samples) for epoch, samples in read["skipped"]]
        for name in ("members", "lr_scale", "dropped"):
            read[name] = tuple(read[name])
        return cls(**read)

    @property
    def new_ledger(self) -> Ledger:
        return Ledger.from_json(self.ledger)

    @property
    def lost_logs(self) -> list[dict[str, Any]]:
        """As RunRecord.lost_logs keeps them."""
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
