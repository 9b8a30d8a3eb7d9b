"""The scaling curve: the same mix of devices with more and more ranks, and what limits each number of them."""

from collections.abc import Sequence
from dataclasses import replace

from uneven.simulate.cluster import Cluster, Job, Policy
from uneven.simulate.engine import Simulated, simulate


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """So many ranks in the same mix of kinds, on machines as full as the cluster's are on the mean.

    Failures, joins and slowdowns are as frequent per rank.
    """
    have = len(cluster.ranks)
    per_machine = max(1, round(have / len(set(cluster.machines))))
    kinds = tuple(cluster.ranks[rank * have // ranks] for rank in range(ranks))
    machines = tuple(rank // per_machine for rank in range(ranks))
    between = cluster.between or (cluster.inside if ranks > per_machine else None)
    return replace(
        cluster,
        ranks=kinds,
        machines=machines,
        between=between,
        failures_per_hour=cluster.failures_per_hour * ranks / have,
        joins_per_hour=cluster.joins_per_hour * ranks / have,
        slowdowns_per_hour=cluster.slowdowns_per_hour * ranks / have,
    )


def scaling_curve(
    cluster: Cluster, job: Job, policies: Sequence[Policy], numbers: Sequence[int], max_hours: float
) -> list[tuple[int, Simulated]]:
    """Every policy with each number of ranks, in that order."""
    return [
        (ranks, simulate(resized(cluster, ranks), job, policy, max_hours)) for ranks in numbers for policy in policies
    ]
