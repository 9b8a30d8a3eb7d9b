"""Buffers over ranks: what one process would have had, where that is well defined."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks import ThreadGroup, on_threads
from uneven.average.buffers import BufferAverage


class Holder(nn.Module):
    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())


def after(
    start: dict[str, Tensor],
    changes: Callable[[int], dict[str, Tensor]],
    weights: Sequence[int],
    equal: tuple[str, ...] = (),
) -> list[dict[str, Tensor]]:
    """Every rank's buffers after it changed some of them and all have averaged."""

    def rank(group: ThreadGroup) -> dict[str, Tensor]:
        holder = Holder(**start)
        average = BufferAverage(holder, equal)
        for name, value in changes(group.rank).items():
            holder.get_buffer(name).copy_(value)
        average.run(group, weights[group.rank])
        return dict(holder.named_buffers())

    return on_threads(len(weights), rank)


def test_floats_are_averaged_by_samples() -> None:
    found = after({"scale": torch.zeros(2)}, lambda rank: {"scale": torch.tensor([4.0 * rank, 1.0])}, (3, 1))
    for buffers in found:
        assert torch.equal(buffers["scale"], torch.tensor([1.0, 1.0]))


def test_mean_and_variance_are_those_of_the_pooled_samples() -> None:
    own = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 3, generator=own, dtype=torch.float64) * (n + 1) + 5 * n for n in (7, 2, 12)]
    start = {name: torch.zeros(3, dtype=torch.float64) for name in ("running_mean", "running_var")}
    found = after(
        start,
        lambda rank: {"running_mean": parts[rank].mean(0), "running_var": parts[rank].var(0, correction=0)},
        [len(part) for part in parts],
    )
    pooled = torch.cat(parts)
    for buffers in found:
        torch.testing.assert_close(buffers["running_mean"], pooled.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(buffers["running_var"], pooled.var(0, correction=0), rtol=1e-12, atol=1e-12)
    means = sum(len(p) * p.var(0, correction=0) for p in parts) / len(pooled)
    assert not torch.allclose(pooled.var(0, correction=0), means), "the mean of the variances is another number"


def test_integers_take_the_maximum_of_every_element() -> None:
    start = {"count": torch.tensor(0), "seen": torch.zeros(3, dtype=torch.int32), "flag": torch.tensor([False, False])}

    def changes(rank: int) -> dict[str, Tensor]:
        return {
            "count": torch.tensor([5, 9, 7][rank]),
            "seen": torch.tensor([rank, 4 - rank, 1], dtype=torch.int32),
            "flag": torch.tensor([rank == 1, False]),
        }

    for buffers in after(start, changes, (1, 1, 1)):
        assert buffers["count"].item() == 9
        assert buffers["seen"].tolist() == [2, 4, 1]
        assert buffers["seen"].dtype == torch.int32
        assert buffers["flag"].tolist() == [True, False]


def test_a_buffer_that_changed_nowhere_keeps_its_bits_and_one_that_changed_anywhere_does_not() -> None:
    # Averaged by thirds, 0.1 would not come back bit by bit.
    table = torch.full((50,), 0.1) / 3
    start = {"table": table, "mask": torch.tensor([1, 0]), "moved": table}
    weights = (1, 3, 7)
    found = after(start, lambda rank: {"moved": table * 2} if rank == 1 else {}, weights)
    for buffers in found:
        assert torch.equal(buffers["table"], table)
        assert buffers["mask"].tolist() == [1, 0]
        torch.testing.assert_close(buffers["moved"], table * (14 / 11))


def test_a_rank_without_samples_takes_the_others_values() -> None:
    found = after(
        {"scale": torch.zeros(1)}, lambda rank: {"scale": torch.tensor([float("nan") if rank else 2.0])}, (5, 0)
    )
    assert [buffers["scale"].item() for buffers in found] == [2.0, 2.0]


def test_nobody_trained_anything_leaves_all_as_it_was() -> None:
    found = after({"scale": torch.ones(1)}, lambda rank: {"scale": torch.tensor([3.0 + rank])}, (0, 0))
    assert [buffers["scale"].item() for buffers in found] == [3.0, 4.0]


def test_buffers_said_to_be_equal_are_left_alone() -> None:
    found = after({"own": torch.zeros(1)}, lambda rank: {"own": torch.tensor([float(rank)])}, (1, 1), equal=("own",))
    assert [buffers["own"].item() for buffers in found] == [0.0, 1.0]


def test_the_next_average_compares_with_the_last_one() -> None:
    """Changed once, then constant: the second time it keeps its bits though the weights differ."""

    def rank(group: ThreadGroup) -> tuple[float, float, Any]:
        holder = Holder(scale=torch.zeros(1))
        average = BufferAverage(holder)
        holder.get_buffer("scale").fill_(0.1 + group.rank)
        average.run(group, 1 + group.rank)
        first = holder.get_buffer("scale").item()
        before = group.traffic.collectives
        average.run(group, 5)
        return first, holder.get_buffer("scale").item(), group.traffic.collectives - before

    for first, second, collectives in on_threads(3, rank):
        assert first == second
        assert collectives == 1, "floats travel in one payload, and there are no integers"


def test_buffers_of_several_widths_are_averaged_each_in_its_own() -> None:
    dtypes = {"narrow": torch.float16, "plain": torch.float32, "wide": torch.float64}
    start = {name: torch.zeros(2, dtype=dtype) for name, dtype in dtypes.items()}
    found = after(
        start, lambda rank: {name: torch.full((2,), 1 / 3 + rank, dtype=torch.float64) for name in dtypes}, (1, 1)
    )
    for buffers in found:
        for name, dtype in dtypes.items():
            assert buffers[name].dtype == dtype
            torch.testing.assert_close(buffers[name], torch.full((2,), 5 / 6, dtype=dtype))
