"""Two strategies in alternating segments, in the same processes, each with a model of its own.

Called by rank.py for `--paired`. Both segments of a pair meet the same state of the machine, so drift cancels in their
ratio.
"""

import time
from typing import Any

import torch

from uneven.bench.strategies.task import Batches, StrategyTask, Trained, make_model, make_trained, step
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group


class Side:
    """One of the two strategies, with its model and batches."""

    def __init__(self, row: str, task: StrategyTask, group: Group, device: torch.device) -> None:
        self._trained: Trained = make_trained(row, make_model(row, task.model).to(device), group, None)
        self._batches = Batches(row, task.model, group, device)
        self._group, self._device, self._number = group, device, 0

    def time_segment(self, steps: int) -> float:
        """Train `steps` steps; returns the seconds they took on the slowest rank."""
        self._group.all_reduce(torch.zeros(1)).wait()
        began = time.perf_counter()
        for _ in range(steps):
            step(self._trained, self._batches, self._number)
            self._number += 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        own_s = time.perf_counter() - began
        return max(seconds for (seconds,) in gather_rows(self._group, [own_s]))


def alternate(task: StrategyTask, group: Group, device: torch.device) -> dict[str, Any]:
    """Seconds per step of every segment; pairs start with either side in turn, so that neither is always first."""
    assert task.against is not None
    ours, theirs = Side(task.row, task, group, device), Side(task.against, task, group, device)
    for side in (ours, theirs, ours, theirs):
        side.time_segment(task.steps)
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(task.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which].append((ours, theirs)[which].time_segment(task.steps) / task.steps)
    return {"ours": seconds[0], "theirs": seconds[1]}
