"""The reducer ended by its caller: gradients are summed, buckets sent in one order, with statistics per rank.

That it is right when backward ends it is held by test_strategies.py and by PyTorch's own DDP tests.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import SoloGroup
from uneven.comm.work import Work
from uneven.parallel.reducer import Reducer

TINY = 20  # bytes: almost every param has a bucket of its own


class Watched:
    """A thread group that remembers how large each sent tensor was."""

    def __init__(self, inner: ThreadGroup, has_cheap_host_sums: bool = False) -> None:
        self.has_cheap_host_sums = has_cheap_host_sums
        self.inner, self.rank, self.world_size, self.traffic = inner, inner.rank, inner.world_size, inner.traffic
        self.sizes: list[tuple[int, torch.dtype]] = []

    def all_reduce(self, tensor: Tensor) -> Work:
        self.sizes.append((tensor.numel(), tensor.dtype))
        return self.inner.all_reduce(tensor)

    all_reduce_max = broadcast = all_reduce

    def close(self) -> None: ...


class Net(nn.Module):
    """Three layers whose use and order depend on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, 1, dtype=torch.float64) for n in (2, 3, 4))
        own = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own))

    def forward(self, order: Sequence[int], scale: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number in order:
            layer = self.layers[number]
            assert isinstance(layer, nn.Linear)
            total = total + scale * layer(torch.ones(layer.in_features, dtype=torch.float64)).square().sum()
        return total


def summed(
    orders: list[list[int]], bucket_bytes: int = TINY, on_host: bool = False, **options: Any
) -> list[tuple[Any, ...]]:
    """Per rank: gradients after the second step, the rows heard, the sizes sent; nothing leaves early in the first."""

    def rank(group: ThreadGroup) -> tuple[Any, ...]:
        net, watched = Net(), Watched(group, on_host)
        reducer = Reducer(net.parameters(), watched, bucket_bytes, num_stats=2, **options)
        own = torch.tensor([10.0 + group.rank], dtype=torch.float64)
        for step in range(2):
            watched.sizes.clear()
            reducer.prepare()
            if orders[group.rank]:
                net(orders[group.rank], 1.0 + group.rank).backward()
            sent_early = len(watched.sizes)
            assert step or not sent_early
            rows = reducer.finalize(lambda: [group.rank, 0.0], lambda: own)
        grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        return grads, rows, watched.sizes, sent_early

    return on_threads(len(orders), rank)


def reference(orders: list[list[int]]) -> list[Tensor | None]:
    net = Net()
    for rank, order in enumerate(orders):
        if order:
            net(order, 1.0 + rank).backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("bucket_bytes", [TINY, 1 << 20])
@pytest.mark.parametrize(
    "orders",
    [
        [[0, 1, 2], [0, 1, 2]],
        [[0, 1, 2], [2, 1, 0], [1, 0, 2]],  # gradients arrive in another order on every rank
        [[0, 2], [2]],  # layer 1 is used nowhere
        [[0], [1], []],  # each on one rank only, and a rank without samples
    ],
)
def test_gradients_are_the_sum_and_unused_ones_are_none(
    orders: list[list[int]], bucket_bytes: int, on_host: bool
) -> None:
    expected = reference(orders)
    for grads, rows, _, _ in summed(orders, bucket_bytes, on_host):
        for grad, right in zip(grads, expected, strict=True):
            if right is None:
                assert grad is None
            else:
                torch.testing.assert_close(grad, right, rtol=1e-14, atol=1e-14)
        assert rows == [[float(rank), 10.0 + rank] for rank in range(len(orders))]


def test_buckets_leave_in_one_order_while_backward_runs() -> None:
    found = summed([[0, 1, 2], [2, 1, 0]])
    sizes = [sizes for _, _, sizes, _ in found]
    assert sizes[0] == sizes[1]
    # Bias and weight of the last layer first; the last bucket carries 2 x 2 numbers and 6 flags.
    assert [count for count, _ in sizes[0]] == [1, 4, 1, 3, 1, 2 + 4 + 6]
    assert all(early >= 1 for *_, early in found), "something left before finalize()"
    assert all(early == 0 for *_, early in summed([[0, 1, 2], [2, 1, 0]], overlap=False))
    # Numbers of the host travel by themselves where that is cheap.
    for _, _, sizes_by_host, _ in summed([[0, 1, 2], [2, 1, 0]], on_host=True):
        assert [count for count, _ in sizes_by_host] == [1, 4, 1, 3, 1, 2, 4 + 6]


def test_micro_batches_add_up_and_only_the_last_one_sends() -> None:
    def rank(group: ThreadGroup) -> tuple[list[Tensor], int]:
        net, watched = Net(), Watched(group)
        reducer = Reducer(net.parameters(), watched, TINY, num_stats=1)
        reducer.prepare()
        with reducer.no_sync():
            net([0, 1, 2], 1.0).backward()
        early = len(watched.sizes)
        net([0, 1, 2], 2.0).backward()
        reducer.finalize(lambda: [0.0])
        return [p.grad for p in net.parameters() if p.grad is not None], early

    net = Net()
    net([0, 1, 2], 2 * 3.0).backward()
    for grads, early in on_threads(2, rank):
        assert early == 0
        for grad, param in zip(grads, net.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close(grad, param.grad, rtol=1e-13, atol=1e-13)


def test_tied_and_frozen_params() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64))
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(0.5)
        net[1].weight = net[0].weight
        net[0].bias.requires_grad_(False)
        return net

    x = torch.arange(6, dtype=torch.float64).view(2, 3)

    def rank(group: ThreadGroup) -> list[Tensor | None]:
        net = make()
        reducer = Reducer(net.parameters(), group, TINY, num_stats=1)
        reducer.prepare()
        net(x[group.rank : group.rank + 1]).square().sum().backward()
        reducer.finalize(lambda: [0.0])
        return [p.grad for p in net.parameters()]

    net = make()
    net(x).square().sum().backward()
    right = [p.grad for p in net.parameters()]
    assert right[1] is None, "frozen"
    for grads in on_threads(2, rank):
        assert grads[1] is None
        for grad, one in zip(grads, right, strict=True):
            if one is not None:
                torch.testing.assert_close(grad, one)


