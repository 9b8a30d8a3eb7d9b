"""sync and balanced are exact: every parameter against one process training the same global batches.

On threads: real workers, real arithmetic, a group that sums in rank order. Ranks in processes of their own are in
tests/launch/test_run.py.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.parallel.parity import all_pairs
from tests.ranks import Silent, ThreadGroup, on_threads
from uneven.config import Evaluation, Task, resolve
from uneven.data.sample_order import prove_exactly_once
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.launch.requests import Requests
from uneven.parallel.tensor_parallel import Columns, Plan, Rows
from uneven.policy.axis import Axis
from uneven.policy.exact import Balanced
from uneven.step.eager import EagerStep
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.worker import Worker

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}
generator = torch.Generator().manual_seed(0)
X = torch.randn(70, 6, generator=generator)
Y = torch.randint(0, 3, (70,), generator=generator)


class Net(nn.Module):
    """Filled from a generator of its own: threads share torch's global one. `unused` never gets a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.unused = nn.Linear(2, 2)
        self.second = nn.Linear(9, 3)
        own = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.3)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def fsdp_units(self) -> list[nn.Module]:
        return [self.first, self.second]

    def tensor_plan(self) -> Plan:
        return {"first": Columns(), "second": Rows()}


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_and_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    mask = batch[1] != 0
    return (losses * mask).sum(), mask.sum()


def train(
    size: int,
    *,
    optimizer: str = "sgd",
    dtype: torch.dtype = torch.float64,
    step: Any = mean_loss,
    dataset: Any = None,
    scheduler: Any = None,
    evaluation: Evaluation | None = None,
    make_model: Callable[[torch.dtype], nn.Module] = Net,
    **changes: Any,
) -> list[RankResult]:
    config = resolve({"batch_size": 16, "epochs": 2, "seed": 3, **changes})
    data = TensorData(X.to(dtype), Y) if dataset is None else dataset
    task = Task(lambda: make_model(dtype), OPTIMIZERS[optimizer], step, data, scheduler, evaluation)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        return Worker(task, config, RankInfo(group.rank, devices), lambda _: group, Requests(), Silent()).train()

    results = on_threads(size, rank)
    axis = Axis(len(data), config.slot_size(size), config.epochs)
    prove_exactly_once(axis, [result.log for result in results], axis.total)
    return results


def params(result: RankResult) -> dict[str, torch.Tensor]:
    return result.state.params


def assert_exact(ours: list[RankResult], dense: RankResult, optimizer: str, dtype: torch.dtype) -> None:
    for result in ours[1:]:
        assert all(torch.equal(value, params(ours[0])[name]) for name, value in params(result).items())
    start = {name: param.detach() for name, param in Net(dtype).named_parameters()}
    moved = sum(float(((value - start[name]) ** 2).sum()) for name, value in params(dense).items()) ** 0.5
    apart = sum(float(((value - params(dense)[name]) ** 2).sum()) for name, value in params(ours[0]).items()) ** 0.5
    assert moved > 0.01
    if dtype == torch.float64:
        for name, value in params(ours[0]).items():
            torch.testing.assert_close(value, params(dense)[name], rtol=1e-10, atol=1e-10)
    elif optimizer == "sgd":
        for name, value in params(ours[0]).items():
            torch.testing.assert_close(value, params(dense)[name], rtol=1e-5, atol=1e-6)
    else:
        assert apart / moved <= 1e-4


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.1},
    "accumulated": {"accumulate": 3},
    "counted": {"step": loss_and_count},
}
FACTORS: dict[str, Any] = {
    "optimizer": tuple(OPTIMIZERS),
    "dtype": (torch.float64, torch.float32),
    "size": (2, 3, 4),
    "kind": tuple(OPTIONS),
}
GRID = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
PAIRS = all_pairs(**FACTORS)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if cell in PAIRS else [pytest.mark.grid]) for cell in GRID],
    ids=lambda cell: "-".join(str(value) for value in cell.values()),
)
def test_equals_one_process(cell: dict[str, Any]) -> None:
    """Tail slots of 70 samples in slots of 24 and 72, an unused layer, shares that include zero."""
    optimizer, dtype, size, options = *(cell[name] for name in ("optimizer", "dtype", "size")), OPTIONS[cell["kind"]]
    shares = [(5, 0, 2, 1), (1, 3, 1, 1)][size % 2][:size]
    common = {"optimizer": optimizer, "dtype": dtype, "global_batch_size": 24, **options}
    dense = train(1, **common)[0]
    assert_exact(train(size, policy="sync", **common), dense, optimizer, dtype)
    assert_exact(train(size, shares=shares, **common), dense, optimizer, dtype)
    assert_exact(train(size, policy="balanced", **common), dense, optimizer, dtype)


