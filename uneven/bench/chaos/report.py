"""What `uneven chaos` tells after a run: which faults happened, how soon the others went on, and what it cost.

Read from what was seen while the run went on, and from the files that it left.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from uneven.files import read_json
from uneven.format import format_count

VERSION = 1


@dataclass
class Injected:
    """A fault that was done, at so many seconds after the first step."""

    at_s: float
    rank: int
    kind: str
    settled_s: float | None = None  # until the others trained on; None: nothing had to be settled, or it was not seen


@dataclass
class Counted:
    """What the log of a finished run says about its samples."""

    samples: int = 0
    lost: int = 0
    doubled: int = 0


class Settled(TypedDict):
    """How long the others took until they trained on."""

    count: int
    median_s: float
    max_s: float


class ChaosDocument(TypedDict):
    """What --json prints."""

    version: int
    seed: int
    ranks: int
    exit_code: int | None
    seconds: float
    stopped: bool  # by the user
    faults: list[Injected]
    settled: Settled | None
    generations: list[dict[str, Any]]
    samples: Counted | None
    trained_again: int | None  # at most
    exactly_once: bool
    right: bool  # exit code 0, and every sample counted exactly once


@dataclass
class ChaosReport:
    """One disturbed run."""

    seed: int
    ranks: int = 0
    code: int | None = None  # exit code of the run
    seconds: float = 0.0
    is_stopped: bool = False  # by the user
    faults: list[Injected] = field(default_factory=list)
    generations: list[dict[str, Any]] = field(default_factory=list)  # from the timeline, of the slowest rank each
    counted: Counted | None = None  # None: the run did not come to its end
    trained_again: int | None = None  # samples, at most; None: unknown, in an exact policy parts of a step per loss
    went_back: bool = False  # an exact policy, to a checkpoint: `trained_again` counts from there

    @property
    def settle_times(self) -> list[float]:
        return [fault.settled_s for fault in self.faults if fault.settled_s is not None]

    @property
    def is_exactly_once(self) -> bool:
        return self.counted is not None and not self.counted.lost and not self.counted.doubled

    @property
    def is_right(self) -> bool:
        return self.code == 0 and self.is_exactly_once

    @property
    def why(self) -> str:
        """In one line, what is wrong."""
        if self.code != 0:
            faults = format_count(len(self.faults), "fault")
            return f"the run did not survive: it ended with exit code {self.code} after {faults}"
        if self.counted is None:
            return "the run left no finished state: it must train by fit, Ddp.builder or Ddp.setup, and to the end"
        return f"{self.counted.lost:,} samples were lost and {self.counted.doubled:,} trained twice"

    def to_json(self) -> ChaosDocument:
        times = self.settle_times
        return {
            "version": VERSION,
            "seed": self.seed,
            "ranks": self.ranks,
            "exit_code": self.code,
            "seconds": self.seconds,
            "stopped": self.is_stopped,
            "faults": self.faults,
            "settled": {"count": len(times), "median_s": median(times), "max_s": max(times)} if times else None,
            "generations": self.generations,
            "samples": self.counted,
            "trained_again": self.trained_again,
            "exactly_once": self.is_exactly_once,
            "right": self.is_right,
        }

    def lines(self) -> list[str]:
        kinds = [fault.kind for fault in self.faults]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        times = self.settle_times
        settled = "nothing had to be settled" if self.code == 0 or not self.faults else "not at all"
        if times:
            settled = f"median {median(times):.2f} s, at most {max(times):.2f} s"
        step = "at most a step for each rank that was lost"
        again = "unknown" if self.counted is None else step
        if self.trained_again is not None:
            again = f"up to {self.trained_again:,} samples"
            again = f"{self.trained_again:,} samples since a checkpoint, and {step}" if self.went_back else again
        if self.counted is None:
            samples = "unknown: the run did not come to its end"
        elif self.is_exactly_once:
            samples = f"{self.counted.samples:,}, every one exactly once"
        else:
            samples = f"{self.counted.samples:,}, {self.counted.lost:,} lost, {self.counted.doubled:,} doubled"
        end = "stopped" if self.is_stopped else "ended well" if self.code == 0 else f"exit code {self.code}"
        return [
            f"run            {self.ranks} ranks, {end} after {self.seconds:.1f} s",
            f"faults         {counts or 'none: the run was over before the first one'}",
            f"settled        {settled}",
            f"trained again  {again}",
            f"samples        {samples}",
        ]


def read_results(report: ChaosReport, out: Path) -> None:
    """Fill in what the run's folder tells: its log, and the generations on its timeline."""
    state, log, timeline = (read_json(out / name) for name in ("state.json", "log.json", "timeline.json"))
    if not isinstance(state, dict) or not isinstance(log, dict) or not state.get("finished"):
        return
    report.counted = count_samples(log)
    events = timeline.get("events", []) if isinstance(timeline, dict) else []
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("kind") == "generation" and event["ms"] >= found.get(event["number"], event)["ms"]:
            found[event["number"]] = {name: event[name] for name in event if name not in ("t", "rank", "kind")}
    report.generations = list(found.values())
    report.went_back = any("checkpoint" in segment for segment in log.get("segments", []))
    if any(log.get("rounds", [])) or report.went_back:
        report.trained_again = sum(generation.get("again", 0) for generation in report.generations)


def count_samples(log: Mapping[str, Any]) -> Counted:
    """From log.json: every slot is there, each begins where the one before ended, and its parts fill it once.

    The log holds positions of epochs, which begin anew where they go back. Whatever a loop of the user's own left out
    is not lost.
    """
    parts: dict[int, list[tuple[int, int]]] = {}
    for rank in log["ranks"]:
        for slot, first, samples in rank:
            if samples:
                parts.setdefault(slot, []).append((first, samples))
    found = Counted()
    largest = max((sum(samples for _, samples in spans) for spans in parts.values()), default=0)
    begin, place = -1, 0
    for slot in range(log["slots"]):
        if not (spans := sorted(parts.pop(slot, []))):
            found.lost += largest
            begin = -1  # the next one is taken to begin where it does
            continue
        first = spans[0][0]
        if begin < 0 or first <= begin:
            place = 0 if first <= begin or slot == 0 else first
        begin = first
        for first, samples in spans:
            found.lost += max(0, first - place)
            found.doubled += max(0, min(place, first + samples) - first)
            found.samples += samples
            place = max(place, first + samples)
    found.doubled += sum(samples for spans in parts.values() for _, samples in spans)  # beyond the run's end
    found.lost = max(0, found.lost - sum(samples for _, samples in log.get("skipped", [])))
    return found
