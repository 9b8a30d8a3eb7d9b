"""What a report needs of a run's timeline: how its time was spent, and how the policy settled, epoch by epoch.

A timeline is megabytes and stays with its run; this is a few kilobytes, and the published files of docs/results have
it. Both give the same report.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from uneven.bench.single.shape import Shape, fits, is_number, is_whole, optional
from uneven.timeline.idle import OFF_THE_CLOCK, idle_by_cause, mean_sampled, mean_utilisation, sampled_idle
from uneven.timeline.record import TRAINING, Account, Event
from uneven.timeline.timeline import Timeline, rank_rounds

OUTSIDE = "outside training"
SHAPE: Shape = {
    "seconds": [{"*": is_number}],
    "utilisation": {"*": is_number},
    "idle_s": {"*": is_number},
    "rounds": is_whole,
    "communication_ms": optional(is_number),
    "wait_ms": optional(is_number),
    "gpus": {"*": lambda row: fits(row, [is_number]) and len(row) == 2},
    "calibration": [
        {
            "epoch": optional(is_whole),
            "anchor": optional(is_number),
            "lr_scale": optional(is_number),
            "shares": optional([is_number]),
        }
    ],
}


@dataclass(frozen=True)
class RunTimes:
    """One run's. Rounds are those of rank 0, as all of them pass the same ones."""

    seconds: list[dict[str, float]]  # per rank: state -> seconds
    utilisation: dict[str, float]  # "rank: device" -> share of the training time in which it computes
    idle_s: dict[str, float]  # cause -> seconds, all devices together
    rounds: int = 0
    communication_ms: float | None = None  # mean of a round
    wait_ms: float | None = None
    gpus: dict[str, list[float]] = field(default_factory=dict)  # by NVML: [mean percent, seconds below 5 percent]
    calibration: list[dict[str, Any]] = field(default_factory=list)  # per epoch: anchor, counts, shares, lr_scale

    @classmethod
    def of(cls, timeline: Timeline) -> "RunTimes":
        rounds = [one for one in rank_rounds(timeline.events) if one.rank == 0]
        idle: dict[str, float] = {}
        for causes in idle_by_cause(timeline).values():
            for cause, seconds in causes.items():
                name = OUTSIDE if cause in OFF_THE_CLOCK else cause
                idle[name] = idle.get(name, 0.0) + seconds
        return cls(
            seconds=[dict(account.seconds) for account in timeline.accounts],
            utilisation={f"{lane.rank}: {lane.device}": mean_utilisation(lane) for lane in timeline.lanes},
            idle_s=idle,
            rounds=len(rounds),
            communication_ms=sum(one.cost_ms for one in rounds) / len(rounds) if rounds else None,
            wait_ms=sum(one.wait_ms for one in rounds) / len(rounds) if rounds else None,
            gpus=_gpus(timeline),
            calibration=calibration_of(timeline.events),
        )

    @property
    def accounts(self) -> list[Account]:
        return [Account(rank, seconds) for rank, seconds in enumerate(self.seconds)]

    @property
    def anchor(self) -> float | None:
        """Of the last window, in a local policy."""
        known = [entry["anchor"] for entry in self.calibration if "anchor" in entry]
        return float(known[-1]) if known else None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RunTimes":
        """ValueError or TypeError where it is not what a published file has."""
        found = cls(**{name: value for name, value in record.items() if name != "round_sample"})  # no report needs it
        is_right = fits(vars(found), SHAPE) and all("epoch" in entry for entry in found.calibration)
        if not is_right or not all(set(TRAINING) <= set(seconds) for seconds in found.seconds):
            raise ValueError("these are no times of a run")
        return found


def calibration_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """What rank 0's policy had settled upon at the end of each epoch; without epochs, at the end."""
    known: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        if event.rank != 0:
            continue
        fields = event.fields
        if "anchor" in fields:
            known["anchor"] = round(float(fields["anchor"]), 2)
        if event.kind in ("share", "shares", "counts"):
            shares = fields["counts"] if event.kind == "counts" else fields["shares"]
            known["shares"] = [round(float(share), 4) for share in shares]
        if event.kind == "lr_scale":
            known["lr_scale"] = round(float(fields["scale"]), 4)
        if event.kind == "epoch":
            found.append({"epoch": fields["epoch"], **known})
    return found or ([{"epoch": None, **known}] if known else [])


def _gpus(timeline: Timeline) -> dict[str, list[float]]:
    """While any device trained; empty without NVML."""
    spans = [span for lane in timeline.lanes for span in lane.spans if span[0] == "compute"]
    if not spans:
        return {}
    between = min(start for _, start, _ in spans), max(end for _, _, end in spans)
    mean, idle = mean_sampled(timeline, between), sampled_idle(timeline, between)
    return {name: [round(mean[name], 2), round(idle.get(name, 0.0), 3)] for name in mean if name.startswith("gpu ")}