def test_types_are_not_mixed_and_numbers_never_travel_as_halves() -> None:
    # The first param is the last bucket's: halves there would round the rows.
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float32]

    def rank(group: ThreadGroup) -> tuple[list[Tensor], list[list[float]], list[Any]]:
        params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
        watched = Watched(group)
        reducer = Reducer(params, watched, 1 << 20, num_stats=1)
        reducer.prepare()
        sum((p.float() * (2.0 + group.rank)).sum() for p in params).backward()  # type: ignore[union-attr]
        rows = reducer.finalize(lambda: [16777215.0 - group.rank])
        return [p.grad for p in params if p.grad is not None], rows, watched.sizes

    for grads, rows, sizes in on_threads(2, rank):
        assert [grad.dtype for grad in grads] == dtypes
        assert all(grad.tolist() == [5.0] * 3 for grad in grads)
        assert rows == [[16777215.0], [16777214.0]]
        assert [dtype for _, dtype in sizes] == [*reversed(dtypes), torch.float32]


def test_a_second_step_starts_from_zero_and_a_closed_reducer_has_no_hooks() -> None:
    def rank(group: ThreadGroup) -> None:
        net, watched = Net(), Watched(group)
        reducer = Reducer(net.parameters(), watched, TINY, num_stats=1)
        for _ in range(2):
            reducer.prepare()
            net([0, 1, 2], 1.0).backward()
            reducer.finalize(lambda: [0.0])
        right = reference([[0, 1, 2]])
        for param, one in zip(net.parameters(), right, strict=True):
            assert param.grad is not None
            assert one is not None
            torch.testing.assert_close(param.grad, 2 * one, rtol=1e-13, atol=1e-13)
        reducer.prepare()
        reducer.close()
        sent = len(watched.sizes)
        net([0, 1, 2], 1.0).backward()
        assert len(watched.sizes) == sent, "no hook is left"

    on_threads(2, rank)


def test_numbers_of_the_device_take_the_last_places_of_the_row() -> None:
    def rank(group: ThreadGroup) -> list[list[float]]:
        net = Net()
        reducer = Reducer(net.parameters(), group, TINY, num_stats=2)
        reducer.prepare()
        number = torch.tensor([0.1 + group.rank], dtype=torch.float64)
        return reducer.finalize(lambda: [7.0 + group.rank, 0.5], (lambda: number) if group.rank else None)

    for rows in on_threads(3, rank):
        assert rows == [[7.0, 0.5], [8.0, 1.1], [9.0, 2.1]]


def test_the_replay_of_a_graph_stands_in_for_prepare_and_backward() -> None:
    """The gradients are there, but no hook was called."""

    def rank(group: ThreadGroup) -> list[bool]:
        net = Net()
        reducer = Reducer(net.parameters(), group, TINY, num_stats=1)
        reducer.prepare()
        net([0, 2], 1.0).backward()
        used = reducer.used
        reducer.prepare()
        assert not reducer.used
        if group.rank == 1:
            reducer.replayed(used)
        reducer.finalize(lambda: [0.0])
        return [param.grad is None for param in net.parameters()]

    assert on_threads(2, rank) == [[False, False, True, True, False, False]] * 2


def test_a_changed_world_size_makes_room_for_the_new_ranks_statistics() -> None:
    """Ranks come and go during a run: the reducer reads them from its group at every step."""

    class Growing(SoloGroup):
        rank = 0
        world_size = 1

    group, net = Growing(), Net()
    reducer = Reducer(net.parameters(), group, TINY, num_stats=2)
    for group.rank, group.world_size in ((0, 1), (2, 3), (1, 2)):
        reducer.prepare()
        net([0, 1, 2], 1.0).backward()
        rows = reducer.finalize(lambda: [4.0, 5.0])
        assert rows == [[4.0, 5.0] if rank == group.rank else [0.0, 0.0] for rank in range(group.world_size)]
        for param, right in zip(net.parameters(), reference([[0, 1, 2]]), strict=True):
            torch.testing.assert_close(param.grad, right, rtol=1e-14, atol=1e-14)
