"""Ranks that share memory, all in one process and one thread: what one of them does next is up to the test."""

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from uneven.comm.exchange import Exchange, Peers, Sizes
from uneven.comm.segment import Segment
from uneven.comm.shared_ring import Layout, create_semaphores

SMALL = Sizes(ring=64 * 2**10, piece=4 * 2**10)  # a sum of 300 kB goes round it several times


def shared_ranks(size: int, sizes: Sizes = SMALL, verify: bool = False) -> list[Exchange]:
    layout = Layout(size, sizes.ring)
    fd = os.memfd_create("uneven-test")
    os.posix_fallocate(fd, 0, layout.size)
    ranks = []
    for rank in range(size):
        segment = Segment(fd, layout.size)
        if rank == 0:
            create_semaphores(segment, layout)
        segment.pidfds = {other: os.pidfd_open(os.getpid()) for other in range(size) if other != rank}
        ranks.append(Exchange(segment, layout, Peers(segment, layout, rank, timeout_s=60.0), sizes, verify))
    os.close(fd)
    return ranks


def finish(ranks: Sequence[Exchange], works: Sequence[Any]) -> None:
    """All ranks take turns until their collectives are completed; nobody ever waits."""
    for _ in range(100_000):
        if not [work for work in works if not work.is_completed()]:
            return
    raise AssertionError(f"{len(ranks)} ranks got stuck")


def reduce_all(ranks: Sequence[Exchange], parts: Sequence[Tensor], *how: Any) -> None:
    finish(ranks, [rank.start(part, *how) for rank, part in zip(ranks, parts, strict=True)])
