"""`verify`: a difference anywhere on an average's trip is named, with its stage."""

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.average.phases import gated
from tests.average.sides import Side, on_ranks
from tests.ranks import ThreadGroup, on_threads
from uneven.average.background import RoundResult
from uneven.average.verify import judge, odd_ranks
from uneven.comm.group import SoloGroup
from uneven.comm.work import Work
from uneven.errors import GroupLostError, RankError


def flip_a_bit(numbers: Tensor) -> None:
    numbers[3:4].view(torch.int64).bitwise_xor_(1)


def test_verify_changes_nothing_where_nothing_is_wrong() -> None:
    def body(side: Side) -> tuple[Tensor, list[RoundResult]]:
        arrived = []
        for _ in range(3):
            side.average.start(1.0 + side.rank, lambda: [2.0])
            side.work(0.1 * side.rank)
            arrived.append(side.average.finish(is_unchanged=False))
        arrived += [side.round(0.0), side.round(1.0)]
        return side.params, arrived

    plain, verified = (on_ranks(3, body, verify=verify) for verify in (False, True))
    for (params, arrived), (params_then, arrived_then) in zip(plain, verified, strict=True):
        assert torch.equal(params, params_then)
        for one, other in zip(arrived, arrived_then, strict=True):
            assert (one.rows, one.divergence) == (other.rows, other.divergence)


def test_verify_names_a_snapshot_that_changed_before_it_was_sent() -> None:
    with gated(verify=True) as (side, group):
        side.average.start(1.0, list)
        assert group.gates[0].reached.wait(100)
        flip_a_bit(side.average.transport.snapshot.buffer)
        group.open()
        with pytest.raises(RankError, match="snapshot changed between its taking and its sending"):
            side.average.finish(is_unchanged=True)


@pytest.mark.parametrize("which", ["device_average", "delta"])
def test_verify_names_an_average_that_changed_before_it_was_merged(which: str) -> None:
    """What is added comes from the average too, by the thread, so it is watched as well."""
    with closing(Side(SoloGroup(), verify=True)) as side:
        before = side.params
        side.average.start(1.0, list)
        side.average.wait()
        flip_a_bit(getattr(side.average.transport, which).buffer)
        with pytest.raises(RankError, match="average changed between its arrival and its merge"):
            side.average.finish(is_unchanged=False)
        assert torch.equal(side.params, before), "nothing wrong was merged"


class FaultyGroup:
    """Hands rank 1 its sum of the params with a flipped bit, as a broken wire or memory would."""

    def __init__(self, group: ThreadGroup) -> None:
        self.rank, self.world_size, self.traffic = group.rank, group.world_size, group.traffic
        self._group, self._sums = group, 0

    def all_reduce(self, tensor: Tensor) -> Any:
        self._sums += 1
        result = self._group.all_reduce(tensor).wait()
        if self._sums == 2 and self.rank == 1:
            flip_a_bit(result)
        return Work(Done(), result, self.traffic)


class Done:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def test_verify_names_the_rank_whose_average_differs_before_anybody_merges_it() -> None:
    def rank(group: ThreadGroup) -> None:
        with closing(Side(FaultyGroup(group.new_group()), verify=True)) as side:  # type: ignore[arg-type]
            before = side.params
            with pytest.raises(RankError, match="rank 1 has another average than rank 0") as raised:
                side.round(1.0)
            assert torch.equal(side.params, before)
            is_to_blame = group.rank == 1 and group.world_size == 3
            assert raised.type is (RankError if is_to_blame else GroupLostError)

    on_threads(3, rank)
    on_threads(2, rank)


def test_a_snapshot_that_changed_is_not_forgotten_where_the_round_is_given_up() -> None:
    """Others may have lost their group, and begun a new one, before this rank's training has come to the error."""
    with gated(verify=True) as (side, group):
        side.average.start(1.0, list)
        assert group.gates[0].reached.wait(100)
        flip_a_bit(side.average.transport.snapshot.buffer)
        group.open()
        side.average.wait()
        with pytest.raises(RankError, match="snapshot changed between its taking and its sending"):
            side.average.abandon()


def test_a_snapshot_that_changed_is_not_merged_late() -> None:
    with gated(verify=True) as (side, group):
        before, transport = side.params, side.average.transport
        side.average.start(1.0, list)
        group.gates[0].opened.set()
        assert group.gates[1].reached.wait(100)
        assert not side.average.abandon()
        flip_a_bit(transport.snapshot.buffer)
        transport.average.buffer.fill_(1.0)
        with pytest.raises(RankError, match="snapshot changed between its sending and its merge"):
            side.average.roll_forward(side.average._buffers.agreed, is_unchanged=False)
        assert torch.equal(side.params, before)


def test_a_majority_says_who_is_right() -> None:
    assert odd_ranks([5, 5, 5]) == []
    assert odd_ranks([5]) == []
    assert odd_ranks([7, 5, 5]) == [0]
    assert odd_ranks([5, 7, 5, 9, 5]) == [1, 3]
    assert odd_ranks([5, 7]) is None
    assert odd_ranks([5, 7, 5, 7]) is None
    assert odd_ranks([5, 7], suspects=[0]) == []
    assert odd_ranks([5, 7], suspects=[0, 1]) is None


def outcome(*arguments: Any, can_redo: bool = True) -> tuple[type[BaseException] | None, str]:
    try:
        judge(*arguments, can_redo=can_redo)
    except RankError as error:
        return type(error), str(error)
    return None, ""


def test_who_is_to_blame_fails_and_the_others_give_up_the_group() -> None:
    words = "rank {odd} differs from rank {right}"
    assert [outcome([5, 5, 5], rank, words) for rank in range(3)] == [(None, "")] * 3
    lost = (GroupLostError, "verify: rank 0 differs from rank 1")
    assert [outcome([7, 5, 5], rank, words) for rank in range(3)] == [(RankError, lost[1]), lost, lost]
    said = "verify: rank 1 differs from rank 0, and no majority says which of them is right"
    assert {outcome([5, 7], rank, words) for rank in range(2)} == {(GroupLostError, said)}
    assert {outcome([5, 7], rank, words, can_redo=False) for rank in range(2)} == {(RankError, said)}
    changed = "verify: rank 0: the snapshot changed between its sending and its merge"
    assert [outcome([5, 7], rank, words, [0])[0] for rank in range(2)] == [RankError, GroupLostError]
    assert outcome([5, 5], 1, words, [0]) == (GroupLostError, changed), "its delta would be wrong"


def test_without_verify_none_of_this_is_looked_at() -> None:
    def rank(group: ThreadGroup) -> Tensor:
        with closing(Side(FaultyGroup(group.new_group()))) as side:  # type: ignore[arg-type]
            side.round(1.0)
            return side.params

    found = on_threads(2, rank)
    assert not torch.equal(found[0], found[1]), "else the tests above would prove nothing"
