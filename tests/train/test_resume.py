"""Resumed runs against uninterrupted ones: bit by bit on the same devices, exactly once and to 1e-10 on others.

Workers on threads: what a run had in memory is gone, and a new one has only the checkpoint's files.
"""

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from tests.train.exact_runs import OPTIMIZERS, X, Y
from tests.train.exact_runs import Net as PlainNet
from tests.train.resumed_runs import ASYNC, CADENCE, EXACT, SAME, StopAt, assert_same, metrics, one_cycle, train
from tests.train.step_runs import EVALUATION
from uneven.api.callbacks import EarlyStopping, KeepBest
from uneven.data.tensors import TensorData
from uneven.errors import InputError
from uneven.results.state import TrainedState
from uneven.timeline.timeline import RunFacts
from uneven.train.callbacks import Callback, CallbackInfo
from uneven.train.worker import Worker

POLICIES = {"sync": {**EXACT, "policy": "sync"}, "balanced": EXACT, "cadence": CADENCE, "async": ASYNC}


def halving(optimizer: Any) -> LRScheduler:
    return StepLR(optimizer, step_size=4, gamma=0.5)


def assert_counts_from(slot: int, again: TrainedState, whole: TrainedState) -> None:
    """The timeline of a resumed run has the samples of this part alone: its speed is theirs over its own time."""
    assert whole.timeline is not None
    assert again.timeline is not None
    assert whole.timeline.run == RunFacts()
    facts, trained = again.timeline.run, again.timeline.trained
    assert (facts.resumed_at, trained) == (slot, whole.samples - facts.samples_before)
    assert trained == again.samples_since_start
    assert again.timeline.samples_per_s == (trained / again.timeline.training_s if trained else 0.0)


@pytest.mark.parametrize(("policy", "optimizer"), [("sync", "adam"), ("balanced", "sgd"), ("cadence", "adam")])
def test_the_same_devices_go_on_bit_by_bit(policy: str, optimizer: str, tmp_path: Path) -> None:
    options = {**SAME[policy], "optimizer": optimizer, "scheduler": one_cycle, "evaluation": EVALUATION}
    whole = train(2, save_every="4 steps", out=tmp_path / "whole", **options)
    for slot in (4, 8, whole.slot):
        again = train(
            2, save_every="4 steps", out=tmp_path / f"{slot}", resume=tmp_path / f"whole/step-{slot}", **options
        )
        assert_same(again, whole)
        assert metrics(again) == metrics(whole)
        assert_counts_from(slot, again, whole)
        assert (again.log, again.rounds) == (whole.log, whole.rounds)
        assert set(again.optimizer) == set(whole.optimizer)
        for name, value in whole.optimizer.items():
            assert name.startswith("random") or torch.equal(again.optimizer[name], value), name
        names = {path.name for path in (tmp_path / f"{slot}").glob("*")}
        assert names == {f"step-{later}" for later in (*range(4, whole.slot, 4), whole.slot) if later > slot}


