"""The steps that a rank skipped because they were not finite, their samples, and how many came in a row.

Every synchronizer hands each step's verdict to the engine's `DroppedSteps`, in order. The rule itself is
[Note: steps that are not finite] in step/finite.py.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from uneven.errors import NotFiniteError
from uneven.policy.axis import Part
from uneven.policy.round_report import RoundReport
from uneven.step.finite import Cause, Fault, Verdict
from uneven.train.agreement import RankStatus


class BadStep(NamedTuple):
    """A step that was skipped."""

    part: Part
    fault: Fault


class DroppedSteps:
    """Life cycle: `add` after every step, then `settle`, which tells the bad ones among those that are known.

    A captured step's verdict is known only when the device has done it; all others are known at once. `parts` holds
    (slot, first, samples) of what this rank dropped; `samples` counts those of all ranks, as far as this rank knows.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int]] = []
        self.samples = 0
        self.in_a_row = 0  # bad steps since the last good one
        self.last: BadStep | None = None
        self._reported = 0  # of `samples`
        self._unknown: deque[tuple[Part, Verdict]] = deque()

    def restore(self, parts: list[tuple[int, int, int]], samples: int, in_a_row: int) -> None:
        """What was dropped before the checkpoint from which this run goes on."""
        self.parts = parts
        self.samples = samples
        self._reported = samples
        self.in_a_row = in_a_row

    def add(self, part: Part, verdict: Verdict) -> None:
        self._unknown.append((part, verdict))

    def settle(self, ahead: int = 0) -> list[BadStep]:
        """The bad steps among all but the last `ahead`; waits for the device where it must."""
        found = []
        while len(self._unknown) > ahead:
            part, verdict = self._unknown.popleft()
            fault = verdict()
            if fault is None:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            self.last = BadStep(part, fault)
            if part.samples:
                self.parts.append((part.slot.index, part.first, part.samples))
            found.append(self.last)
        return found

    @property
    def last_fault(self) -> Fault | None:
        """Why the last step was skipped; None where it was not."""
        return self.last.fault if self.last is not None and self.in_a_row else None

    @property
    def last_fields(self) -> dict[str, float]:
        """The last bad step as fields of a RoundReport."""
        return {} if self.last is None else {"bad_slot": self.last.part.slot.index, "bad_cause": self.last.fault.cause}

    @property
    def counted(self) -> tuple[int, int]:
        """The samples dropped by all ranks, and how many of them were reported."""
        return self.samples, self._reported

    def agree(self, samples: int, reported: int) -> None:
        """Take over what another rank has `counted`."""
        self.samples, self._reported = samples, reported

    def count(self, samples: int) -> None:
        """So many samples were dropped, by any rank."""
        self.samples += samples

    def take_unreported(self) -> int:
        """The samples dropped since the last call, for an epoch's entry in the history."""
        fresh, self._reported = self.samples - self._reported, self.samples
        return fresh

    def report_again(self, samples: int) -> None:
        """The entry that held them was undone."""
        self._reported -= samples


def describe_drop(slot: int | str, samples: int, fault: Fault) -> str:
    """The line to print for a step that was skipped."""
    return f"  slot {slot}: skipped, {samples} samples dropped: {fault}"


def too_many(slot: int, fault: Fault, max_bad_steps: int) -> NotFiniteError:
    """The error that ends the run."""
    steps = "a step was" if max_bad_steps == 1 else f"{max_bad_steps} steps in a row were"
    return NotFiniteError(
        f"slot {slot}, rank {fault.rank}: {fault}; {steps} not finite and skipped (max_bad_steps={max_bad_steps}): the "
        "learning rate may be too high, or a batch holds numbers that are not finite"
    )


def count_skipped(dropped: DroppedSteps, bad_steps: Sequence[BadStep], max_bad_steps: int) -> list[str]:
    """Count steps that all ranks skipped; returns lines to print, or raises where too many came in a row."""
    lines = []
    for part, fault in bad_steps:
        dropped.count(part.slot.samples)
        lines.append(describe_drop(part.slot.index, part.slot.samples, fault))
    if bad_steps and dropped.in_a_row >= max_bad_steps:
        part, fault = bad_steps[-1]
        raise too_many(part.slot.index, fault, max_bad_steps)
    return lines


def note_dropped(dropped: DroppedSteps, rows: Sequence[RoundReport], slot_size: int) -> list[str]:
    """Count what ranks of a local policy have dropped since their last round; returns lines to print, by rank 0."""
    lines = []
    for rank, row in enumerate(rows):
        if row.dropped:
            dropped.count(int(row.dropped))
            slot = f"{int(row.bad_slot)}" + ("" if row.dropped <= slot_size else " and others before it")
            lines.append(describe_drop(slot, int(row.dropped), _last_fault(rank, row)))
    return lines


def check_bad_steps(rows: Sequence[RoundReport], max_bad_steps: int) -> None:
    """NotFiniteError, on all ranks alike, where one of a local policy has had too many bad steps in a row."""
    for rank, row in enumerate(rows):
        if row.status == RankStatus.NOT_FINITE:
            raise too_many(int(row.bad_slot), _last_fault(rank, row), max_bad_steps)


def _last_fault(rank: int, row: RoundReport) -> Fault:
    return Fault(rank, Cause(int(row.bad_cause)))
