"""Who keeps whose shard, and how much each rank owns so that it holds by its memory."""

import random

import pytest

from uneven.policy.redundancy import copy_ring, held, holders, shares_with_copies


@pytest.mark.parametrize(
    "memory", [(1, 1, 1), (2, 2, 1), (4, 1, 4, 1), (1,) * 8, (24,) * 4 + (80,) * 4, (30, 24, 40, 24, 40)]
)
def test_what_ranks_hold_goes_by_memory(memory: tuple[float, ...]) -> None:
    copies = copy_ring(memory)
    own = shares_with_copies(memory, copies)
    assert sum(own) == pytest.approx(1)
    assert all(share >= 0 for share in own)
    assert held(own, copies) == pytest.approx([2 * one / sum(memory) for one in memory], rel=1e-3)


def test_two_ranks_hold_everything_each() -> None:
    copies = copy_ring((15, 6))
    assert copies == (1, 0)
    assert held(shares_with_copies((15, 6), copies), copies) == pytest.approx([1, 1])


def test_a_rank_without_memory_holds_nothing() -> None:
    copies = copy_ring((1, 0, 3))
    assert copies == (2, None, 0)
    own = shares_with_copies((1, 0, 3), copies)
    assert (own[1], held(own, copies)[1]) == (0, 0)
    assert copy_ring((0, 1)) == (None, None), "one rank alone has nobody to keep a copy"


def test_no_rings_or_shares_are_wrong_and_none_worse_than_owning_by_memory() -> None:
    draw = random.Random(0)
    for _ in range(200):
        size = draw.randint(2, 9)
        memory = [draw.choice((0.0, 8.0, 16.0, 24.0, 80.0)) for _ in range(size - 1)] + [8.0]
        copies = copy_ring(memory, [draw.randint(0, 2) for _ in range(size)])
        kept = [rank for rank in copies if rank is not None]
        assert len(set(kept)) == len(kept)
        assert all(rank != own for own, rank in enumerate(copies))
        own = shares_with_copies(memory, copies)
        assert sum(own) == pytest.approx(1)
        assert min(own) >= 0
        cost, plain = (
            sum(one**2 / most for one, most in zip(held(shares, copies), memory, strict=True) if most)
            for shares in (own, [one / sum(memory) for one in memory])
        )
        assert cost <= plain * (1 + 1e-9)


def test_copies_are_on_other_machines() -> None:
    for machines in ((0, 0, 1, 1), (0, 1, 1, 0, 2), (0, 0, 0, 1, 1, 2), (2, 2, 1, 1, 0, 0, 3)):
        copies = copy_ring((1.0,) * len(machines), machines)
        assert all(machines[kept] != own for own, kept in zip(machines, copies, strict=True) if kept is not None)
        for lost in set(machines):
            left = [rank for rank, machine in enumerate(machines) if machine != lost]
            assert None not in holders(left, len(machines), copies)


def test_a_shard_is_handed_in_by_its_owner_or_its_keeper() -> None:
    assert holders((0, 2), 3, (1, 2, 0)) == [0, 0, 2]
    assert holders((2,), 3, (1, 2, 0)) == [2, None, 2]
    assert holders((0, 2), 3, None) == [0, None, 2]