@pytest.mark.parametrize("policy", list(SAME))
def test_a_finished_run_goes_on_for_more_epochs(policy: str, tmp_path: Path) -> None:
    """Nothing is trained again: the end of the shorter run is a checkpoint, with its evaluation in the history."""
    options = {**SAME[policy], "scheduler": halving, "evaluation": EVALUATION, "save_every": "1 epoch"}
    whole = train(2, out=tmp_path / "whole", **options)
    train(2, out=tmp_path / "short", epochs=2, **options)
    again = train(2, out=tmp_path / "short", resume=tmp_path / "short/epoch-2", **options)
    assert_same(again, whole)
    assert metrics(again) == metrics(whole)
    assert (again.log, again.rounds) == (whole.log, whole.rounds)
    assert [segment["slot"] for segment in again.segments] == [0, 2 * whole.slot // 3]


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [("balanced", (1, 2)), *((policy, sizes) for policy in POLICIES for sizes in ((2, 3), (3, 1)))],
)
def test_another_number_of_devices_trains_the_rest_exactly_once(
    policy: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    options = {**POLICIES[policy], "make_model": partial(PlainNet, torch.float64), "scheduler": one_cycle}
    first, second = sizes
    whole = train(first, save_every="4 steps", out=tmp_path, **options)
    again = train(second, resume=tmp_path / "step-4", **options)
    assert (again.slot, again.finished, again.samples) == (whole.slot, True, 3 * 70)
    assert {slot for log in again.log for slot, _, _ in log} == set(range(whole.slot))
    if policy in ("sync", "balanced"):
        assert_same(again, whole, tolerance=1e-10)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("size", [1, 2])
def test_a_stopped_run_goes_on_with_its_gaps_and_its_log_repeats_it(policy: str, size: int, tmp_path: Path) -> None:
    options = {**POLICIES[policy], "scheduler": one_cycle}
    stopped = train(
        size, out=tmp_path / "run", callbacks=lambda stop: [StopAt(5, stop)], save_every="20 steps", **options
    )
    assert not stopped.finished
    (folder,) = (path for path in (tmp_path / "run").iterdir() if path.name.startswith("step-"))
    again = train(size, resume=folder, out=tmp_path / "again", **options)
    assert again.finished
    assert again.samples == 3 * 70
    again.save(tmp_path / "again")
    repeated = train(size, replay=tmp_path / "again", **options)
    assert_same(repeated, again)
    assert repeated.log == again.log


def test_gaps_of_a_local_policy_can_be_trained_by_an_exact_one(tmp_path: Path) -> None:
    stopped = train(2, out=tmp_path, callbacks=lambda stop: [StopAt(5, stop)], **CADENCE)
    (folder,) = (path for path in tmp_path.iterdir() if path.name.startswith("step-"))
    again = train(2, resume=folder, policy="balanced", batch_size=4, global_batch_size=8)
    assert (again.finished, again.samples) == (True, 3 * 70)
    assert stopped.slot > 0


STRATEGIES = ["zero1", "zero2", "fsdp", "tensor", None]


@pytest.mark.parametrize("source", ["zero1", "fsdp", None])
def test_a_state_moves_into_any_strategy(source: str | None, tmp_path: Path) -> None:
    options = {**EXACT, "make_model": partial(PlainNet, torch.float64), "optimizer": "adam", "epochs": 2}
    whole = train(2, save_every="2 steps", out=tmp_path, strategy=source, **options)
    for target in STRATEGIES:
        again = train(2, resume=tmp_path / "step-2", strategy=target, **options)
        assert_same(again, whole, tolerance=1e-10)


def request_a_save(worker: Worker, at: int, ranks: tuple[int, ...]) -> None:
    """These ranks ask for a checkpoint when they have passed this slot, until there is one."""

    def after_step(info: Any) -> None:
        if info.rank in ranks and info.step >= at and not worker.engine.state.saves:
            worker.inbox.requests.save.set()

    worker.callbacks._hooks["on_step"].append(("Request", after_step))
    worker.callbacks.is_any = True


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_wish_is_followed_by_all_ranks_at_one_slot_and_the_log_repeats_it(policy: str, tmp_path: Path) -> None:
    options = {**POLICIES[policy], "epochs": 6}
    # With a local policy rank 1 may have no step of its own on a busy machine: there both ranks ask.
    ranks = (0, 1) if policy in ("cadence", "async") else (1,)
    state = train(2, out=tmp_path / "run", watch=partial(request_a_save, at=3, ranks=ranks), **options)
    (slot,) = state.saves
    assert 3 <= slot <= state.slot
    checkpoint = TrainedState.load(tmp_path / "run" / f"step-{slot}")
    assert checkpoint.slot == slot
    state.save(tmp_path / "run")
    assert_same(train(2, replay=tmp_path / "run", **options), state)
    again = train(2, resume=tmp_path / "run" / f"step-{slot}", **options)
    assert (again.finished, again.samples) == (True, 6 * 70)


def test_what_callbacks_counted_and_kept_is_resumed(tmp_path: Path) -> None:
    def callbacks(stop: threading.Event) -> list[Callback]:
        return [EarlyStopping("loss", patience=50), KeepBest("loss", mode="max")]  # the best is the first

    options = {**SAME["sync"], "evaluation": EVALUATION, "eval_every": "1 steps", "callbacks": callbacks}
    whole = train(2, save_every="5 steps", out=tmp_path, **options)
    again = train(2, resume=tmp_path / "step-5", **options)
    assert again.best == {**whole.best, **{k: again.best[k] for k in ("train_seconds", "samples_per_s")}}
    assert all(torch.equal(again.params[name], value) for name, value in whole.params.items())


class CountSteps(Callback):
    """In a local policy every rank has steps of its own; `counts` gets what each rank counted, over all segments."""

    def __init__(self, counts: dict[int, int]) -> None:
        self._counts, self._count = counts, 0

    def on_step(self, info: CallbackInfo) -> None:
        self._count += 1

    def on_end(self, info: CallbackInfo) -> None:
        self._counts[info.rank] = self._count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]


