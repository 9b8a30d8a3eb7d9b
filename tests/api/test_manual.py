"""Ddp.wrap: sums by hand equal a dense run, and wrong uses are refused."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from tests.ranks import ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y
from uneven import Ddp, InputError
from uneven.api.manual import Wrapped
from uneven.comm.group import Group, SoloGroup
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


def place(group: Group) -> RankInfo:
    rank_info = RankInfo(group.rank, parse_devices(["cpu"] * group.world_size))
    rank_info.join(group)
    return rank_info


def by_hand(wrapped: Wrapped, pieces: list[torch.Tensor], is_weighted: bool) -> dict[str, torch.Tensor]:
    """Three steps of SGD on this rank's piece of the samples; an empty one has no loss."""
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
        if group.rank:  # as of a script that does not seed: wrap makes up for it
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


def forward_backward(wrapped: Wrapped) -> None:
    F.cross_entropy(wrapped(X[:8].double()), Y[:8]).backward()


def on_wrapped(train: Callable[[Wrapped, torch.optim.Optimizer], None], size: int = 2) -> list[str]:
    """What each rank's InputError says, "" where `train` raised none."""

    def rank(group: ThreadGroup) -> str:
        wrapped = Wrapped(Net(torch.float64), place(group), lambda: None)
        try:
            train(wrapped, torch.optim.SGD(wrapped.model.parameters(), lr=0.1))
        except InputError as error:
            return str(error)
        finally:
            wrapped.close()
        return ""

    return on_threads(size, rank)


def assert_names_the_way_out(messages: list[str], what: str) -> None:
    for message in messages:
        assert what in message
        for call in ("all_reduce_gradients()", "weighted_all_reduce_gradients(count)", "no_sync()"):
            assert call in message


def test_a_step_by_gradients_that_nobody_reduced_raises_on_every_rank() -> None:
    def forgetful(wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        forward_backward(wrapped)
        optimizer.step()

    assert_names_the_way_out(on_wrapped(forgetful), "optimizer.step()")


def test_a_second_backward_onto_gradients_that_nobody_reduced_raises_on_every_rank() -> None:
    """The update is made by hand, so that no optimizer sees it."""

    def forgetful(wrapped: Wrapped, _: torch.optim.Optimizer) -> None:
        for _ in range(2):
            forward_backward(wrapped)
            with torch.no_grad():
                for param in wrapped.model.parameters():
                    if param.grad is not None:
                        param -= 0.1 * param.grad
                        param.grad.zero_()

    assert_names_the_way_out(on_wrapped(forgetful), "a second backward()")


def test_the_second_step_raises_where_only_the_first_was_reduced() -> None:
    def forgetful(wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        forward_backward(wrapped)
        wrapped.all_reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        forward_backward(wrapped)
        with pytest.raises(InputError, match="only this rank has"):
            optimizer.step()
        wrapped.all_reduce_gradients()
        optimizer.step()

    assert on_wrapped(forgetful) == ["", ""]


def test_no_sync_accumulates_as_in_ddp() -> None:
    def accumulating(wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            with wrapped.no_sync():
                forward_backward(wrapped)
                forward_backward(wrapped)
            forward_backward(wrapped)
            wrapped.all_reduce_gradients()
            optimizer.step()

    assert on_wrapped(accumulating) == ["", ""]


def test_gradients_accumulated_in_no_sync_still_have_to_be_reduced() -> None:
    def forgetful(wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        with wrapped.no_sync():
            forward_backward(wrapped)
        optimizer.step()

    assert_names_the_way_out(on_wrapped(forgetful), "optimizer.step()")


def test_gradients_that_were_thrown_away_need_no_reducing() -> None:
    def exploring(wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        forward_backward(wrapped)
        optimizer.zero_grad()
        optimizer.step()
        forward_backward(wrapped)
        wrapped.all_reduce_gradients()
        optimizer.step()

    assert on_wrapped(exploring) == ["", ""]


def test_one_backward_may_reach_a_param_several_times() -> None:
    """A reentrant checkpoint runs a backward of its own for every segment."""

    def checkpointed(wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        hidden = X[:8].double().requires_grad_()
        loss = checkpoint(wrapped.model, hidden, use_reentrant=True).sum()
        loss = loss + checkpoint(wrapped.model, hidden, use_reentrant=True).sum()
        loss.backward()
        wrapped.all_reduce_gradients()
        optimizer.step()

    assert on_wrapped(checkpointed) == ["", ""]


def test_another_models_optimizer_is_left_alone() -> None:
    def two_models(wrapped: Wrapped, _: torch.optim.Optimizer) -> None:
        other = nn.Linear(6, 1).double()
        forward_backward(wrapped)
        other(X[:8].double()).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()

    assert on_wrapped(two_models) == ["", ""]


def test_a_process_alone_has_nothing_to_reduce() -> None:
    wrapped = Ddp.wrap(Net(torch.float64))
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.1)
    for _ in range(3):
        with wrapped.no_sync():
            forward_backward(wrapped)
        forward_backward(wrapped)
        optimizer.step()
    wrapped.close()


class OneOfTwo(SoloGroup):
    """The first of two ranks, whose broadcasts nobody has to take."""

    world_size = 2


@pytest.mark.parametrize("is_closed", [True, False])
def test_no_hook_outlives_what_wrap_gave(is_closed: bool) -> None:
    """After close() the model trains as if it had never been wrapped; without close() hooks keep nothing alive."""

    before = len(_global_optimizer_pre_hooks)
    model = Net(torch.float64)
    wrapped = Wrapped(model, place(OneOfTwo()), lambda: None)
    forward_backward(wrapped)
    if is_closed:
        wrapped.close()
    left = weakref.ref(wrapped)
    del wrapped
    assert left() is None
    assert len(_global_optimizer_pre_hooks) == before
    assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in model.parameters())
    model(X[:8].double()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_sync_params_repeats_what_wrap_has_done() -> None:
    def rank(group: ThreadGroup) -> torch.Tensor:
        model = BufferNet()
        wrapped = Wrapped(model, place(group), lambda: None)
        with torch.no_grad():
            model.net.first.weight.fill_(float(group.rank + 5))
            model.norm.running_mean.fill_(float(group.rank + 5))
        wrapped.sync_params()
        assert torch.equal(model.norm.running_mean, torch.full((6,), 5.0).double())
        return model.net.first.weight.detach()

    first, second = on_threads(2, rank)
    assert torch.equal(first, second)
    assert torch.equal(first, torch.full_like(first, 5.0))
