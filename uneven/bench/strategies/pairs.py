"""Two strategies in turn, in the same processes, each with a model of its own: for ratios that a drift cannot bend."""

import time
from typing import Any

import torch

from uneven.bench.strategies.task import Batches, StrategyTask, Trained, make_model, make_trained, step
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group


class Side:
    """One of the two, with the batches it goes through."""

    def __init__(self, row: str, task: StrategyTask, group: Group, device: torch.device) -> None:
        self._trained: Trained = make_trained(row, make_model(row, task.model).to(device), group, None)
        self._batches = Batches(row, task.model, group, device)
        self._group, self._device, self._number = group, device, 0

    def segment(self, steps: int) -> float:
        """Seconds that so many steps take, on the slower rank."""
        self._group.all_reduce(torch.zeros(1)).wait()
        began = time.perf_counter()
        for _ in range(steps):
            step(self._trained, self._batches, self._number)
            self._number += 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        taken = time.perf_counter() - began
        return max(seconds for (seconds,) in gather_rows(self._group, [taken]))


def alternate(task: StrategyTask, group: Group, device: torch.device) -> dict[str, Any]:
    """Seconds per step of every segment; every other pair begins with the other side, so that none is always first."""
    assert task.against is not None
    ours, theirs = Side(task.row, task, group, device), Side(task.against, task, group, device)
    for side in (ours, theirs, ours, theirs):
        side.segment(task.steps)
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(task.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which].append((ours, theirs)[which].segment(task.steps) / task.steps)
    return {"ours": seconds[0], "theirs": seconds[1]}