@settings(max_examples=settings().max_examples // 3)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 3))
def test_equals_one_process_whatever_the_shares(shares: list[int], slot: int, accumulate: int) -> None:
    if sum(shares) == 0:
        return
    options = {"global_batch_size": slot, "accumulate": accumulate, "epochs": 1, "max_grad_norm": 0.5}
    dense = train(1, **options)[0]
    assert_exact(train(len(shares), shares=shares, **options), dense, "sgd", torch.float64)


def test_batch_size_is_per_device_and_the_product_is_the_global_batch() -> None:
    dense = train(1, batch_size=24)[0]
    assert_exact(train(3, batch_size=8), dense, "sgd", torch.float64)


def test_the_learning_rate_follows_global_samples() -> None:
    def make(optimizer: Any) -> StepLR:
        return StepLR(optimizer, 2, gamma=0.5)

    dense = train(1, global_batch_size=24, scheduler=make)[0]
    ours = train(3, global_batch_size=24, scheduler=make)
    assert_exact(ours, dense, "sgd", torch.float64)
    assert [r.state.param_groups[0]["lr"] for r in ours] == [dense.state.param_groups[0]["lr"]] * 3


def test_any_map_style_set_is_shared_out_the_same() -> None:
    plain = list(zip(X.double(), Y, strict=True))
    dense = train(1, global_batch_size=24)[0]
    assert_exact(train(3, global_batch_size=24, dataset=plain, shares=(2, 0, 1)), dense, "sgd", torch.float64)


def test_two_runs_are_bit_equal() -> None:
    one, two = (train(3, dtype=torch.float32, global_batch_size=24, shares=(3, 2, 1)) for _ in range(2))
    assert all(torch.equal(value, params(two[0])[name]) for name, value in params(one[0]).items())


def test_history_counts_everyones_loss() -> None:
    dense, ours = train(1, global_batch_size=24)[0], train(3, global_batch_size=24)
    for mine, reference in zip(ours[2].state.history, dense.state.history, strict=True):
        assert mine["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-9)
        assert mine["samples"] == reference["samples"]


@pytest.mark.parametrize(
    ("logs", "words"),
    [
        ([[(0, 0, 3)], [(0, 3, 1)]], None),
        ([[(0, 0, 2)], [(0, 3, 1)]], "left out"),
        ([[(0, 0, 3)], [(0, 2, 2)]], "trained twice"),
        ([[(0, 0, 3)], []], "positions 3 to 4 were left out"),
        ([[(0, 0, 3)], [(1, 3, 1)]], "outside the run"),
    ],
)
def test_the_proof_can_fail(logs: Sequence[Any], words: str | None) -> None:
    axis = Axis(samples=4, slot_size=4, epochs=1)
    if words is None:
        prove_exactly_once(axis, logs, 1)
    else:
        with pytest.raises(RuntimeError, match=words):
            prove_exactly_once(axis, logs, 1)


def test_a_step_that_says_nothing_about_speed_moves_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA rank that captures: shares that fled from it would lead to sizes that must be captured in turn."""
    noted: list[Sequence[float]] = []
    note = Balanced.note

    def listen(self: Balanced, slot: int, samples: int, busy_ms: Sequence[float]) -> Any:
        noted.append(busy_ms)
        return note(self, slot, samples, busy_ms)

    monkeypatch.setattr(Balanced, "note", listen)
    monkeypatch.setattr(Engine, "was_first_of_its_size", lambda self, _: self.rank_info.rank == 1)
    train(2, policy="balanced")
    assert noted
    assert all(first > 0.0 and second == 0.0 for first, second in noted)


@pytest.mark.parametrize("has_cuda", [False, True])
def test_replicas_whose_devices_round_differently_are_one_model_where_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    update = EagerStep.update

    def round_in_its_own_way(self: EagerStep, counts: Any) -> None:
        update(self, counts)
        if self.reducer is not None:  # not while a rank measures its speed
            with torch.no_grad():
                for param in self.model.parameters():
                    param.mul_(1.0 + 1e-12 * self.reducer._group.rank)

    monkeypatch.setattr(EagerStep, "update", round_in_its_own_way)
    monkeypatch.setattr(RankInfo, "has_cuda", property(lambda _: has_cuda))
    one, other = (params(result) for result in train(2))
    assert all(torch.equal(value, other[name]) for name, value in one.items()) == has_cuda


def test_a_rank_without_samples_steps_with_a_loss_scaler() -> None:
    """It scales no loss, and the scaler makes its tensors with the first one."""
    dense = train(1, dtype=torch.float32, precision="fp16", global_batch_size=24)[0]
    for result in train(2, dtype=torch.float32, precision="fp16", global_batch_size=24, shares=(1, 0)):
        torch.testing.assert_close(params(result), params(dense), rtol=1e-3, atol=1e-4)
