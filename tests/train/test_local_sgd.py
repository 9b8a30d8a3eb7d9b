"""cadence and async on threads: real workers, real averages. Cadence with fixed counts equals a dense computation.

Async depends on who comes first, so there the invariants are tested: every sample once, nothing lost, replicas equal.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, loss_and_count, mean_loss
from tests.train.local_runs import SEED, dense, half_every_four, train
from uneven.config import Evaluation
from uneven.data.sample_order import permutation
from uneven.data.tensors import TensorData
from uneven.policy.finish import Cost
from uneven.policy.slot_times import SlotTimes
from uneven.train.requests import Requests


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ((2, 2), {}),
        ((5, 2), {"max_grad_norm": 0.1}),
        ((4, 2), {"scheduler": half_every_four}),
        ((2, 6, 2), {"step": loss_and_count}),
        ((2, 4, 3, 2), {"accumulate": 2}),
    ],
)
def test_cadence_equals_a_dense_computation(optimizer: str, counts: tuple[int, ...], options: dict[str, Any]) -> None:
    """Tail slots of 70 samples, shorter last windows; LR x1.3 after its warm-up."""
    ours = train(len(counts), optimizer=optimizer, shares=counts, lr_scale=1.3, **options)
    wanted = dense(counts, optimizer=optimizer, scale=1.3, **options)
    moved = max(
        float((value - param.detach()).abs().max())
        for value, param in zip(wanted.values(), Net(torch.float64).parameters(), strict=True)
    )
    assert moved > 0.01
    for name, value in ours[0].state.params.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)


def test_cadence_with_fixed_shares_is_bit_equal_twice() -> None:
    one, two = (train(3, shares=(3, 2, 1)) for _ in range(2))
    assert all(torch.equal(value, two[0].state.params[name]) for name, value in one[0].state.params.items())
    assert [result.log for result in one] == [result.log for result in two]


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"anchor": 50}, {"batch_size": 70}, {"epochs": 1, "batch_size": 40}])
def test_every_sample_once_and_replicas_equal(policy: str, size: int, options: dict[str, Any]) -> None:
    """Windows longer than the run, one slot an epoch, fewer slots than ranks."""
    results = train(size, policy=policy, **options)
    assert results[0].state.finished
    assert len({len(result.rounds) for result in results}) == 1
    assert [entry["epoch"] for entry in results[0].state.history] == list(range(1, options.get("epochs", 3) + 1))


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_epochs_are_counted_whether_ranks_meet_at_their_ends_or_not(policy: str) -> None:
    def eval_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}, len(batch[1])

    test_set = TensorData(X.double(), Y)
    evaluated = train(2, policy=policy, epochs=4, evaluation=Evaluation(test_set, eval_step, every=2))
    assert [["loss" in entry for entry in result.state.history] for result in evaluated] == [[False, True] * 2] * 2
    assert evaluated[0].state.history[1]["loss"] == evaluated[1].state.history[1]["loss"]
    ends = [due for due, *_ in evaluated[0].rounds]
    assert {18, 36} <= set(ends)  # 9 slots an epoch, evaluated after every second
    streamed = train(2, policy=policy, epochs=4)
    assert [entry["samples"] for entry in streamed[0].state.history] == [70, 140, 210, 280]
    assert all(entry["train_loss"] > 0 for entry in streamed[1].state.history)


def test_the_loss_of_an_epoch_is_everybodys() -> None:
    def with_evaluation(size: int) -> list[dict[str, Any]]:
        evaluation = Evaluation(TensorData(X.double(), Y), lambda m, b: ({"n": len(b[1])}, len(b[1])))
        frozen = partial(torch.optim.SGD, lr=0.0)
        return train(size, optimizer=frozen, lr_scale=1.0, evaluation=evaluation)[0].state.history

    for mine, alone in zip(with_evaluation(3), with_evaluation(1), strict=True):
        assert mine["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-9)


def test_epochs_inside_one_window_share_their_figures_and_say_so() -> None:
    """Three epochs of 9 slots in one window of 28: their losses arrive as one sum, at one moment."""
    history = train(2, shares=(1.0, 1.0), anchor=14, max_anchor=14)[1].state.history
    assert [entry["epochs"] for entry in history] == [[1, 3]] * 3
    assert len({(entry["train_loss"], entry["train_seconds"], entry["samples_per_s"]) for entry in history}) == 1
    assert history[2]["samples_per_s"] == pytest.approx(3 * len(X) / history[2]["train_seconds"])
    alone = train(1, shares=None, anchor=None, policy="balanced", epochs=1)[0].state.history
    assert "epochs" not in alone[0]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_batchnorm_statistics_are_averaged_in_rounds(policy: str) -> None:
    results = train(3, policy=policy, make_model=Normed, epochs=8)
    buffers = results[0].state.buffers
    # A moving average over the last batches: which ones these are depends on who comes first, so the limits are wide.
    torch.testing.assert_close(buffers["norm.running_mean"], X.double().mean(0), atol=0.35, rtol=0.0)
    torch.testing.assert_close(buffers["norm.running_var"], X.double().var(0), atol=0.6, rtol=0.0)
    assert buffers["norm.num_batches_tracked"] > 8


def both_train(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A step that lets two ranks go on once both have a slot: who comes first must not take all of them."""
    monkeypatch.setattr("uneven.train.worker.measure", lambda _: Cost(0.0, 1.0))  # no step runs before the first slot
    barrier, waited = threading.Barrier(2), threading.local()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if not getattr(waited, "is_over", False):
            waited.is_over = True
            barrier.wait(100)
        return mean_loss(model, batch)

    return step


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_averaged_optimizer_state_is_equal_after_the_last_round(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def moments(**options: Any) -> list[dict[str, torch.Tensor]]:
        results = train(2, policy=policy, optimizer="adam", step=both_train(monkeypatch), **options)
        states = [result.state.optimizer for result in results]
        return [{name: value for name, value in state.items() if "exp_avg" in name} for state in states]

    first, second = moments(optimizer_state="average")
    assert first
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    first, second = moments()
    assert any(not torch.equal(value, second[name]) for name, value in first.items())


def once_at(place: int, act: Callable[[], Any]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A step that acts once, when it meets the sample at this place of the first epoch; no warm-up goes there."""
    sample = X.double()[permutation(SEED, 0, len(X))[place]]
    lock, is_over = threading.Lock(), [False]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        factor = 1.0
        with lock:
            if not is_over[0] and bool((batch[0] == sample).all(1).any()):
                is_over[0] = True
                factor = act() or 1.0
        return mean_loss(model, batch) * factor

    return step


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_stop_request_stops_all_with_equal_replicas(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run that stops is saved in ./runs
    stop = Requests()
    results = train(3, policy=policy, epochs=50, step=once_at(60, stop.stop.set), stop=stop, is_whole=False)
    assert not results[0].state.finished
    assert 3 <= sum(len(result.log) for result in results) < 60


def test_the_guard_shrinks_the_window_of_replicas_that_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample moves a coordinate of its own, at a rate that only grows: so does the distance of the replicas.

    With cadence: in async one rank may claim every slot on a busy machine, and then nothing drifts apart. The guard
    itself is the same in both (tests/policy/test_windows.py).
    """

    # Ranks of one speed: on a busy machine one of them may look so slow that there are too few rounds.
    monkeypatch.setattr("uneven.train.worker.measure", lambda engine: Cost(0.0, 1.0))
    monkeypatch.setattr(SlotTimes, "update", lambda *_: 1.0)

    class Coordinates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(70, dtype=torch.float64))

    def step(model: Any, batch: Any) -> torch.Tensor:
        place = (batch[0][:, None] == X.double()).all(2).nonzero()[:, 1]
        return -model.w[place].mean()

    results = train(
        2,
        policy="cadence",
        step=step,
        make_model=Coordinates,
        optimizer=partial(torch.optim.SGD, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.08),
        epochs=12,
        anchor=4,
        divergence_threshold=1e-3,
        max_anchor=4,  # else rounds that cost much on a busy machine make windows too long for this
        lr_scale=1.0,
    )
    guards = [event.fields["anchor"] for event in results[0].timeline.events if event.kind == "guard"]
    assert guards, "the guard never spoke"
    assert min(guards) < 4.0


def test_a_scale_that_is_asked_for_counts_in_every_policy_and_alone() -> None:
    for size, policy in ((1, "balanced"), (1, "async"), (2, "sync"), (2, "cadence")):
        # A rank sets its learning rate in a slot: with shares every rank has some, whoever is faster.
        options = {"anchor": None} if policy in ("balanced", "sync") else {"shares": (1, 1)} if size > 1 else {}
        result = train(size, policy=policy, lr_scale=0.5, **options)[0]
        assert result.state.param_groups[0]["lr"] == pytest.approx(0.5 * 0.05), (size, policy)


def test_the_learning_rate_is_scaled_by_the_effective_ranks() -> None:
    rates = {}
    for optimizer in ("sgd", "adam"):
        result = train(2, shares=(1, 1), optimizer=optimizer)[0]
        rates[optimizer] = result.state.param_groups[0]["lr"]
    assert rates["sgd"] == pytest.approx(2 * 0.05)
    assert rates["adam"] == pytest.approx(2 * 1e-2)
    assert train(2, shares=(1, 1), lr_scale=1.0)[0].state.param_groups[0]["lr"] == 0.05
