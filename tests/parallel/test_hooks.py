"""Hooks on gradients that live as long as what they call, whatever other threads do."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn

from uneven.parallel.hooks import GradientHooks


class Counter:
    """Counts the gradients that come."""

    def __init__(self, model: nn.Module) -> None:
        self.found = 0
        self.hooks = GradientHooks(model.parameters(), self._before, self._after)

    def _before(self, _: nn.Parameter) -> None:
        self.found += 1

    def _after(self, _: nn.Parameter) -> None:
        pass


@pytest.mark.soak
def test_a_collection_on_another_thread_takes_no_hook_away() -> None:
    """On a busy core it did, once in some thousand backwards: torch hides a node's hooks while it has two owners."""
    interval, ends = sys.getswitchinterval(), threading.Event()

    def collect() -> None:
        while not ends.is_set():
            gc.collect()

    collector = threading.Thread(target=collect)
    gc.freeze()
    sys.setswitchinterval(1e-6)
    collector.start()
    try:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
        counter = Counter(model)
        for _ in range(5000):
            counter.found = 0
            model(torch.ones(4, 8)).sum().backward()
            assert counter.found == 40
    finally:
        ends.set()
        collector.join()
        sys.setswitchinterval(interval)
        gc.unfreeze()
