"""Ranks on several machines as threads of this process: real shared memory, a real network of Gloo on loopback."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from uneven.comm.exchange import Sizes
from uneven.comm.hierarchy import HierarchicalGroup, join_machines
from uneven.comm.store import open_store, reach_store, under
from uneven.comm.torch_group import GlooGroup

T = TypeVar("T")


def on_machines(
    machines: Sequence[int],
    function: Callable[[HierarchicalGroup], T],
    sizes: Sizes | None = None,
    after_end: bool = True,
    device: str = "cpu",
) -> list[T]:
    """function(group) on every rank at once, each on the machine of that number; the results in rank order.

    A rank that fails closes its groups, as a run does, so that the others fail too; the first exception is raised.
    """
    store, port = open_store()

    def run(rank: int) -> T:
        own = reach_store("127.0.0.1", port)
        world = GlooGroup(under("world", own), rank, len(machines))  # for claims alone: it is not connected
        group = join_machines(world, own, torch.device(device), machines, sizes=sizes)
        try:
            found = function(group)
            if after_end:
                group.all_reduce(torch.zeros(1)).wait()  # nobody leaves while another still sends
            return found
        finally:
            group.close()

    with ThreadPoolExecutor(len(machines)) as pool:
        futures = [pool.submit(run, rank) for rank in range(len(machines))]
    del store
    return [future.result() for future in futures]
