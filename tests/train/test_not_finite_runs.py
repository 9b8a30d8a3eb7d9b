"""The rule for steps that are not finite in the local policies, in a user's own loop, in replays, folders and messages.

The exact policies are in test_not_finite.py, the step itself in tests/step/test_finite.py.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.api.loops import make_loop
from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.bad_steps import BAD, DATA, GLOBAL, NAN, X, assert_same_params, bad_slots, plain, spoiling
from tests.train.exact_runs import OPTIMIZERS, Net, Y, mean_loss
from tests.train.local_runs import SEED, dense, train
from uneven import TensorData, TrainedState, fit
from uneven.config import Task, resolve
from uneven.data.sample_order import check_dropped
from uneven.errors import NotFiniteError, RankError
from uneven.hardware.device import parse_devices
from uneven.launch.training import collect
from uneven.policy.axis import Axis, Part
from uneven.results.progress import epoch_line
from uneven.step.finite import Cause, Fault
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.state import DroppedSteps
from uneven.train.worker import Worker


def has_bad_sample(x: torch.Tensor) -> bool:
    return bool((x == X[BAD]).all(1).any())


@pytest.mark.parametrize("counts", [(2, 2), (5, 2), (2, 4, 2)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_local_rank_skips_its_own_step_which_counts_in_no_average(counts: tuple[int, ...], optimizer: str) -> None:
    slots = bad_slots(Axis(len(X), 8, 3), SEED)
    results = train(len(counts), shares=counts, optimizer=optimizer, step=spoiling(has_bad_sample), lr_scale=1.0)
    wanted = dense(counts, optimizer=optimizer, scale=1.0, skipped=slots)
    for name, value in results[0].state.params.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)
    assert {part[0] for result in results for part in result.dropped} == set(slots)
    for result in results:  # everybody knows how many, and the rank itself which
        assert sum(entry.get("dropped", 0) for entry in result.state.history) == 24
        assert all(math.isfinite(entry["train_loss"]) for entry in result.state.history)


def run_rank(group: ThreadGroup, step: Any, **changes: Any) -> TrainedState:
    config = resolve({"batch_size": 8, "epochs": 3, "seed": SEED, "policy": "async", "anchor": 2, **changes})
    task = Task(lambda: Net(torch.float64), OPTIMIZERS["adam"], step, TensorData(X, Y))
    info = RankInfo(group.rank, parse_devices(["cpu"] * group.world_size))
    worker = Worker(task, config, info, lambda _: group, Requests(), Silent())
    return collect(group, worker.train(), worker.axis)


def test_async_drops_the_same_and_a_replay_repeats_it_bit_by_bit(tmp_path: Path) -> None:
    axis = Axis(len(X), 8, 3)
    slots = bad_slots(axis, SEED)
    first = on_threads(3, lambda group: run_rank(group, spoiling(has_bad_sample), verify=True))[0]
    assert [entry[0] for entry in first.dropped] == sorted(slots)
    assert first.samples == 3 * len(X) - 24
    assert all(value.isfinite().all() for value in first.params.values())
    events = {event.fields["slot"]: event for event in first.timeline.events if event.kind == "dropped"}
    for slot, rank, start, samples in first.dropped:
        assert (slot, start, samples) in first.log[rank]
        fields = events[slot].fields
        assert (events[slot].rank, fields["by"], fields["samples"]) == (rank, rank, samples)
        assert fields["cause"] == f"the loss of rank {rank} is nan"
    first.save(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "log.json").read_text())
    assert [tuple(entry) for entry in record["dropped"]] == first.dropped
    assert TrainedState.load(tmp_path / "run").dropped == first.dropped
    again = on_threads(3, lambda group: run_rank(group, spoiling(has_bad_sample), replay=tmp_path / "run"))[0]
    assert (again.log, again.dropped) == (first.log, first.dropped)
    assert all(torch.equal(again.params[name], value) for name, value in first.params.items())


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_local_policies_end_on_all_ranks_alike(policy: str) -> None:
    """Cadence: only rank 1 is bad, and the others learn of it in a round. Async: who comes first may be anybody."""
    messages = []

    def rank(group: ThreadGroup) -> None:
        options = {"shares": (1, 1, 1)} if policy == "cadence" else {}
        step = spoiling(lambda _: policy == "async" or group.rank == 1)
        with pytest.raises(NotFiniteError) as caught:
            run_rank(group, step, policy=policy, epochs=20, **options)
        messages.append(str(caught.value))

    on_threads(3, rank)
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "3 steps in a row were not finite" in messages[0]
    if policy == "cadence":
        assert "rank 1: the loss of rank 1 is nan" in messages[0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_of_the_users_own_keeps_the_rule(size: int) -> None:
    axis = Axis(len(X), GLOBAL, 2)

    def rank(group: ThreadGroup) -> TrainedState:
        with make_loop(group) as loop:
            for epoch in range(2):
                for x, y in loop.batches(epoch):
                    loop.step(F.cross_entropy(loop(x), y) * (NAN if has_bad_sample(x) else 1.0))
        return loop.finish()

    for state in on_threads(size, rank):
        assert_same_params(state, plain(axis, bad_slots(axis))[0])
        assert {slot for slot, *_ in state.dropped} == set(bad_slots(axis))
        assert sum(samples for *_, samples in state.dropped) == 2 * len(X) - state.samples

    def fail(group: ThreadGroup) -> None:
        loop = make_loop(group, max_bad_steps=1)
        x, y = next(batches := loop.batches(0))
        loss = F.cross_entropy(loop(x), y) * (NAN if group.rank == 0 else 1.0)
        with pytest.raises(NotFiniteError, match=r"slot 0, rank 0: the loss of rank 0 is nan; a step was not finite"):
            loop.step(loss)
        del batches
        with pytest.raises(RankError, match="slot 0, rank 0"):
            loop.finish()

    on_threads(size, fail)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def test_rank_processes_end_in_words_and_keep_the_good_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1's losses are NaN from its fourth step on, in the second epoch."""
    steps = [0]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        steps[0] += 1
        return mean_loss(model, batch) * (NAN if int(sys.argv[2]) == 1 and steps[0] > 3 else 1.0)

    with pytest.raises(NotFiniteError) as caught:
        fit(
            model=make_net, optimizer=OPTIMIZERS["adam"], step=step, dataset=TensorData(X, Y), devices="cpu,cpu",
            batch_size=12, epochs=4, shares=(1, 1), save_every=1, out=tmp_path / "run", progress="lines",
        )  # fmt: skip
    message = str(caught.value)
    assert message.startswith("slot 5, rank 1: the loss of rank 1 is nan; 3 steps in a row")
    assert "Traceback" not in message
    assert isinstance(caught.value, RankError)
    assert caught.value.exit_code == 1
    shown = capfd.readouterr().err
    assert "slot 3: skipped, 24 samples dropped: the loss of rank 1 is nan" in shown
    saved = TrainedState.load(tmp_path / "run" / "epoch-1")
    assert (saved.slot, saved.samples) == (3, len(X))
    assert all(value.isfinite().all() for value in [*saved.params.values(), *saved.buffers.values()])
    assert not (tmp_path / "run" / "state.json").exists()
    assert not (tmp_path / "run" / "epoch-2" / "state.json").exists()


