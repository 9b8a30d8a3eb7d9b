"""Callbacks: when they are called, that a stop is agreed by all ranks, that a failing one hangs and kills nobody."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.step_runs import EVALUATION, LOCAL, Plain, train
from uneven import Callback, CallbackInfo, EarlyStopping, InputError, KeepBest, RankError
from uneven.config import HOOKS, Evaluation, check_list
from uneven.config.task import check_callbacks
from uneven.train.callbacks import Agreed, CallbackRunner
from uneven.train.gradient_sync import GradientSync
from uneven.train.worker import Worker

ASYNC = LOCAL | {"policy": "async"}
any_policy = pytest.mark.parametrize("options", [{}, LOCAL, ASYNC], ids=["exact", "cadence", "async"])


class Recording(Callback):
    """Notes every call, on whichever rank."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.infos: list[CallbackInfo] = []

    def note(self, hook: str, info: CallbackInfo) -> None:
        self.calls.append((hook, info.step))
        self.infos.append(info)

    def on_start(self, info: CallbackInfo) -> None:
        self.note("on_start", info)

    def on_step(self, info: CallbackInfo) -> None:
        self.note("on_step", info)

    def on_round(self, info: CallbackInfo) -> None:
        self.note("on_round", info)

    def on_eval(self, info: CallbackInfo) -> None:
        self.note("on_eval", info)

    def on_save(self, info: CallbackInfo) -> None:
        self.note("on_save", info)

    def on_end(self, info: CallbackInfo) -> None:
        self.note("on_end", info)


def recorded(size: int, **options: Any) -> list[Recording]:
    own = [Recording() for _ in range(size)]
    train(size, callbacks=lambda rank: [own[rank]], **options)
    return own


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_is_called_at_every_step_of_an_exact_policy(size: int, tmp_path: Path) -> None:
    options = {"max_steps": 4, "eval_every": "3 steps", "evaluation": EVALUATION}
    own = recorded(size, save_every="2 steps", out=tmp_path, **options)
    steps = [("on_step", step) for step in (1, 2, 3, 4)]
    for rank, callback in enumerate(own):
        assert callback.calls == [
            ("on_start", 0),
            *steps[:2],
            ("on_save", 2),
            steps[2],
            ("on_eval", 3),
            steps[3],
            ("on_eval", 4),
            ("on_save", 4),
            ("on_end", 4),
        ]
        infos = dict(zip(callback.calls, callback.infos, strict=True))
        first, third, last = infos["on_step", 1], infos["on_eval", 3], infos["on_end", 4]
        assert (first.epoch, first.samples, first.total_steps, dict(first.metrics)) == (1, 24, 4, {})
        assert (third.epoch, third.samples, last.epoch, last.samples) == (1, 70, 2, 94)
        assert (last.rank, last.world_size, last.is_lead, last.stopped) == (rank, size, rank == 0, None)
        assert dict(third.metrics) == {name: third.history[-1][name] for name in ("loss", "train_loss")}
        assert [entry["step"] for entry in last.history] == [3, 4]
        assert infos["on_save", 2].path == tmp_path / "step-2"
        assert isinstance(first.model, torch.nn.Module)
        assert first.lr == 0.05
        with pytest.raises(AttributeError):
            first.step = 9  # type: ignore[misc]


@pytest.mark.parametrize("options", [LOCAL, ASYNC], ids=["cadence", "async"])
def test_with_a_local_policy_the_rank_that_trained_a_step_is_called(options: dict[str, Any]) -> None:
    own = recorded(2, max_steps=20, eval_every="6 steps", evaluation=EVALUATION, **options)
    steps = [step for callback in own for hook, step in callback.calls if hook == "on_step"]
    assert sorted(steps) == list(range(1, 21))
    for callback in own:
        assert [step for hook, step in callback.calls if hook == "on_eval"] == [6, 12, 18, 20]
        rounds = [step for hook, step in callback.calls if hook == "on_round"]
        assert rounds == [step for hook, step in own[0].calls if hook == "on_round"]
        assert {6, 12, 18, 20} <= set(rounds)


class Stops(Callback):
    def __init__(self, hook: str, step: int, reason: str = "enough") -> None:
        self.step, self.reason = step, reason
        setattr(self, hook, self._stop)

    def _stop(self, info: CallbackInfo) -> None:
        if info.step >= self.step:
            info.stop(self.reason)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("hook", "slots"), [("on_start", 0), ("on_step", 4), ("on_eval", 4)])
def test_a_stop_by_one_rank_is_agreed_by_all(size: int, hook: str, slots: int) -> None:
    """After an evaluation at that very step; a request after a step travels with the next step's gradient sum."""
    by = size - 1
    stops = {"evaluation": EVALUATION, "eval_every": "4 steps", "epochs": 9}
    if hook == "on_step":
        stops = {"epochs": 9}
    results = train(size, callbacks=lambda rank: [Stops(hook, slots)] if rank == by else [], is_whole=False, **stops)
    for result in results:
        state = result.state
        assert (state.finished, state.stopped) == (False, "Stops: enough")
        assert state.slot == slots + (hook == "on_step" and size > 1)
    if hook == "on_eval":
        Plain().train(0, 4).assert_equal(results[0].state)


