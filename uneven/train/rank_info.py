"""A rank's place in a run: who it is, whom it tells, what it leaves."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from uneven.comm.work import Traffic
from uneven.hardware.device import Device
from uneven.policy.axis import Axis
from uneven.results.state import TrainedState
from uneven.timeline.timeline import Timeline


class Report(Protocol):
    """Who is told about the run's progress; called on the rank's own thread, so each call must be short."""

    def started(self, axis: Axis, place: str) -> None: ...
    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float) -> None: ...
    def epoch_done(self, entry: dict[str, Any]) -> None: ...
    def say(self, lines: Sequence[str]) -> None:
        """What the user should know."""
        ...


@dataclass(frozen=True)
class RankInfo:
    """This rank's place: its number, and the devices of all ranks in rank order."""

    rank: int
    devices: tuple[Device, ...]

    @property
    def device(self) -> Device:
        return self.devices[self.rank]

    @property
    def world_size(self) -> int:
        return len(self.devices)


@dataclass(frozen=True)
class RankResult:
    """What a rank leaves: `log` holds (slot, first, samples) of every part it trained, in order.

    `rounds` holds (due, entered, merged, scale) of each round of a local policy, in parts trained by this rank.
    """

    state: TrainedState
    timeline: Timeline
    log: list[tuple[int, int, int]]
    rounds: list[tuple[int, int, int, float]]
    traffic: Traffic

    def save(self, home: Path, is_lead: bool) -> None:
        """The rank's folder for the launcher; all replicas are equal, so the lead's state stands for all."""
        if is_lead:
            self.state.save(home)
        (home / "timeline.json").write_text(json.dumps(self.timeline.to_json()))
        (home / "log.json").write_text(
            json.dumps({"parts": self.log, "rounds": self.rounds, "traffic": asdict(self.traffic)})
        )
