"""Clusters that the tests of the simulation share."""

from uneven.simulate.cluster import Cluster, RankKind
from uneven.simulate.links import Link

FREE = Link(1e9, 0.0)
FAST, SLOW = RankKind("fast", 0.0, 40 / 64), RankKind("slow", 0.0, 100 / 64)  # 40 and 100 ms a batch of 64


def pair(link: Link = FREE, **more: float) -> Cluster:
    """Two devices with a gap of 2.5 on one machine."""
    return Cluster((FAST, SLOW), (0, 0), link, **more)  # type: ignore[arg-type]


def mixed(between: Link, jitter: float = 0.03) -> Cluster:
    """Six devices of two kinds on two machines."""
    fast = RankKind("fast", 4.0, 0.5, jitter, round_ms=1.0)
    slow = RankKind("slow", 10.0, 1.3, jitter, round_ms=2.0)
    return Cluster((fast,) * 4 + (slow,) * 2, (0, 0, 0, 0, 1, 1), Link(5000.0, 0.05), between, seed=1)
