"""Ddp.wrap: sums by hand equal a dense run, and wrong uses are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import ThreadGroup, on_threads
from tests.train.test_gradient_sync import OPTIMIZERS, Net, X, Y
from uneven import Ddp, InputError
from uneven.api.manual import Wrapped
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo


class BufferNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(torch.float64)
        self.norm = nn.BatchNorm1d(6, affine=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.norm(x)
        return self.net(x)


def place(group: ThreadGroup) -> RankInfo:
    rank_info = RankInfo(group.rank, parse_devices(["cpu"] * group.world_size))
    rank_info.join(group)
    return rank_info


def by_hand(wrapped: Wrapped, pieces: list[torch.Tensor], is_weighted: bool) -> dict[str, torch.Tensor]:
    """Three steps of SGD on this rank's piece of the samples; an empty one has no loss."""
    wrapped.sync_params()
    optimizer = OPTIMIZERS["sgd"](wrapped.model.parameters())
    mine = pieces[wrapped.rank]
    for _ in range(3):
        optimizer.zero_grad()
        if len(mine):
            F.cross_entropy(wrapped(X[mine].double()), Y[mine]).backward()
        if is_weighted:
            wrapped.weighted_all_reduce_gradients(len(mine))
        else:
            wrapped.all_reduce_gradients()
        optimizer.step()
    wrapped.sync_buffers()
    return {name: value.clone() for name, value in wrapped.model.state_dict().items()}


@pytest.mark.parametrize(
    ("sizes", "is_weighted"),
    [((35, 35), False), ((50, 20), True), ((40, 0, 30), True), ((2, 68), True), ((20, 20, 30), True)],
)
def test_the_manual_tier_equals_a_dense_run(sizes: tuple[int, ...], is_weighted: bool) -> None:
    everything = torch.arange(70)

    def rank(group: ThreadGroup) -> dict[str, torch.Tensor]:
        model = BufferNet()
        if group.rank:  # sync_params makes up for it
            with torch.no_grad():
                model.net.first.weight.fill_(float(group.rank))
        return by_hand(Wrapped(model, place(group), lambda: None), list(everything.split(list(sizes))), is_weighted)

    dense = by_hand(Ddp.wrap(BufferNet()), [everything], is_weighted)
    results = on_threads(len(sizes), rank)
    for result in results:
        for name, value in result.items():
            if "norm" not in name:
                torch.testing.assert_close(value, dense[name], rtol=1e-10, atol=1e-12)
            assert torch.equal(value, results[0][name]), name
    torch.testing.assert_close(results[0]["norm.running_mean"], dense["norm.running_mean"], rtol=1e-9, atol=1e-12)
    assert not torch.equal(dense["norm.running_mean"], BufferNet().norm.running_mean)


def test_a_rank_without_samples_may_have_nan_gradients() -> None:
    def rank(group: ThreadGroup) -> torch.Tensor:
        net = Net(torch.float64)
        rows = X[: 4 * (1 - group.rank)].double()  # rank 1 has none: its mean is NaN
        F.cross_entropy(net(rows), Y[: len(rows)]).backward()
        Wrapped(net, place(group), lambda: None).weighted_all_reduce_gradients(len(rows))
        assert net.unused.weight.grad is None
        assert net.first.weight.grad is not None
        return net.first.weight.grad

    first, second = on_threads(2, rank)
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(InputError, match="count=-1"):
        Ddp.wrap(Net(torch.float64)).weighted_all_reduce_gradients(-1)
