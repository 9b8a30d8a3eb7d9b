"""A rank whose messages arrive with other bits than they were sent with: once all do it again, twice it is left out."""

from pathlib import Path

import pytest

from tests.launch.watch.cluster import MEMBERS, Cluster
from uneven.comm.lost import describe_wrong, sender_of
from uneven.errors import RankError


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(tmp_path, monkeypatch)
    for status in found.statuses:
        status["rounds"] = {"round": 4}
    return found


def blame(cluster: Cluster, generation: int, sender: int) -> None:
    """Rank 1 has read a wrong message, and rank 0 misses rank 1."""
    cluster.suspect(0, generation)
    cluster.suspect(1, generation, describe_wrong(7, sender))


def step(cluster: Cluster) -> None:
    for status in cluster.statuses:
        status["rounds"]["round"] += 1


def test_whoever_sends_wrong_bits_twice_in_a_row_is_treated_as_dead(cluster: Cluster) -> None:
    """It ended the run after five new groups."""
    cluster.at = {2: lambda: blame(cluster, 0, 2), 22: lambda: blame(cluster, 1, 2)}
    cluster.watch(60)
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (2, MEMBERS[:2])
    assert cluster.given_up == [2]
    assert cluster.reporter.lines == [
        f"{describe_wrong(7, 2)}: all ranks start a new group",
        f"rank 2 (cpu@0.4 on mini) sent wrong bits twice ({describe_wrong(7, 2)}): 2 ranks go on, its samples since "
        "the last round are trained again",
    ]


@pytest.mark.parametrize("between", ["another sender", "a round", "another cause"])
def test_nobody_is_blamed_for_what_does_not_come_twice_in_a_row(cluster: Cluster, between: str) -> None:
    cluster.at[2] = lambda: blame(cluster, 0, 2)
    cluster.at[22] = lambda: {
        "another sender": lambda: blame(cluster, 1, 1),
        "a round": lambda: (step(cluster), blame(cluster, 1, 2)),
        "another cause": lambda: cluster.suspect(0, 1),
    }[between]()
    cluster.watch(60)
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (2, MEMBERS)


def test_where_the_run_cannot_go_on_without_the_sender_it_ends_after_some_more(cluster: Cluster) -> None:
    cluster.at = {look: (lambda n=n: blame(cluster, n, 2)) for n, look in enumerate(range(2, 142, 20))}  # type: ignore[misc]
    for status in cluster.statuses:
        status["min_ranks"] = 3
    with pytest.raises(RankError, match=r"lost each other 6 times .* of rank 2 arrived"):
        cluster.watch(160)


def test_other_causes_name_no_sender() -> None:
    assert sender_of("connection reset by rank 1") is None
    assert (
        sender_of("verify: rank 1 has another average than rank 0, and no majority says which of them is right") is None
    )