@pytest.mark.parametrize("options", [LOCAL, ASYNC], ids=["cadence", "async"])
@pytest.mark.parametrize("hook", ["on_step", "on_round", "on_eval"])
def test_a_stop_by_one_rank_ends_a_local_policy_with_equal_replicas(options: dict[str, Any], hook: str) -> None:
    evaluation = {"evaluation": EVALUATION, "eval_every": "6 steps"} if hook == "on_eval" else {}
    own = [Stops(hook, 6), Recording()]
    results = train(2, callbacks=lambda rank: [own[rank]], is_whole=False, epochs=50, **options, **evaluation)
    seen = [result.state.stopped for result in results]
    if hook == "on_step" and None in seen:  # rank 0 may have trained no step at all on a busy machine
        assert seen == [None, None]
    else:
        assert seen == ["Stops: enough"] * 2
        assert not results[0].state.finished
    if hook == "on_eval":
        assert {result.state.slot for result in results} == {6}
    assert own[1].calls[-1][0] == "on_end"  # type: ignore[attr-defined]


def test_a_stop_at_the_last_step_is_none() -> None:
    state = train(1, max_steps=3, callbacks=[Stops("on_step", 3)])[0].state
    assert (state.finished, state.stopped) == (True, None)


class Fails(Callback):
    def __init__(self, hook: str, error: Exception | None = None) -> None:
        self.error = error or ValueError("boom")
        setattr(self, hook, self._fail)

    def _fail(self, info: CallbackInfo) -> None:
        raise self.error


@any_policy
@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_one_rank_ends_the_run_on_all(options: dict[str, Any], hook: str, tmp_path: Path) -> None:
    if hook == "on_round" and not options:
        return
    # A rank may have no step of its own on a busy machine: there both have the callback, and one of them fails first.
    ranks = (0, 1) if hook == "on_step" else (1,)
    common = {"evaluation": EVALUATION, "eval_every": "6 steps", "save_every": "4 steps", "out": tmp_path}
    with pytest.raises(RankError) as caught:
        train(
            2,
            callbacks=lambda rank: [Fails(hook)] if rank in ranks else [Recording()],
            max_steps=30,
            **common,
            **options,
        )
    assert any(f"callback Fails.{hook} failed on rank {rank} at step " in str(caught.value) for rank in ranks)
    assert "ValueError: boom (test_callbacks.py, line " in str(caught.value)


def test_all_ranks_raise_and_the_failing_one_keeps_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, BaseException] = {}
    original = Worker.train

    def noted(worker: Worker) -> Any:
        try:
            return original(worker)
        except BaseException as error:
            seen[worker.rank_info.rank] = error
            raise

    monkeypatch.setattr(Worker, "train", noted)
    with pytest.raises(RankError):
        train(3, callbacks=lambda rank: [Fails("on_eval")] * (rank == 1), epochs=2, evaluation=EVALUATION)
    assert sorted(seen) == [0, 1, 2]
    assert all("callback Fails.on_eval failed on rank 1 at step 3: ValueError: boom" in str(e) for e in seen.values())
    assert isinstance(seen[1].__cause__, ValueError)
    assert ["peer" in str(seen[rank]) for rank in range(3)] == [True, False, True]  # see launch/watch/watch.py


def test_a_wrong_input_found_by_a_callback_is_one() -> None:
    with pytest.raises(InputError, match=r"EarlyStopping\(metric='acc'\): the evaluation has loss, train_loss"):
        train(2, epochs=2, evaluation=EVALUATION, callbacks=lambda _: [EarlyStopping("acc")])
    with pytest.raises(InputError, match=r"keep_state\(\) was called in on_step"):
        train(1, epochs=1, callbacks=[type("Keeps", (), {"on_step": lambda self, info: info.keep_state()})()])