def test_no_checkpoint_is_written_of_params_that_an_update_has_spoilt(tmp_path: Path) -> None:
    """A rate so high that the update itself overflows, though loss and gradient are finite."""
    with pytest.raises(NotFiniteError, match=r"is not finite after slot 0 on rank 0, though losses"):
        fit(
            model=lambda: nn.Linear(6, 3), optimizer=lambda params: torch.optim.SGD(params, lr=3e38), batch_size=70,
            step=lambda model, batch: mean_loss(model, batch) * 1e3, dataset=TensorData(X.float(), Y), epochs=3,
            devices="cpu", save_every=1, out=tmp_path / "run", progress="off",
        )  # fmt: skip
    assert not (tmp_path / "run" / "epoch-1").exists()


def test_a_run_says_what_it_dropped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = fit(
        model=lambda: Net(torch.float64), optimizer=OPTIMIZERS["sgd"], step=mean_loss, dataset=DATA, seed=3,
        batch_size=GLOBAL, epochs=2, devices="cpu", progress="lines", out=tmp_path / "run",
    )  # fmt: skip
    shown = capfd.readouterr().err
    slot = min(bad_slots(Axis(len(X), GLOBAL, 2)))
    assert f"slot {slot}: skipped, " in shown
    assert "samples dropped: the loss of rank 0 is nan" in shown
    assert shown.count("dropped") >= 4, "per step and per epoch"
    lost = sum(samples for *_, samples in state.dropped)
    assert f"  {lost} samples were dropped: 2 steps were not finite" in shown
    assert json.loads((tmp_path / "run" / "state.json").read_text())["dropped"] == [list(d) for d in state.dropped]
    assert "dropped 24 samples" in (epoch_line({**state.history[0], "dropped": 24}, 2) or "")
    again = fit(
        model=lambda: Net(torch.float64), optimizer=OPTIMIZERS["sgd"], step=mean_loss, dataset=DATA, seed=3,
        batch_size=GLOBAL, epochs=2, devices="cpu", progress="off", replay=tmp_path / "run",
    )  # fmt: skip
    assert again.dropped == state.dropped
    assert all(torch.equal(again.params[name], value) for name, value in state.params.items())


@pytest.mark.parametrize("dropped", [(0, 1, 0, 4), (0, 0, 0, 3), (1, 0, 0, 4), (0, 2, 0, 4)])
def test_what_was_dropped_must_be_in_the_log(dropped: tuple[int, int, int, int]) -> None:
    logs = [[(0, 0, 4)], [(0, 4, 4)]]
    check_dropped(logs, [(0, 0, 0, 4), (0, 1, 4, 4)])
    with pytest.raises(RuntimeError, match="never had"):
        check_dropped(logs, [dropped])
    with pytest.raises(RuntimeError, match="never had"):
        check_dropped(logs, [(0, 0, 0, 4), (0, 0, 0, 4)])


def test_a_verdict_that_comes_late_counts_in_the_order_of_the_steps() -> None:
    """As of captured steps, whose outcome the host reads when the device has done them."""
    axis, dropped = Axis(40, 8, 1), DroppedSteps()
    fault = Fault(0, Cause.LOSS_NAN)
    asked: list[int] = []

    def verdict(index: int) -> Fault | None:
        asked.append(index)
        return None if index == 2 else fault

    found = []
    for slot in axis.slots():
        bad_steps = dropped.add(Part(slot, slot.first, slot.samples, 8), partial(verdict, slot.index), ahead=2)
        found.append([bad.part.slot.index for bad in bad_steps])
    assert found == [[], [], [0], [1], []]
    assert dropped.in_a_row == 0
    assert [bad.part.slot.index for bad in dropped.settle()] == [3, 4]
    assert (asked, dropped.in_a_row) == ([0, 1, 2, 3, 4], 2)
    assert dropped.parts == [(0, 0, 8), (1, 8, 8), (3, 24, 8), (4, 32, 8)]
    assert dropped.settle() == []
