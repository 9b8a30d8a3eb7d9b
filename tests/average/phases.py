"""Rounds whose phases are held."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from torch import Tensor

from tests.average.sides import Side
from uneven.comm.group import SoloGroup
from uneven.comm.work import Work


class Gate:
    """A collective that signals when a thread waits for it, and completes when the test sets an event."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(100)

    def is_completed(self) -> bool:
        return self.opened.is_set()


class GatedGroup(SoloGroup):
    """One rank alone whose sums each wait at a gate: the first is the head, the second the params."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [Gate(), Gate(), Gate()]
        self._passed = iter(self.gates)

    def all_reduce(self, tensor: Tensor) -> Work:
        return Work(next(self._passed), tensor, self.traffic)

    def open(self) -> None:
        for gate in self.gates:
            gate.opened.set()


@contextmanager
def gated(**options: Any) -> Iterator[tuple[Side, GatedGroup]]:
    group = GatedGroup()
    with closing(Side(group, **options)) as side:
        try:
            yield side, group
        finally:
            group.open()
