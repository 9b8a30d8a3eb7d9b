"""A forward that assigns its buffers trains as one that writes into them: measured, averaged, put back and saved."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.step.nets import CPU
from tests.train.exact_runs import OPTIMIZERS, Net, train
from uneven.average.buffers import BufferAverage, HeldBuffers
from uneven.config import Task, resolve
from uneven.errors import InputError
from uneven.step.capture import refuse_assigned
from uneven.step.eager import EagerStep
from uneven.step.precision import Precision
from uneven.train.engine import build_model


class Running(Net):
    """Keeps a running mean of its inputs and counts its batches."""

    mean: Tensor
    batches: Tensor

    def __init__(self, dtype: torch.dtype, assigns: bool) -> None:
        super().__init__(dtype)
        self.assigns = assigns
        self.register_buffer("mean", torch.zeros(6, dtype=dtype))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        if self.assigns:
            self.mean, self.batches = mean, self.batches + 1
        else:
            self.mean.copy_(mean)
            self.batches += 1
        return super().forward(x)


@pytest.mark.parametrize(
    "options", [{"policy": "sync"}, {"policy": "balanced", "shares": (3, 1)}, {"policy": "cadence", "shares": (1, 1)}]
)
def test_buffers_are_those_of_a_forward_that_writes_into_them(options: dict[str, Any]) -> None:
    found = [
        [one.state for one in train(2, make_model=lambda dtype, assigns=assigns: Running(dtype, assigns), **options)]
        for assigns in (False, True)
    ]
    for written, assigned in zip(*found, strict=True):
        assert written.buffers["batches"] > 0
        for name, value in written.buffers.items():
            torch.testing.assert_close(assigned.buffers[name], value, rtol=0, atol=0, msg=name)
            assert torch.equal(assigned.buffers[name], found[1][0].buffers[name])


def test_measuring_before_the_run_leaves_no_trace() -> None:
    """The steps of `balanced` without shares measure the ranks first."""
    results = train(2, make_model=lambda dtype: Running(dtype, assigns=True), policy="balanced")
    trained = max(sum(samples > 0 for _, _, samples in one.log) for one in results)  # the speeds decide who had any
    assert [int(one.state.buffers["batches"]) for one in results] == [trained] * 2


def test_a_step_that_is_not_finite_leaves_them_as_they_were() -> None:
    model = Running(torch.float64, assigns=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = EagerStep(model, optimizer, lambda net, x: net(x).mean(), Precision("fp32", CPU))
    assert step([(torch.ones(4, 6).double(), 4)], 4) is None
    kept = model.mean.clone()
    assert step([(torch.full((4, 6), torch.nan).double(), 4)], 4) is not None
    assert torch.equal(model.mean, kept)
    assert model.batches == 1


def test_what_was_assigned_is_not_written_into_and_a_cache_may_grow() -> None:
    class Last(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

    model = Last()
    average, held, batch = BufferAverage(model), HeldBuffers(model), torch.ones(3)
    model.seen = batch
    assert held.assigned == ["seen"]
    with pytest.raises(InputError, match=r"assigns another tensor to the buffer seen.*compile='off'"):
        refuse_assigned(held)
    averaged = average.unpack(average.pack(average.snapshot_async()(), 0.5), 1.0)
    average.load(averaged)
    assert torch.equal(model.seen, torch.full((3,), 0.5))
    assert torch.equal(batch, torch.ones(3))
    model.seen = grown = torch.ones(4)  # as the tables of positions of some models do
    held.put_back()
    assert held.assigned == []
    assert model.seen is grown


class Expanded(Net):
    """Two layers hold one buffer, all of whose elements stand for one number."""

    def __init__(self, dtype: torch.dtype, many: int = 9) -> None:
        super().__init__(dtype)
        ones = torch.full((1,), 0.5, dtype=dtype).expand(many)
        self.first.register_buffer("factor", ones)
        self.second.register_buffer("factor", ones)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.first.factor * self.second.factor)


@pytest.mark.parametrize("options", [{"policy": "sync"}, {"policy": "balanced"}, {"policy": "async"}])
def test_an_expanded_buffer_is_one_like_any_other(options: dict[str, Any]) -> None:
    """Nothing can be copied into it as it is: not what was before the measuring steps, nor rank 0's values."""
    results = train(2, make_model=Expanded, **options)
    assert results[0].state.slot > 0
    for result in results:
        assert torch.equal(result.state.buffers["first.factor"], torch.full((9,), 0.5, dtype=torch.float64))


def test_an_expanded_buffer_of_two_layers_stays_one() -> None:
    config = resolve({"batch_size": 4, "epochs": 1})
    task = Task(lambda: Expanded(torch.float64), OPTIMIZERS["sgd"], lambda *_: None, [0])
    model = build_model(task, config, CPU, 2)
    assert model.first.factor is model.second.factor
    assert model.first.factor.stride() == (1,)
