"""Steps beside epochs: max_steps, evaluations and checkpoints at slots, ReduceLROnPlateau; against plain loops."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from tests.train.local_runs import dense
from tests.train.step_runs import EVALUATION, LOCAL, Plain, train
from uneven.config import Evaluation, Task, resolve
from uneven.data.tensors import TensorData
from uneven.errors import InputError
from uneven.policy.axis import Axis
from uneven.results.state import TrainedState
from uneven.train.engine import describe_schedule, make_schedule

lengths: list[int] = []


def falling(optimizer: Any, total_steps: int) -> LambdaLR:
    lengths.append(total_steps)
    return LambdaLR(optimizer, lambda step: 1 - step / total_steps)


@pytest.mark.parametrize(("size", "policy"), [(1, "balanced"), (2, "sync"), (3, "balanced")])
def test_max_steps_equals_the_plain_loop_stopped_there(size: int, policy: str) -> None:
    """Seven steps: two epochs of three and the first step of the third. The schedule has seven steps, too."""
    lengths.clear()
    results = train(size, policy=policy, max_steps=7, scheduler=falling)
    assert set(lengths) == {7}
    for result in results:
        state = result.state
        assert (state.finished, state.slot, state.samples, state.stopped) == (True, 7, 164, None)
        seen = [(entry["epoch"], entry["step"], entry["samples"]) for entry in state.history]
        assert seen == [(1, 3, 70), (2, 6, 140), (3, 7, 164)]
    Plain(partial(falling, total_steps=7)).train(0, 7).assert_equal(results[0].state)


@pytest.mark.parametrize(("size", "policy"), [(1, "balanced"), (2, "sync"), (3, "balanced")])
def test_a_schedule_counts_steps_also_those_with_fewer_samples(size: int, policy: str) -> None:
    """Four epochs of three steps, the last of 22 samples: counted by samples, StepLR would fall a step too late."""

    def one_cycle(optimizer: Any, total_steps: int) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=total_steps)

    for make, plain in (
        (one_cycle, partial(one_cycle, total_steps=12)),
        (lambda optimizer: StepLR(optimizer, 6, 0.1),) * 2,
    ):
        results = train(size, policy=policy, epochs=4, scheduler=make)
        Plain(plain).train(0, 12).assert_equal(results[0].state)


@pytest.mark.parametrize(("size", "policy"), [(1, "balanced"), (3, "balanced")])
def test_a_schedule_by_epochs_equals_the_plain_loop_that_steps_it_after_every_epoch(size: int, policy: str) -> None:
    def cosine(optimizer: Any, total_epochs: int) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, total_epochs)

    results = train(size, policy=policy, epochs=4, scheduler=cosine, scheduler_interval="epoch")
    Plain(partial(cosine, total_epochs=4), every=3).train(0, 12).assert_equal(results[0].state)
    assert [entry["lr"] for entry in results[0].state.history] == pytest.approx(
        [0.05, 0.0426777, 0.025, 0.0073223], rel=1e-4
    )


def test_a_schedule_by_epochs_of_local_policies_follows_the_slots_epoch() -> None:
    """Windows of seven slots span epochs of nine."""

    def make(optimizer: Any) -> StepLR:
        return StepLR(optimizer, 1, 0.1)

    ours = train(2, epochs=3, scheduler=make, scheduler_interval="epoch", lr_scale=1.3, shares=(5, 2), **LOCAL)
    wanted = dense((5, 2), optimizer="sgd", scheduler=make, is_by_epoch=True, scale=1.3)
    for name, value in wanted.items():
        torch.testing.assert_close(ours[0].state.params[name], value, rtol=1e-10, atol=1e-10)


def test_an_interval_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(InputError, match=r"scheduler_interval='epoch' with a ReduceLROnPlateau: .* leave it out"):
        train(1, epochs=2, evaluation=EVALUATION, scheduler=ReduceLROnPlateau, scheduler_interval="epoch")


@pytest.mark.parametrize(
    ("make", "changes", "is_told"),
    [
        (lambda optimizer: StepLR(optimizer, 6), {}, True),
        (lambda optimizer: StepLR(optimizer, 6), {"scheduler_interval": "step"}, False),
        (lambda optimizer: StepLR(optimizer, 6), {"scheduler_interval": "epoch"}, False),
        (lambda optimizer: StepLR(optimizer, 6), {"epochs": 1}, False),
        (lambda optimizer: OneCycleLR(optimizer, 0.2, 12), {}, False),
        (lambda optimizer: LambdaLR(optimizer, lambda step: 1.0), {}, False),
        (falling, {}, False),
        (None, {}, False),
    ],
)
def test_a_line_says_that_a_scheduler_for_epochs_is_stepped_by_steps(make: Any, changes: Any, is_told: bool) -> None:
    config = resolve({"batch_size": 24, "epochs": 4, **changes})
    axis = Axis(len(X), 24, config.epochs)
    model = Net(torch.float64)
    task = Task(lambda: model, OPTIMIZERS["sgd"], mean_loss, TensorData(X, Y), make, None)
    schedule = make_schedule(make, OPTIMIZERS["sgd"](model.parameters()), config, axis)
    lines = describe_schedule(schedule, task, config, axis)
    assert bool(lines) is is_told
    assert not is_told or "StepLR is stepped after every step (scheduler_interval='step')" in lines[0]


def test_epochs_and_max_steps_end_at_whichever_comes_first() -> None:
    for settings, steps in (({"epochs": 1, "max_steps": 100}, 3), ({"epochs": 5, "max_steps": 4}, 4)):
        state = train(1, **settings)[0].state
        assert (state.slot, state.finished) == (steps, True)
    assert len(train(1, epochs=5, max_steps=6)[0].state.history) == 2


def test_max_steps_with_cadence_equals_a_dense_computation() -> None:
    ours = train(2, max_steps=20, lr_scale=1.3, shares=(5, 2), **LOCAL)
    assert [entry["step"] for entry in ours[1].state.history][-1] == 20
    for name, value in dense((5, 2), optimizer="sgd", scale=1.3, epochs=3, max_steps=20).items():
        torch.testing.assert_close(ours[0].state.params[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("max_steps", [1, 9, 20])
def test_all_ranks_of_async_end_at_max_steps(size: int, max_steps: int) -> None:
    for result in train(size, max_steps=max_steps, **(LOCAL | {"policy": "async"})):
        assert (result.state.finished, result.state.slot) == (True, max_steps)
        last = result.state.history[-1]
        assert (last["step"], last["epoch"]) == (max_steps, -(-max_steps // 9))


@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_in_steps_sees_the_params_of_that_step(size: int) -> None:
    history = train(size, epochs=4, eval_every="5 steps", evaluation=EVALUATION)[0].state.history
    assert [entry["step"] for entry in history] == [3, 5, 6, 9, 10, 12]
    assert [entry["epoch"] for entry in history] == [1, 2, 2, 3, 4, 4]
    assert [entry.get("is_inside_epoch", False) for entry in history] == [False, True, False, False, True, False]
    plain, done = Plain(), 0
    for entry in history:
        if entry["step"] in (5, 10, 12):
            plain.train(done, entry["step"])
            done = entry["step"]
            assert entry["loss"] == pytest.approx(plain.loss(), rel=1e-10)
        else:
            assert "loss" not in entry


def test_an_entry_tells_of_the_steps_since_the_last_one() -> None:
    """Its loss is their mean, its speed theirs, and its time and samples are those of the run."""
    often = train(1, epochs=2, eval_every="1 step", evaluation=EVALUATION)[0].state.history
    seldom = train(1, epochs=2)[0].state.history
    assert [entry["step"] for entry in often] == [1, 2, 3, 4, 5, 6]
    for place, entry in enumerate(seldom):
        own = often[3 * place : 3 * place + 3]
        mean = sum(one["train_loss"] * many for one, many in zip(own, (24, 24, 22), strict=True)) / 70
        assert entry["train_loss"] == pytest.approx(mean, rel=1e-10)
    assert all(one["train_seconds"] < two["train_seconds"] for one, two in pairwise(often))
    for before, entry in pairwise(often):
        took = entry["train_seconds"] - before["train_seconds"]
        assert entry["samples_per_s"] == pytest.approx((entry["samples"] - before["samples"]) / took)


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("anchor", [2, 40])
def test_an_evaluation_in_steps_is_an_event_of_the_local_policies(policy: str, anchor: int) -> None:
    # Given shares: where a rank that stalls leaves its slots to the other, a round more ends the window in between.
    options = LOCAL | {"policy": policy, "anchor": anchor, "shares": (0.5, 0.5)}
    results = train(2, epochs=3, eval_every="6 steps", evaluation=EVALUATION, **options)
    for result in results:
        evaluated = {entry["step"]: entry["loss"] for entry in result.state.history if "loss" in entry}
        assert list(evaluated) == [6, 12, 18, 24, 27]
        assert set(evaluated) <= {due for due, *_ in result.rounds}
        assert [entry["step"] for entry in result.state.history if "is_inside_epoch" not in entry] == [9, 18, 27]
        assert all(entry["train_loss"] > 0 for entry in result.state.history)
        assert evaluated == {e["step"]: e["loss"] for e in results[0].state.history if "loss" in e}
    # Where a window holds the end of an epoch and an event of the next one, both entries have the figures of all.
    shared = [entry for entry in results[0].state.history if "epochs" in entry]
    if anchor == 40:
        assert [(entry["step"], entry["epochs"]) for entry in shared] == [(9, [1, 2]), (12, [1, 2])]
        assert shared[0]["train_loss"] == shared[1]["train_loss"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_plateau_follows_the_evaluated_metric(size: int) -> None:
    def make(optimizer: Any) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)

    options = {"max_steps": 12, "eval_every": "2 steps", "evaluation": EVALUATION, "scheduler": make}
    results = train(size, **options)
    plain = Plain(make, follow=2).train(0, 12)
    plain.assert_equal(results[0].state)
    rate = plain.optimizer.param_groups[0]["lr"]
    assert rate < 0.05, "it fell"
    assert [result.state.param_groups[0]["lr"] for result in results] == [rate] * size


def test_a_plateau_on_each_rank_of_a_local_policy_holds_the_same_rate() -> None:
    def make(optimizer: Any) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    results = train(2, epochs=3, evaluation=EVALUATION, scheduler=make, lr_scale=1.0, **LOCAL)
    assert [result.state.param_groups[0]["lr"] for result in results] == [0.05 / 4] * 2


def test_a_plateau_needs_one_metric_to_follow() -> None:
    def two(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
        return {"right": 1.0, "wrong": 2.0}, 1

    common = {"max_steps": 1, "scheduler": ReduceLROnPlateau}
    with pytest.raises(InputError, match="pass evaluate="):
        train(1, **common)
    many = Evaluation(EVALUATION.dataset, two)
    with pytest.raises(InputError, match="needs one metric to follow: the evaluation has right, wrong; pass monitor="):
        train(2, evaluation=many, **common)
    with pytest.raises(InputError, match="monitor='loss': the evaluation has right, wrong"):
        train(1, evaluation=many, monitor="loss", **common)
    assert train(2, evaluation=many, monitor="wrong", **common)[1].state.history[-1]["wrong"] == 2.0


@pytest.mark.parametrize("options", [{}, LOCAL])
def test_checkpoints_in_steps(options: dict[str, Any], tmp_path: Path) -> None:
    results = train(2, epochs=2, save_every="4 steps", out=tmp_path, **options)
    total = results[0].state.slot
    steps = [*range(4, total, 4), total]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"step-{step}" for step in steps)
    saved = TrainedState.load(tmp_path / "step-4")
    assert (saved.slot, saved.finished, len(saved.history)) == (4, False, 4 // (total // 2))
    last = TrainedState.load(tmp_path / f"step-{total}")
    assert (last.slot, last.finished) == (total, True)
    assert all(torch.equal(value, results[0].state.params[name]) for name, value in last.params.items())
    if not options:
        Plain().train(0, 4).assert_equal(saved)


@pytest.mark.parametrize("options", [{}, LOCAL])
def test_a_checkpoint_inside_an_epoch_leaves_the_history_as_it_is(options: dict[str, Any], tmp_path: Path) -> None:
    """An epoch's loss is the mean over all of its steps, wherever the run saves in between, and goes on from there."""
    shares = {} if not options else {"shares": (1, 1)}
    for size, more in ((1, {}), (2, shares)):
        common = {"epochs": 2, **options, **more}
        saving = train(size, save_every="2 steps", out=tmp_path / f"{size}", **common)[0].state.history
        resumed = train(3, resume=tmp_path / f"{size}/step-2", is_whole=False, **(common | {"shares": None}))
        for history in (saving, resumed[0].state.history):
            assert [(entry["epoch"], "is_inside_epoch" in entry) for entry in history] == [(1, False), (2, False)]
        if not options:  # of a local policy, params depend on where it saves
            plain = train(size, **common)[0].state.history
            for found in (saving, resumed[0].state.history):
                for entry, wanted in zip(found, plain, strict=True):
                    assert entry["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-10)


@pytest.mark.parametrize(("mode", "best"), [("auto", "epoch-2"), ("max", "epoch-2"), ("min", "epoch-3")])
def test_keep_best_follows_the_only_metric(mode: str, best: str, tmp_path: Path) -> None:
    values = iter([0.5, 0.9, 0.1, 0.4, 0.6])
    only = Evaluation(EVALUATION.dataset, lambda model, batch: ({"right": next(values) * 37}, 37), batch_size=37)
    options = {"save_every": 1, "out": tmp_path, "keep_last": 1, "keep_best": 1, "monitor_mode": mode}
    train(1, epochs=5, evaluation=only, **options)
    assert {path.name for path in tmp_path.iterdir()} == {best, "epoch-5"}


def test_keep_best_without_a_metric_to_follow_is_refused(tmp_path: Path) -> None:
    """Nothing would be kept, and the run would lose its best checkpoints without a word."""
    two = Evaluation(EVALUATION.dataset, lambda model, batch: ({"right": 1.0, "wrong": 2.0}, 1))
    options = {"epochs": 2, "evaluation": two, "save_every": 1, "out": tmp_path, "keep_best": 1}
    with pytest.raises(InputError, match="needs one metric to follow: the evaluation has right, wrong"):
        train(1, **options)
    with pytest.raises(InputError, match="monitor='rihgt': the evaluation has right, wrong"):
        train(1, monitor="rihgt", **options)
    with pytest.raises(InputError, match=r"monitor_mode='max' without keep_best=\.\.\.: leave it out"):
        train(1, epochs=2, monitor_mode="max")
