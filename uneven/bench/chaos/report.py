"""What `uneven chaos` tells after a run: which faults happened, how soon the others went on, and what it cost.

Read from what was seen while the run went on, and from the files that it left.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from uneven.files import read_json
from uneven.format import format_count


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


@dataclass
class Settled:
    """How long the others took until they trained on."""

    count: int
    median_s: float
    max_s: float


@dataclass
class ChaosReport:
    """One disturbed run; what --json prints."""

    seed: int
    ranks: int = 0
    exit_code: int | None = None
    seconds: float = 0.0
    stopped: bool = False  # by the user
    faults: list[Injected] = field(default_factory=list)
    settled: Settled | None = None
    generations: list[dict[str, Any]] = field(default_factory=list)  # from the timeline, of the slowest rank each
    samples: Counted | None = None  # null: the run did not come to its end
    trained_again: int | None = None  # at most; null: unknown, in an exact policy parts of a step per loss
    went_back: bool = False  # an exact policy, to a checkpoint: `trained_again` counts from there
    exactly_once: bool = False
    right: bool = False  # exit code 0, and every sample counted exactly once
    version: int = 1

    def read_results(self, out: Path) -> None:
        """What follows from the faults and from the run's folder: its log, and the generations on its timeline."""
        times = [fault.settled_s for fault in self.faults if fault.settled_s is not None]
        self.settled = Settled(len(times), median(times), max(times)) if times else None
        state, log, timeline = (read_json(out / name) for name in ("state.json", "log.json", "timeline.json"))
        is_there = self.exit_code == 0 and isinstance(state, dict) and isinstance(log, dict)
        if not is_there or not state.get("finished"):
            return
        self.samples = count_samples(log)
        self.exactly_once = self.right = not self.samples.lost and not self.samples.doubled
        events = timeline.get("events", []) if isinstance(timeline, dict) else []
        found: dict[int, dict[str, Any]] = {}
        for event in events:
            if event.get("kind") == "generation" and event["ms"] >= found.get(event["number"], event)["ms"]:
                found[event["number"]] = {name: event[name] for name in event if name not in ("t", "rank", "kind")}
        self.generations = list(found.values())
        self.went_back = any("checkpoint" in segment for segment in log.get("segments", []))
        if any(log.get("rounds", [])) or self.went_back:
            self.trained_again = sum(generation.get("again", 0) for generation in self.generations)

    @property
    def why(self) -> str:
        """In one line, what is wrong."""
        if self.exit_code != 0:
            faults = format_count(len(self.faults), "fault")
            return f"the run did not survive: it ended with exit code {self.exit_code} after {faults}"
        if self.samples is None:
            return "the run left no finished state: it must train by fit, Ddp.builder or Ddp.setup, and to the end"
        return f"{self.samples.lost:,} samples were lost and {self.samples.doubled:,} trained twice"

    def lines(self) -> list[str]:
        kinds = Counter(fault.kind for fault in self.faults)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        settled = "nothing had to be settled" if self.exit_code == 0 or not self.faults else "not at all"
        if self.settled is not None:
            settled = f"median {self.settled.median_s:.2f} s, at most {self.settled.max_s:.2f} s"
        again = step = "at most a step for each rank that was lost"
        samples = "unknown: the run did not come to its end"
        if self.went_back:
            again = f"{self.trained_again:,} samples since a checkpoint, and {step}"
        elif self.trained_again is not None:
            again = f"up to {self.trained_again:,} samples"
        if self.samples is None:
            again = "unknown"
        elif self.exactly_once:
            samples = f"{self.samples.samples:,}, every one exactly once"
        else:
            samples = f"{self.samples.samples:,}, {self.samples.lost:,} lost, {self.samples.doubled:,} doubled"
        end = "stopped" if self.stopped else "ended well" if self.exit_code == 0 else f"exit code {self.exit_code}"
        return [
            f"run            {self.ranks} ranks, {end} after {self.seconds:.1f} s",
            f"faults         {counts or 'none: the run was over before the first one'}",
            f"settled        {settled}",
            f"trained again  {again}",
            f"samples        {samples}",
        ]


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
