"""What an exact policy keeps so that the loss of a rank costs no more than the step in progress. Used by GradientSync.

Only where the run can go on without a rank (train/settle.py): the part of the step that has begun, the random numbers
before it, and every rank's shares since this generation began, from which the log of a lost rank is made.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from uneven.policy.axis import Axis, Part, part_of
from uneven.policy.ledger import Ledger
from uneven.train.engine import Engine
from uneven.train.settle_shards import updates_of

Log = list[tuple[int, int, int]]


class StepGuard:
    """Life cycle: one per generation; `plan` for every slot, `begin` and `done` around every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first = engine.trained
        self._plan: list[tuple[int, tuple[int, ...]]] = []  # (from this position on, shares)
        self._dropped: set[int] = set()  # slots of which all ranks dropped their parts
        self._part: Part | None = None  # of the step that has begun
        self._random: list[torch.Tensor] = []
        self._updates = 0  # of the strategy before the step, where it counts them

    def plan(self, position: int, shares: tuple[int, ...]) -> None:
        """These are the shares of the slot at this position; called in order, maybe ahead of the step."""
        if not self._plan or self._plan[-1][1] != shares:
            self._plan.append((position, shares))

    def begin(self, part: Part) -> None:
        self._part, self._updates = part, updates_of(self._engine)
        device = self._engine.device
        self._random = [torch.get_rng_state()]
        if device.type == "cuda":
            self._random.append(torch.cuda.get_rng_state(device))

    def done(self) -> None:
        self._part = None

    def note_dropped(self, slots: Iterable[int]) -> None:
        self._dropped.update(slots)

    def end_applied(self) -> None:
        """A sharded step is applied before its params are sent: one that was interrupted after that counts."""
        if self._part is not None and updates_of(self._engine) > self._updates:
            self.end_interrupted(was_applied=True)

    def end_interrupted(self, was_applied: bool) -> None:
        """The group is lost, perhaps inside a step. `was_applied`: another rank has applied the step, so it counts.

        Else buffers, loss meter and random numbers are again as before the step.
        """
        engine, part, self._part = self._engine, self._part, None
        if part is None:
            assert not was_applied, "a rank is behind only where it was interrupted"
            return
        if was_applied:
            engine.eager.end_update()
            engine.eager.cancel()
            engine.record_part(part, lambda: None, engine.trained + 1)
            return
        engine.eager.cancel()
        torch.set_rng_state(self._random[0])
        if engine.device.type == "cuda":
            torch.cuda.set_rng_state(self._random[1], engine.device)

    def record(self) -> dict[str, Any]:
        """The steps of this generation up to the last one that is applied here, for `log_of`; as JSON."""
        engine = self._engine
        return {
            "first": self._first,
            "end": engine.trained,
            "plan": [[position, list(shares)] for position, shares in self._plan if position < engine.trained],
            "dropped": sorted(self._dropped),
            "ledger": engine.ledger.to_json(),
        }


def log_of(record: Mapping[str, Any], rank: int, axis: Axis) -> dict[str, Log]:
    """All parts of a rank in a generation, and those that were dropped."""
    ledger, dropped, log = Ledger.from_json(record["ledger"]), set(record["dropped"]), []
    ends = [position for position, _ in record["plan"][1:]] + [record["end"]]
    for (start, shares), end in zip(record["plan"], ends, strict=True):
        for position in range(start, end):
            part = part_of(axis.slot(ledger.slot_at(position)), shares, rank, 1)
            if part.samples:
                log.append((part.slot.index, part.first, part.samples))
    return {"log": log, "dropped": [entry for entry in log if entry[0] in dropped]}