def test_each_rank_has_the_state_of_its_own_callbacks_back(tmp_path: Path) -> None:
    counts: dict[int, int] = {}
    options = {**SAME["cadence"], "callbacks": lambda stop: [CountSteps(counts)]}
    whole = train(2, save_every="12 steps", out=tmp_path, **options)
    assert counts == {rank: len(log) for rank, log in enumerate(whole.log)}
    counts.clear()
    again = train(2, resume=tmp_path / "step-12", **options)
    assert counts == {rank: len(log) for rank, log in enumerate(again.log)}


def test_a_plateau_goes_on_where_it_was(tmp_path: Path) -> None:
    options = {
        **SAME["cadence"],
        "evaluation": EVALUATION,
        "scheduler": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
    }
    whole = train(2, save_every="9 steps", out=tmp_path, **options)
    again = train(2, resume=tmp_path / "step-9", **options)
    assert_same(again, whole)
    assert metrics(again) == metrics(whole)


def test_a_resumed_run_does_not_step_the_scheduler_through(tmp_path: Path) -> None:
    steps: list[int] = []

    class Counted(StepLR):
        def step(self, *args: Any) -> None:
            steps.append(1)
            super().step(*args)

    options = {**SAME["sync"], "scheduler": lambda optimizer: Counted(optimizer, 2)}
    train(1, save_every="8 steps", out=tmp_path, **options)
    steps.clear()
    train(1, resume=tmp_path / "step-8", **options)
    assert len(steps) <= 3


def test_dropped_steps_are_remembered(tmp_path: Path) -> None:
    data = X.double().clone()
    data[7] = float("nan")
    # The sample is in one slot of every epoch; each of these is dropped, by the first part of the run or the second.
    options = {**SAME["sync"], "max_bad_steps": 3, "make_model": partial(PlainNet, torch.float64)}
    options["data"] = TensorData(data, Y)
    whole = train(2, save_every="4 steps", out=tmp_path, **options)
    again = train(2, resume=tmp_path / "step-4", **options)
    assert len(whole.dropped) > 2
    assert (again.dropped, again.samples) == (whole.dropped, whole.samples)
    assert_same(again, whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"make_model": partial(PlainNet, torch.float64)}, "is of another model: norm"),
        ({"optimizer": "two groups"}, "optimizer"),
    ],
)
def test_another_model_or_optimizer_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    OPTIMIZERS["two groups"] = lambda params: torch.optim.SGD(
        [{"params": group} for group in _halves(list(params))], lr=0.1
    )
    try:
        train(1, save_every="4 steps", out=tmp_path)
        with pytest.raises(InputError, match=words):
            train(1, resume=tmp_path / "step-4", **changes)
    finally:
        del OPTIMIZERS["two groups"]


def _halves(params: list[Any]) -> tuple[list[Any], list[Any]]:
    return params[:2], params[2:]


def test_the_record_is_plain_json(tmp_path: Path) -> None:
    train(2, save_every="4 steps", out=tmp_path, **CADENCE)
    folder = tmp_path / "step-4"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("rank-0.json", "rank-0.safetensors", "rank-1.json", "rank-1.safetensors"),
        *("state.json", "state.safetensors"),
    ]
    record = json.loads((folder / "state.json").read_text())
    assert record["ledger"] == {"trained": 4, "next": 4, "gaps": []}
    assert record["devices"] == ["cpu", "cpu"]
