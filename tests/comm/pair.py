"""Two ranks over a real transport: this process is rank 0, rank 1 is one that runs the commands it is sent."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.forked import ForkedPopen
from uneven.comm.form import form_group
from uneven.comm.group import Group
from uneven.comm.hierarchy import join_machines
from uneven.comm.store import Store, open_store
from uneven.comm.torch_group import TorchGroup

RANK_1 = """
import os, signal, sys
import torch
from tests.comm.pair import form
from uneven.comm.store import reach_store

store = reach_store("127.0.0.1", int(sys.argv[1]))
group = form(store, 1, sys.argv[2])
twin = group.new_group()
for line in sys.stdin:
    print(eval(line), flush=True)
"""


def form(store: Store, rank: int, backend: str) -> Group:
    """With 'cpu' the two are on one machine of a hierarchy, and pass through all of its stages."""
    if backend == "cpu":
        return join_machines(TorchGroup(store, rank, 2), store, torch.device("cpu"), (0, 0))
    return form_group(store, rank, 2, torch.device("cpu"), backend, False)


class Pair:
    """Rank 0's groups, and a pipe to rank 1."""

    def __init__(self, backend: str) -> None:
        store, port = open_store()
        command = [sys.executable, "-c", RANK_1, str(port), backend]
        self.process = ForkedPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.store, self.group = store, form(store, 0, backend)
        self.twin = self.group.new_group()

    def ask(self, expression: str) -> None:
        """Rank 1 begins to work on it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def pair_over(backend: str) -> Iterator[Pair]:
    pair = Pair(backend)
    try:
        yield pair
    finally:
        pair.process.kill()
        pair.process.communicate()
        pair.group.close()
