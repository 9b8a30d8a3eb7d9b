"""sync and balanced are exact: every parameter against one process training the same global batches.

On threads: real workers, real arithmetic, a group that sums in rank order. Ranks in processes of their own are in
tests/launch/test_run.py.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import StepLR

from tests.parallel.parity import all_pairs
from tests.train.exact_runs import OPTIMIZERS, X, Y, assert_exact, loss_and_count, params, train
from uneven.data.sample_order import prove_exactly_once
from uneven.policy.axis import Axis
from uneven.policy.exact import Balanced
from uneven.step.eager import EagerStep
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo

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
