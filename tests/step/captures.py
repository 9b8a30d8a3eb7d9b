"""Steps that are captured, with a stand-in for CUDA graphs on the CPU."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.train.exact_runs import Net
from uneven.comm.group import SoloGroup
from uneven.parallel.buckets import UNLIMITED
from uneven.parallel.reducer import Reducer
from uneven.step.capture import Capture, InputMicros
from uneven.step.captured import CapturedStep
from uneven.step.eager import BeforeUpdate, EagerStep
from uneven.step.finite import OwnCheck
from uneven.step.precision import Precision

T = TypeVar("T")


CPU = torch.device("cpu")


CUDA = torch.device("cuda", 0)


class OnCpu(Capture):
    """What a CUDA graph does, without one: a record leaves nothing but the calls of hooks, a replay calls none."""

    made: list[list[int]]
    alive: list[Capture]

    def record(self, run: Callable[[InputMicros], T], beside: Capture | None = None) -> T:
        assert beside is None or beside in self.alive
        self.made.append([samples for _, samples in self.inputs])
        self._run, self._step = run, inspect.getclosurevars(run).nonlocals["self"]
        totals = self._step.meter.totals.clone()
        self._left = run(self.inputs)
        self._step.meter.totals.copy_(totals)
        for bucket in self._step.reducer.buckets:
            bucket.buffer.zero_()
        self.alive.append(self)
        return self._left

    def replay(self, inputs: InputMicros) -> None:
        self._copy_inputs(inputs)
        used = set(self._step.reducer._used)
        left = self._run(self.inputs)
        self._step.reducer._used = used
        if isinstance(self._left, Tensor):
            self._left.copy_(left)


class UpdateOnCpu(Capture):
    """An update as a replay computes it; a record computes nothing."""

    made: int  # set by the fixture: a value here would be a setting that a test has changed

    def record(self, run: Callable[[InputMicros], T], beside: Capture | None = None) -> T:
        assert beside is None
        UpdateOnCpu.made += 1
        self._run = run
        return None  # type: ignore[return-value]

    def replay(self, inputs: InputMicros) -> None:
        self._run(inputs)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes captured, in order."""
    OnCpu.made, OnCpu.alive, UpdateOnCpu.made = [], [], 0
    monkeypatch.setattr("uneven.step.captured.Capture", OnCpu)
    monkeypatch.setattr("uneven.step.captured_optimizer.Capture", UpdateOnCpu)
    monkeypatch.setattr("uneven.train.prepare.can_capture", lambda _: True)
    return OnCpu.made


class Pair:
    """The same model trained twice, eagerly and by captured backwards, each with a reducer of its own."""

    def __init__(
        self, step: Any, on: torch.device, precision: str = "fp32", dtype: torch.dtype = torch.float64
    ) -> None:
        self.eager = self._make(step, on, precision, dtype)
        self.captured = CapturedStep(self._make(step, on, precision, dtype), self._open)
        for one in (self.eager, self.captured):
            one.reducer = Reducer(
                one.model.parameters(), SoloGroup(), UNLIMITED, overlap=False, num_stats=len(OwnCheck._fields)
            )
        self._on, self._dtype = on, dtype
        self._random = torch.Generator().manual_seed(1)

    def _make(self, step: Any, on: torch.device, precision: str, dtype: torch.dtype) -> EagerStep:
        model = Net(dtype).to(on)
        optimizer = torch.optim.SGD(model.parameters(), lr=1 / 16, momentum=0.9, weight_decay=1e-2)
        return EagerStep(model, optimizer, step, Precision(precision, on), BeforeUpdate(max_grad_norm=1.0))

    @staticmethod
    def _open(inputs: Any) -> Any:
        return inputs[0] * 2, inputs[1]

    def _draw(self, samples: int) -> tuple[Any, int]:
        x = torch.randn(samples, 6, generator=self._random).to(self._on, self._dtype)
        return (x, torch.randint(0, 3, (samples,), generator=self._random).to(self._on)), samples

    def step(self, sizes: list[int], slot_samples: int, rtol: float = 1e-9, atol: float = 1e-12) -> None:
        inputs = [self._draw(samples) for samples in sizes]
        batches = [(self._open(one), samples) for one, samples in inputs]
        _, right = self.eager.forward_backward(batches, slot_samples, lambda: ())
        _, checks = self.captured.forward_backward(inputs, slot_samples, lambda: ())
        assert checks == [pytest.approx(right[0], rel=rtol, nan_ok=True)]
        pairs = zip(self.captured.model.named_parameters(), self.eager.model.parameters(), strict=True)
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=rtol, atol=atol, equal_nan=True)
        torch.testing.assert_close(self.captured.meter.totals, self.eager.meter.totals, rtol=rtol, atol=atol)
        assert self.eager.update(right) is None
        assert self.captured.update(checks) is None
        assert self.captured.precision.scaler.get_scale() == self.eager.precision.scaler.get_scale()

    def check_params(self, rtol: float = 1e-9, atol: float = 1e-12) -> None:
        moved = 0.0
        start = dict(Net(self._dtype).named_parameters())
        pairs = zip(self.captured.model.named_parameters(), self.eager.model.parameters(), strict=True)
        for (name, mine), theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
            moved += (mine.cpu() - start[name]).abs().sum().item()
        assert moved > 0.01
        assert torch.equal(self.captured.model.unused.weight.cpu(), start["unused.weight"]), "it had no gradient"