def test_the_time_of_callbacks_is_a_state_of_its_own_and_no_work_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither training time nor a reason to give the rank a smaller share."""
    busy_ms: list[float] = []
    step = GradientSync.step

    def noted(sync: GradientSync, *arguments: Any) -> bool:
        is_stopped = step(sync, *arguments)
        busy_ms.append(sync.busy_ms[0])
        return is_stopped

    class Slow(Callback):
        def on_step(self, info: CallbackInfo) -> None:
            threading.Event().wait(0.2)

    monkeypatch.setattr(GradientSync, "step", noted)
    result = train(2, max_steps=3, callbacks=lambda rank: [Slow()] if rank == 0 else [])[0]
    (account,) = result.timeline.accounts
    assert account.seconds["user"] >= 0.6
    assert account.training_s <= account.wall_s - 0.6
    assert min(busy_ms[2:]) < 200  # of the second and third step, as both ranks see it


class Scripted:
    """An evaluation whose metric is given, evaluation by evaluation."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def evaluation(self) -> Evaluation:
        calls: dict[int, int] = {}

        def step(model: Any, batch: Any) -> tuple[dict[str, Any], int]:
            place = calls[id(model)] = calls.get(id(model), -1) + 1
            return {"score": self.values[place] * len(batch[1])}, len(batch[1])

        # One batch a rank and evaluation, so that the calls of a model count the evaluations.
        return Evaluation(EVALUATION.dataset, step, batch_size=64)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("values", "options", "steps"),
    [
        ([3.0, 2.0, 2.0, 2.0, 1.0, 1.0], {"patience": 2}, 4),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 1.8], {"patience": 2}, 6),
        ([3.0, 2.95, 2.9, 1.0], {"patience": 1, "min_delta": 0.1}, 2),
        ([1.0, 2.0, 3.0, 2.0, 2.0, 9.0], {"patience": 2, "mode": "max"}, 5),
        ([3.0, float("nan"), float("nan"), 1.0], {"patience": 2}, 3),
        ([float("nan"), 2.0, 1.0, 1.0], {"patience": 1}, 1),
    ],
)
def test_early_stopping(values: list[float], options: dict[str, Any], steps: int, size: int) -> None:
    results = train(
        size,
        max_steps=len(values),
        eval_every="1 step",
        evaluation=Scripted(values).evaluation(),
        callbacks=lambda _: [EarlyStopping("score", **options)],
        is_whole=False,
    )
    for result in results:
        assert result.state.slot == steps
        assert result.state.finished == (steps == len(values))
        if steps < len(values):
            assert (result.state.stopped or "").startswith("EarlyStopping: score has not improved in ")


@pytest.mark.parametrize("size", [1, 2])
def test_the_result_holds_the_best_params(size: int) -> None:
    values = [3.0, 2.0, 1.0, 2.0, 1.0, 4.0]
    results = train(
        size,
        max_steps=6,
        eval_every="1 step",
        evaluation=Scripted(values).evaluation(),
        callbacks=lambda _: [KeepBest("score")],
    )
    for result in results:
        state = result.state
        assert (state.finished, state.slot, len(state.history)) == (True, 6, 6)
        assert state.best is not None
        assert (state.best["step"], state.best["score"]) == (3, pytest.approx(1.0))
        Plain().train(0, 3).assert_equal(state)
        assert all(torch.equal(value, results[0].state.optimizer[name]) for name, value in state.optimizer.items())


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp", "tensor"])
def test_the_best_params_of_a_sharded_strategy_are_whole(strategy: str) -> None:
    results = train(
        2,
        max_steps=5,
        eval_every="1 step",
        evaluation=EVALUATION,
        callbacks=lambda _: [KeepBest("loss", mode="max")],
        strategy=strategy,
    )
    best = results[0].state.best
    assert best is not None
    losses = {entry["step"]: entry["loss"] for entry in results[0].state.history}
    assert best["step"] == max(losses, key=lambda step: losses[step]) < 5
    Plain().train(0, best["step"]).assert_equal(results[0].state)


def test_a_callback_object_serves_for_several_runs() -> None:
    stopping = EarlyStopping("score", patience=1)
    for _ in range(2):
        options = {"max_steps": 4, "eval_every": "1 step", "evaluation": Scripted([2.0, 1.0, 1.0, 1.0]).evaluation()}
        assert train(1, callbacks=[stopping], is_whole=False, **options)[0].state.slot == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EarlyStopping(3), "EarlyStopping(metric=3): pass the name"),  # type: ignore[arg-type]
        (lambda: EarlyStopping("loss", patience=0), "patience=0) must be a whole number of at least 1"),
        (lambda: EarlyStopping("loss", mode="up"), "mode='up') must be one of min, max"),  # type: ignore[arg-type]
        (lambda: KeepBest("loss", min_delta=-1), "KeepBest(min_delta=-1) must be a number of at least 0"),
        (lambda: check_callbacks([EarlyStopping], True), "is a class; pass an object of it: EarlyStopping(...)"),
        (lambda: check_callbacks([print], True), "has no method to call; a callback has one or more of on_start"),
        (
            lambda: check_callbacks([EarlyStopping()], False),
            "EarlyStopping follows an evaluated metric; pass evaluate=",
        ),
        (lambda: check_list(KeepBest()), "callbacks must be a list, got KeepBest; pass callbacks=[KeepBest(...)]"),
        (
            lambda: check_callbacks([type("Old", (), {"on_epoch_end": lambda self: None})()], True),
            "Old has on_epoch_end, which is never called",
        ),
    ],
)
def test_wrong_callbacks_are_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


def test_without_callbacks_nothing_is_exchanged() -> None:
    assert CallbackRunner((Callback(),), None).agree(None) == Agreed()  # type: ignore[arg-type]
