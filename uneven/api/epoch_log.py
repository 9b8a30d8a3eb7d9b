"""Numbers that a loop of the user's own logs with `ddp.log`: means over all ranks, weighted by samples, per epoch.

Made by api/loop.py; every epoch's end and the end of the run collect what was logged since the last time. Ranks may
log different names, and a rank without samples none, so what travels is text and not a row of numbers.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.config import ENTRY_KEYS
from uneven.errors import InputError
from uneven.step.evaluation import name_clash

Sums = dict[int, dict[str, list[Any]]]  # epoch -> name -> [sum of value x weight, sum of weights]


class EpochLog:
    """`add` on any rank at any time, `collect` on all ranks together.

    What was logged for the batch in the user's hands counts when it is known to be trained: `keep`, else `forget`.
    """

    def __init__(self) -> None:
        self._of_batch: list[tuple[int, str, Any, float]] = []
        self._new: Sums = {}  # of this rank, since the last collect
        self._taken: set[int] = set()  # epochs whose totals came from another rank, and are in no entry here yet
        self.collected = 0  # how often
        self._totals: Sums = {}  # of all ranks

    def add(self, epoch: int, values: Mapping[str, Any], weight: float, metrics: Collection[str] = ()) -> None:
        """Tensors are added up on their device, so that logging does not wait for it.

        `metrics`: the names of the run's own evaluation, as far as they are known; they stand in the same entries.
        """
        for name, value in values.items():
            if name in ENTRY_KEYS:
                raise InputError(f"ddp.log({name}=...): the history has an entry of that name already; choose another")
            if name in metrics:
                raise name_clash([name])
            if isinstance(value, Tensor):
                value = value.detach().double()
            if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
                raise InputError(f"ddp.log({name}=...) takes one number, got {type(value).__name__}")
            self._of_batch.append((epoch, name, value, weight))

    def keep(self) -> None:
        for epoch, name, value, weight in self._of_batch:
            entry = self._new.setdefault(epoch, {}).setdefault(name, [0.0, 0.0])
            entry[0] = entry[0] + value * weight
            entry[1] += weight
        self.forget()

    def forget(self) -> None:
        self._of_batch = []

    def collect(self, group: Group, history: Sequence[dict[str, Any]], epoch: int | None = None) -> dict[str, float]:
        """The means of an epoch that ends here; new numbers of earlier ones go into their entries. A collective."""
        self.keep()
        own = {e: {n: [float(total), weight] for n, (total, weight) in v.items()} for e, v in self._new.items()}
        rows = [own] if group.world_size == 1 else gather_json(group, own)
        self._new, self.collected = {}, self.collected + 1
        changed, self._taken = self._taken, set()
        for row in rows:
            for key, values in row.items():
                changed.add(int(key))
                for name, (total, weight) in values.items():
                    entry = self._totals.setdefault(int(key), {}).setdefault(name, [0.0, 0.0])
                    entry[0] += total
                    entry[1] += weight
        means = {
            which: {name: total / weight if weight else float("nan") for name, (total, weight) in entries.items()}
            for which, entries in self._totals.items()
            if which in changed or which == epoch  # of which numbers may have been collected for a checkpoint
        }
        ending = means.pop(-1 if epoch is None else epoch, {})
        for past in history:
            if not past.get("is_inside_epoch"):
                past.update(means.get(past["epoch"] - 1, {}))
        return ending

    def catch_up(self, collected: int, totals: Mapping[str, Any]) -> None:
        """Another rank has collected so often. Where it was once more than here, this rank's numbers are in it."""
        if collected > self.collected:
            self._new, self.collected = {}, collected
            self.load_state_dict(totals)
            self._taken = set(self._totals)

    def state_dict(self) -> dict[str, Any]:
        """After `collect`, the same on all ranks."""
        return {str(epoch): entries for epoch, entries in self._totals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._totals = {int(epoch): {name: list(sums) for name, sums in v.items()} for epoch, v in state.items()}


def common_metric(group: Group, metric: Any) -> float:
    """The mean of a metric over the ranks that have one (None: it was not evaluated here); a collective."""
    try:
        row = [0.0, 0.0] if metric is None else [float(metric), 1.0]
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"ddp.scheduler_step(metric) takes one number, got {type(metric).__name__}") from None
    total, count = group.all_reduce(torch.tensor(row, dtype=torch.float64)).wait().tolist()
    if not count:
        raise InputError("ddp.scheduler_step(None) on every rank: one rank at least must have evaluated the metric")
    return float(total / count)
