"""A round in which ranks are lost: it counts where its last sum completed, and elsewhere nothing of it has happened.

[Note: a round counts or it does not] in uneven/average/background.py.
"""

from collections.abc import Collection
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.average.phases import gated
from tests.average.sides import Side, on_ranks
from tests.ranks import ThreadGroup, on_threads
from uneven.average.background import BackgroundAverage
from uneven.comm.work import Work
from uneven.errors import GroupLostError


class LosingGroup(ThreadGroup):
    """Sums of these numbers complete on the other ranks, but here a peer is lost before the result has come whole."""

    def __init__(self, group: ThreadGroup, failing: Collection[int]) -> None:
        super().__init__(group._room, group.rank)
        self._failing, self.sums = failing, 0

    def all_reduce(self, tensor: Tensor) -> Work:
        self.sums += 1
        if self.sums not in self._failing:
            return super().all_reduce(tensor)
        inner = super().all_reduce(tensor.clone())
        return Work(Losing(inner, tensor), tensor, self.traffic)


class Losing:
    def __init__(self, inner: Work, tensor: Tensor) -> None:
        self._inner, self._tensor = inner, tensor

    def wait(self) -> None:
        self._inner.wait()
        self._tensor.fill_(float("nan"))
        raise GroupLostError("a peer is gone")

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))


def two_rounds(lost: Collection[int], on: Collection[int], *, stale: float, verify: bool) -> list[dict[str, Any]]:
    """Three ranks, a round that goes well and one in which sums are lost on some of them; then those catch up."""
    agreed: dict[str, Tensor] = {}

    def rank(group: ThreadGroup) -> dict[str, Any]:
        losing = LosingGroup(group.new_group(), lost if group.rank in on else ())
        with closing(Side(losing, make_model=Normed, verify=verify)) as side:
            transport, buffers = side.average.transport, side.average._buffers
            side.round(1.0 + side.rank)
            first = transport.agreed.buffer.clone()
            side.work(0.1 * (side.rank + 1))
            side.model.running_mean.fill_(5.0 + side.rank)
            entered, old_buffers = side.params, buffers.agreed.clone()
            side.average.start(1.0, list)
            side.work(stale * side.rank)
            try:
                side.average.wait()
                is_committed = side.average.abandon()
            finally:
                group.all_reduce(torch.zeros(1)).wait()
            if is_committed:
                side.average.finish(is_unchanged=not stale * side.rank)
                agreed.update(params=transport.agreed.buffer.clone(), buffers=buffers.agreed.clone())
            else:
                assert torch.equal(transport.agreed.buffer, first), "the last average is whole"
                assert torch.equal(transport.snapshot.buffer, entered), "so is what was entered"
                assert torch.equal(buffers.agreed, old_buffers)
                assert torch.equal(side.params, entered + stale * side.rank)
            group.all_reduce(torch.zeros(1)).wait()
            if not is_committed and agreed:
                transport.average.buffer.copy_(agreed["params"])
                side.average.roll_forward(agreed["buffers"], is_unchanged=not stale * side.rank)
            after = side.params
            again = BackgroundAverage(side.average.replica, transport, buffers, group.new_group(), verify)
            again.start(1.0, list)
            again.finish(is_unchanged=True)
            again.close()
            mean = side.model.running_mean.clone()
            return {"is_committed": is_committed, "entered": entered, "after": after, "end": side.params, "mean": mean}

    return on_threads(3, rank)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("stale", [0.0, 0.7])
def test_where_the_last_sum_is_lost_a_rank_catches_up_with_those_that_have_it(stale: float, verify: bool) -> None:
    sums = 3 if verify else 2  # of a round; the second one's params, or the comparison of their average
    found = two_rounds([2 * sums], [1], stale=stale, verify=verify)
    assert [one["is_committed"] for one in found] == [True, False, True]
    average = torch.stack([one["entered"] for one in found]).mean(0)
    for rank, one in enumerate(found):
        torch.testing.assert_close(one["after"], average + stale * rank, rtol=1e-12, atol=1e-12)
        assert torch.equal(one["end"], found[0]["end"])
        assert torch.equal(one["mean"], found[0]["mean"])
    if not stale:
        assert torch.equal(found[1]["after"], found[0]["after"]), "the average itself, bit by bit"


@pytest.mark.parametrize("lost", [1, 2])
def test_where_nobody_has_the_round_everything_is_as_before_it(lost: int) -> None:
    """The first sum of the second round has already brought everybody's buffers."""
    found = two_rounds([2 + lost], [0, 1, 2], stale=0.5, verify=False)
    assert [one["is_committed"] for one in found] == [False] * 3
    held = [one["entered"] + 0.5 * rank for rank, one in enumerate(found)]
    for one, params in zip(found, held, strict=True):
        assert torch.equal(one["after"], params)
        torch.testing.assert_close(one["end"], torch.stack(held).mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one["mean"], torch.full((3,), 6.0, dtype=torch.float64))


@pytest.mark.parametrize("gate", [0, 1])
def test_a_sum_that_completes_after_it_was_abandoned_changes_nothing(gate: int) -> None:
    with gated() as (side, group):
        transport = side.average.transport
        side.average.start(1.0, list)
        for one in group.gates[:gate]:
            one.opened.set()
        assert group.gates[gate].reached.wait(100)
        given_up = transport.average.buffer
        assert not side.average.abandon()
        assert not side.average.abandon(), "it may be asked twice"
        assert transport.average.buffer.data_ptr() != given_up.data_ptr(), "the sum may still write there"
        kept = [flat.buffer.clone() for flat in (transport.snapshot, transport.average, transport.agreed)]
        group.open()
        side.average._thread.join(100)
        now = [flat.buffer for flat in (transport.snapshot, transport.average, transport.agreed)]
        assert all(torch.equal(*pair) for pair in zip(kept, now, strict=True))
        assert not side.average.is_done()


def test_what_is_written_down_before_a_round_is_there_before_anybody_has_its_average() -> None:
    written: set[int] = set()

    def body(side: Side) -> None:
        def row() -> list[float]:
            written.add(side.rank)
            return []

        side.average.start(1.0, row)
        side.average.finish(is_unchanged=True)
        assert written == {0, 1, 2}

    on_ranks(3, body)


def test_integers_that_some_ranks_took_from_one_that_is_gone_are_sent_again() -> None:
    """Rank 0 has the maximum of a rank that is gone, and so no reason of its own to send it."""

    def rank(group: ThreadGroup) -> list[int]:
        with closing(Side(group, make_model=lambda: nn.BatchNorm1d(1))) as side:
            buffers = side.average._buffers
            if group.rank == 0:
                side.model.num_batches_tracked.fill_(7)
                buffers._last_integers[0].fill_(7)
            buffers.doubt_integers()
            counts = []
            for _ in range(2):
                buffers.all_reduce_max_integers(group)
                counts.append(int(side.model.num_batches_tracked))
            return counts

    assert on_threads(2, rank) == [[7, 7], [7, 7]]
