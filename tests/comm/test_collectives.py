import pytest
import torch

from tests.ranks import ThreadGroup, on_threads
from uneven.comm.collectives import all_gather_shards, reduce_scatter_shards
from uneven.comm.group import SoloGroup

CUTS = [[0, 5, 7], [0, 7, 7], [0, 0, 7], [0, 3, 3, 7], [0, 2, 5, 7]]


@pytest.mark.parametrize("cut", CUTS)
def test_everyone_gets_every_owners_piece(cut: list[int]) -> None:
    def rank(group: ThreadGroup) -> tuple[torch.Tensor, int]:
        flat = torch.full((7,), -1.0)
        start, stop = cut[group.rank], cut[group.rank + 1]
        flat[start:stop] = torch.arange(start, stop, dtype=torch.float32)
        works = all_gather_shards(group, flat, cut)
        works.wait()
        return flat, group.traffic.payload_bytes

    for flat, sent in on_threads(len(cut) - 1, rank):
        assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert sent == 7 * 4, "not a byte of padding"


@pytest.mark.parametrize("over_nccl", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_every_owner_gets_the_sum_of_its_piece(cut: list[int], over_nccl: bool) -> None:
    def rank(group: ThreadGroup) -> list[float]:
        group.pretends_nccl = over_nccl
        flat = torch.arange(7, dtype=torch.float32) * 10**group.rank
        reduce_scatter_shards(group, flat, cut).wait()
        return flat[cut[group.rank] : cut[group.rank + 1]].tolist()

    times = sum(10**place for place in range(len(cut) - 1))
    found = [value for piece in on_threads(len(cut) - 1, rank) for value in piece]
    assert found == [place * times for place in range(7)]


def test_a_rank_alone_owns_all_and_sends_nothing() -> None:
    group, flat = SoloGroup(), torch.arange(3.0)
    all_gather_shards(group, flat, [0, 3]).wait()
    reduce_scatter_shards(group, flat, [0, 3]).wait()
    assert flat.tolist() == [0, 1, 2]
    assert group.traffic.collectives == 0


def test_bounds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="do not cover"):
        all_gather_shards(SoloGroup(), torch.zeros(3), [0, 2])
