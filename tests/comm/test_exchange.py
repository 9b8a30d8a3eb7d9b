"""Collectives through shared memory: results to the last bit, flow control, checksums. All ranks in one process."""

import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.comm.shared_ranks import SMALL, finish, reduce_all, shared_ranks
from tests.ranks import in_rank_order
from uneven.comm import shared_ring
from uneven.comm.exchange import Exchange
from uneven.errors import GroupLostError, RankError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8)
# None, one, an odd number, more than a piece, a part for each owner, several times the ring.
COUNTS = (0, 1, 7, 1031, 12_345, 75_001)

Make = Callable[..., list[Exchange]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Exchange] = []

    def make(*given: object, **options: object) -> list[Exchange]:
        ranks = shared_ranks(*given, **options)  # type: ignore[arg-type]
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        rank.close()


def parts_of(size: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
    return [torch.randint(0, 60, (count,), generator=generator, dtype=dtype) for _ in range(size)]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_sum_in_rank_order_to_the_last_bit(size: int, make: Make) -> None:
    ranks = make(size, verify=True)
    for dtype in DTYPES:
        for count in COUNTS if dtype == torch.float32 else (7, 12_345):
            parts = parts_of(size, count, dtype)
            expected = bits(in_rank_order([part.clone() for part in parts]))
            reduce_all(ranks, parts, torch.add, None)
            assert [bits(part) == expected for part in parts] == [True] * size, (dtype, count)


def test_a_few_numbers_are_sent_before_the_sums_in_front_of_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what the others wait for with their next step, and a sum on a device takes a while to enqueue."""
    ranks = make(2)
    large, small = parts_of(2, 5_000), parts_of(2, 6)
    expected = [bits(in_rank_order([part.clone() for part in parts])) for parts in (large, small)]
    works = [ranks[rank].start(large[rank], torch.add, None) for rank in (1, 0)]
    total, unsent = ranks[1]._sum, []
    monkeypatch.setattr(ranks[1], "_sum", lambda piece: (unsent.append(len(ranks[1]._unsent)), total(piece)))
    works += [ranks[rank].start(small[rank], torch.add, None) for rank in (1, 0)]
    finish(ranks, works)
    assert set(unsent) == {0}
    assert len(unsent) > 1
    for parts, right in zip((large, small), expected, strict=True):
        assert [bits(part) for part in parts] == [right] * 2


def test_nan_of_two_ranks_has_the_same_bits_on_both(make: Make) -> None:
    payloads = [torch.tensor([0x7FC00001]), torch.tensor([0x7FC00002])]
    parts = [payload.to(torch.int32).view(torch.float32).repeat(33) for payload in payloads]
    reduce_all(make(2), parts, torch.add, None)
    assert bits(parts[0]) == bits(parts[1])


@pytest.mark.parametrize("size", [2, 3])
def test_max_broadcast_and_reduce(size: int, make: Make) -> None:
    ranks = make(size)
    for count in (1, 20_011):
        parts = parts_of(size, count)
        largest = torch.stack(parts).amax(0)
        reduce_all(ranks, parts, torch.maximum, None)
        assert all(torch.equal(part, largest) for part in parts)
        for owner in range(size):
            parts = parts_of(size, count, seed=owner)
            values = parts[owner].clone()
            reduce_all(ranks, parts, None, owner)
            assert all(torch.equal(part, values) for part in parts)
            parts = parts_of(size, count, seed=owner)
            total = in_rank_order([part.clone() for part in parts])
            reduce_all(ranks, parts, torch.add, owner, False)
            assert torch.equal(parts[owner], total)


def test_the_result_is_in_the_callers_tensor_whatever_its_layout(make: Make) -> None:
    ranks = make(2)
    whole = [part.view(30, 40) for part in parts_of(2, 1200)]
    before = [part.clone() for part in whole]
    reduce_all(ranks, [part.t()[::2] for part in whole], torch.add, None)
    for part, old in zip(whole, before, strict=True):
        assert torch.equal(part[:, ::2], (before[0] + before[1])[:, ::2])
        assert torch.equal(part[:, 1::2], old[:, 1::2])
    scalars = [torch.tensor(2.0, requires_grad=True), torch.tensor(3.0)]
    reduce_all(ranks, scalars, torch.add, None)
    assert [scalar.item() for scalar in scalars] == [5.0, 5.0]
    # Clipping works in place: on a view of the memory it would reach the other rank.
    scalars[1].mul_(0.5)
    assert scalars[0].item() == 5.0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_order_of_turns_completes_many_collectives_at_once(size: int, make: Make) -> None:
    ranks, turns = make(size, verify=True), random.Random(size)
    counts = [turns.choice((0, 1, 900, 5_000, 40_000)) for _ in range(25)]
    kinds = [turns.choice(((torch.add, None), (torch.add, 1, False), (None, 0))) for _ in counts]
    parts = [parts_of(size, count, seed=place) for place, count in enumerate(counts)]
    expected = [in_rank_order([one.clone() for one in part]) for part in parts]
    values = [part[0].clone() for part in parts]
    works: list[list[object]] = [[] for _ in ranks]
    while any(len(started) < len(counts) for started in works):  # a rank may be many collectives ahead of another
        rank = turns.randrange(size)
        place = len(works[rank])
        if place < len(counts):
            works[rank].append(ranks[rank].start(parts[place][rank], *kinds[place]))
    finish(ranks, [work for started in works for work in reversed(started)])
    for part, total, first, kind in zip(parts, expected, values, kinds, strict=True):
        result = first if kind[0] is None else total
        for rank, one in enumerate(part):
            assert torch.equal(one, result) or (len(kind) == 3 and rank != 1)


def test_a_collective_that_is_waited_for_completes_the_earlier_ones(make: Make) -> None:
    ranks = make(2)
    parts = [parts_of(2, 100, seed=place) for place in range(3)]
    own = [ranks[0].start(part[0], torch.add, None) for part in parts]
    assert not own[0].is_completed()
    for part in parts:
        ranks[1].start(part[1], torch.add, None)
    own[2].wait()
    assert all(work.left == 0 for work in own)


def test_a_chunk_that_changes_on_its_way_is_found_and_named(make: Make) -> None:
    ranks, parts = make(3, verify=True), parts_of(3, 10)
    works = [rank.start(part, torch.add, None) for rank, part in zip(ranks[:2], parts, strict=False)]
    ring = ranks[1]._views.get(torch.uint8, ranks[1]._outbox._first, 4)
    ring[3] ^= 1
    # Nobody knows whose memory is wrong: a new group of the same ranks does it again.
    with pytest.raises(GroupLostError, match=r"verify: chunk 1 of rank 1 arrived with another checksum"):
        ranks[2].start(parts[2], torch.add, None)
    del works, ring


def test_a_chunk_that_is_posted_before_its_second_half_is_written_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader sees where the flag overtakes the values: here the flag of rank 0's second message."""
    real, is_early = shared_ring.Outbox._post, [False]

    def early(self: shared_ring.Outbox, numbers: object, start: int, length: int, checksum: int) -> None:
        half = self._views.get(torch.uint8, start + length // 2, length // 2)
        written = half.clone()
        if is_early[0]:
            half.zero_()
        real(self, numbers, start, length, checksum)  # type: ignore[arg-type]
        if is_early[0]:
            ranks[1].progress()
            half.copy_(written)

    monkeypatch.setattr(shared_ring.Outbox, "_post", early)
    for verify in (False, True):
        is_early[0] = False
        ranks = make(2, verify=verify)
        reduce_all(ranks, parts_of(2, 512), torch.add, None)
        parts = parts_of(2, 512, seed=1)
        total = parts[0] + parts[1]
        ranks[1].start(parts[1], torch.add, None)
        is_early[0] = True
        if verify:
            with pytest.raises(RankError, match="verify: chunk 2 of rank 0"):
                ranks[0].start(parts[0], torch.add, None)
        else:
            ranks[0].start(parts[0], torch.add, None)
            assert torch.equal(parts[1][:256], total[:256])
            assert not torch.equal(parts[1], total), "without checksums nobody notices"


def test_the_checksum_is_of_the_values_and_not_of_what_the_ring_holds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to the ring that is not done when the flag is posted, as a device's may be: the ring has old values."""
    ranks, parts = make(2, verify=True), parts_of(2, 512)
    monkeypatch.setattr(ranks[0]._views, "get", lambda dtype, _, count: torch.empty(count, dtype=dtype))
    ranks[0].start(parts[0], torch.add, None)
    with pytest.raises(RankError, match="verify: chunk 1 of rank 0"):
        ranks[1].start(parts[1], torch.add, None)


def test_ranks_that_start_different_collectives_are_told(make: Make) -> None:
    ranks = make(2)
    ranks[0].start(torch.zeros(3), torch.add, None)
    with pytest.raises(RankError, match="rank 0 sent 12 bytes where 16 were expected"):
        ranks[1].start(torch.zeros(4), torch.add, None)


def test_a_rank_that_left_is_named_and_its_last_values_count(make: Make) -> None:
    ranks = make(3)
    for rank in ranks[1:]:
        rank.start(torch.full((2,), 3.0), torch.add, None)
        rank.close()
    own = torch.ones(2)
    ranks[0].start(own, torch.add, None).wait()
    assert own.tolist() == [7.0, 7.0]
    with pytest.raises(RuntimeError, match=r"rank 1 .*peer"):
        ranks[0].start(own, torch.add, None).wait()


def test_nothing_is_left_of_a_group_that_was_closed() -> None:
    def held() -> tuple[int, bool]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), "uneven-test" in maps.read()

    before = held()
    assert not before[1]
    ranks = shared_ranks(3)
    parts = parts_of(3, 20_000)
    reduce_all(ranks, parts, torch.add, None)
    ranks[0].start(parts[0], torch.add, None)  # never waited for
    assert held() > before
    for rank in ranks:
        rank.close()
    assert held() == before
    with pytest.raises(RuntimeError, match="closed"):
        ranks[0].start(parts[0], torch.add, None)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
def test_many_random_exchanges_in_turns(size: int, make: Make) -> None:
    ranks, turns = make(size, SMALL, verify=True), random.Random(7)
    for round_ in range(2_000):
        parts = parts_of(size, turns.randrange(1, 30_000), seed=round_)
        total = in_rank_order([part.clone() for part in parts])
        reduce_all(ranks, parts, torch.add, None)
        assert all(torch.equal(part, total) for part in parts)
