"""What an exact policy keeps so that the loss of a rank costs no more than the step in progress. Used by GradientSync.

Only where the run can go on without a rank (train/elastic/settle.py): the part of the step that has begun, and every
rank's shares since this generation began, from which the log of a lost rank is made.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from uneven.policy.axis import Axis, Part, part_of
from uneven.policy.ledger import Ledger
from uneven.step.finite import Fault
from uneven.train.engine import Engine
from uneven.train.state import BadStep

Log = list[tuple[int, int, int]]


class StepGuard:
    """Life cycle: one per generation; `plan` for every slot, `begin` and `done` around every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first = engine.state.trained
        self._plan: list[tuple[int, tuple[int, ...]]] = []  # (from this position on, shares)
        self._dropped: set[int] = set()  # slots of which all ranks dropped their parts
        self._left_out: list[tuple[int, int]] = []  # positions that a loop of the user's own left out
        self._part: Part | None = None  # of the step that has begun
        self._losses: list[tuple[float, float]] = []  # that were known before the step
        self._updates = 0  # of the strategy before the step, where it counts them

    def plan(self, position: int, shares: tuple[int, ...]) -> None:
        """These are the shares of the slot at this position; called in order, maybe ahead of the step."""
        if not self._plan or self._plan[-1][1] != shares:
            self._plan.append((position, shares))

    def begin(self, part: Part) -> None:
        """Before the part's forward. A loop of the user's own runs that itself: then the step begins it once more."""
        if self._part == part:
            return
        self._part, self._updates = part, self._engine.updates
        self._losses = self._engine.meter.known

    def done(self) -> None:
        self._part = None

    def leave_out(self, end: int) -> None:
        """All ranks leave out what follows the last step, up to this position; so the step that has begun, too."""
        self._left_out.append((self._engine.state.trained, end))
        self._part = None

    def note_dropped(self, slots: Iterable[int]) -> None:
        self._dropped.update(slots)

    def end_applied(self) -> None:
        """A sharded step is applied before its params are sent: one that was interrupted after that counts."""
        if self._part is not None and self._engine.updates > self._updates:
            self.end_interrupted(was_applied=True, fault=None)

    def end_interrupted(self, was_applied: bool, fault: Fault | None) -> list[BadStep]:
        """The group is lost, perhaps inside a step. `was_applied`: a survivor has been through the step, so it counts,
        or it was skipped for this `fault` and is returned.

        A step that is skipped or done again leaves buffers and loss meter as before it.
        """
        engine = self._engine
        part = self._part
        self._part = None
        if part is None:
            assert not was_applied, "a rank is behind only where it was interrupted"
            return []
        if was_applied and fault is None:
            engine.step.end_update()
        engine.step.cancel()
        if was_applied:
            return engine.state.commit(part, lambda: fault, engine.state.trained + 1, engine.late_verdicts)
        engine.meter.learn(self._losses)
        return []

    def record(self) -> dict[str, Any]:
        """The steps of this generation up to the last one that is applied here, for `log_of`; as JSON."""
        engine = self._engine
        return {
            "first": self._first,
            "end": engine.state.trained,
            "plan": [[position, list(shares)] for position, shares in self._plan if position < engine.state.trained],
            "dropped": sorted(self._dropped),
            "left_out": self._left_out,
            "ledger": engine.state.ledger.to_json(),
        }


def log_of(record: Mapping[str, Any], rank: int, axis: Axis) -> dict[str, Log]:
    """All parts of a rank in a generation, and those that were dropped."""
    ledger = Ledger.from_json(record["ledger"])
    dropped = set(record["dropped"])
    log = []
    ends = [position for position, _ in record["plan"][1:]] + [record["end"]]
    for (start, shares), end in zip(record["plan"], ends, strict=True):
        for position in range(start, end):
            if any(first <= position < stop for first, stop in record["left_out"]):
                continue
            part = part_of(axis.slot(ledger.slot_at(position)), shares, rank, 1)
            if part.samples:
                log.append((part.slot.index, part.first, part.samples))
    return {"log": log, "dropped": [entry for entry in log if entry[0] in dropped]}
