"""What callbacks keep for a resumed run: their state goes through JSON, and what does not fit is said."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uneven import Callback, CallbackInfo, EarlyStopping, InputError, KeepBest, RankError
from uneven.comm.group import SoloGroup
from uneven.train.callbacks import Agreed, CallbackRunner


class Counting(Callback):
    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def on_step(self, info: CallbackInfo) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Plain(Callback):
    def on_step(self, info: CallbackInfo) -> None: ...


class Duck:
    """No Callback, but it has the methods."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def on_step(self, info: CallbackInfo) -> None: ...

    def state_dict(self) -> list[str]:
        return self.names

    def load_state_dict(self, state: list[str]) -> None:
        self.names = state


class Broken(Counting):
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no")

    load_state_dict = state_dict  # type: ignore[assignment]


def runner(*callbacks: Any) -> CallbackRunner:
    return CallbackRunner(callbacks, cast(Any, SimpleNamespace(state=SimpleNamespace(trained=7))))


def saved(*callbacks: Any) -> Any:
    return json.loads(json.dumps(runner(*callbacks).state_dict(), allow_nan=False))


def test_each_callback_gets_its_own_state_back() -> None:
    first, second, duck = Counting(), Counting(), Duck([])
    state = saved(Plain(), Counting(3), Duck(["a"]), Counting(5))
    assert runner(Plain(), first, duck, second).load_state_dict(state) == []
    assert (first.count, second.count, duck.names) == (3, 5, ["a"])


def test_another_list_loads_what_fits_and_says_the_rest() -> None:
    state = saved(EarlyStopping(), Counting(3))
    counting, more = Counting(), Counting(1)
    lines = runner(Plain(), counting, more, Duck([])).load_state_dict(state)
    assert (counting.count, more.count) == (3, 1)
    assert lines == [
        "callback Counting has no state in the checkpoint and starts fresh",
        "callback Duck has no state in the checkpoint and starts fresh",
        "the checkpoint has the state of a callback EarlyStopping that this run lacks",
    ]


@pytest.mark.parametrize(
    ("callback", "kind", "words"),
    [
        (Counting(object()), InputError, "Counting.state_dict failed on rank 0 at step 7: a callback's state must be"),
        (Broken(), RankError, "Broken.state_dict failed on rank 0 at step 7: ZeroDivisionError: no"),
    ],
)
def test_a_state_that_cannot_be_kept_ends_the_run_where_all_ranks_meet(callback: Any, kind: Any, words: str) -> None:
    one = runner(callback)
    assert [entry["state"] for entry in one.state_dict()] == [None]
    with pytest.raises(kind, match=words):
        one.agree(SoloGroup())


@pytest.mark.parametrize("callback", [Counting(object()), Broken()])
def test_a_state_that_nobody_needs_counts_as_none_where_it_cannot_be_kept(callback: Any) -> None:
    """A rank that joins must not end the run of the others."""
    one = runner(callback)
    assert [entry["state"] for entry in one.state_dict(is_needed=False)] == [None]
    assert one.agree(SoloGroup()) == Agreed()


class Evaluates(Callback):
    def on_eval(self, info: CallbackInfo) -> None: ...


@pytest.mark.parametrize("is_stateless", [False, True])
def test_what_was_counted_and_asked_for_since_is_forgotten(is_stateless: bool) -> None:
    """But for a request to keep the tensors, where one that keeps no state may have made it and not make it again."""
    counting = Counting(3)
    one = runner(counting, *([Evaluates()] if is_stateless else []))
    before = one.moment()
    counting.count = 5
    one._requests.hook, one._requests.caller = "on_eval", "Counting"
    one._requests.stop("enough")
    one._requests.keep()
    assert one.agree(SoloGroup()) == Agreed("Counting: enough", True)
    one.go_back_to(before)
    assert (counting.count, one.stopped, one.is_stopping()) == (3, None, False)
    assert one.agree(SoloGroup()) == Agreed(None, is_stateless)
    one.forget_keep()
    assert one.agree(SoloGroup()) == Agreed()
    one._requests.stop("enough")
    one.go_back_to(one.moment())
    assert one.is_stopping(), "asked for before"
    one.forget_requests()
    assert not one.is_stopping()


def test_a_state_that_cannot_be_loaded_ends_the_run_likewise() -> None:
    one = runner(Broken())
    one.load_state_dict([{"class": "Broken", "state": {}}])
    with pytest.raises(RankError, match=r"Broken\.load_state_dict failed on rank 0"):
        one.agree(SoloGroup())


def at(score: float) -> CallbackInfo:
    return cast(CallbackInfo, Evaluated({"score": score}))


class Evaluated:
    def __init__(self, metrics: dict[str, float]) -> None:
        self.metrics, self.reason, self.keeps = metrics, "", False

    def stop(self, reason: str) -> None:
        self.reason = reason

    def keep_state(self) -> None:
        self.keeps = True


@pytest.mark.parametrize("cut", range(6))
def test_early_stopping_goes_on_counting(cut: int) -> None:
    values = [3.0, 2.0, 2.5, 2.5, 1.0, 1.5, 1.5, 1.5]
    first, second = EarlyStopping("score", patience=3), EarlyStopping("score", patience=3)
    first.on_start(at(0.0))
    for value in values[:cut]:
        first.on_eval(at(value))
    assert runner(second).load_state_dict(saved(first)) == []
    second.on_start(at(0.0))
    reasons = []
    for value in values[cut:]:
        second.on_eval(info := at(value))
        reasons.append(cast(Any, info).reason)
    assert [bool(reason) for reason in reasons] == [False] * (7 - cut) + [True]
    assert reasons[-1] == "score has not improved in 3 evaluations; the best was 1"


def test_keep_best_keeps_only_what_is_better_than_before() -> None:
    first, second = KeepBest("score", mode="max"), KeepBest("score", mode="max")
    first.on_start(at(0.0))
    first.on_eval(at(2.0))
    runner(second).load_state_dict(saved(first))
    second.on_start(at(0.0))
    kept = []
    for value in (1.0, 2.0, 3.0):
        second.on_eval(info := at(value))
        kept.append(cast(Any, info).keeps)
    assert kept == [False, False, True]
    second.on_start(at(0.0))
    assert second.best is None, "another run of the same object begins anew"


def test_a_state_that_is_loaded_in_the_middle_of_a_run_is_not_that_of_the_next_one() -> None:
    keeping = KeepBest("score")
    keeping.on_start(at(0.0))
    keeping.load_state_dict(keeping.state_dict())
    keeping.on_eval(at(2.0))
    keeping.on_start(at(0.0))
    assert keeping.best is None


def test_the_best_of_another_metric_does_not_count_and_infinity_is_kept() -> None:
    other = EarlyStopping("loss")
    runner(other).load_state_dict(saved(_with_best(EarlyStopping("score"), 2.0)))
    assert other.best is None
    endless = KeepBest("score", mode="max")
    runner(endless).load_state_dict(saved(_with_best(KeepBest("score", mode="max"), float("inf"))))
    assert endless.best == float("inf")


def _with_best(callback: Any, best: float) -> Any:
    callback.best = best
    return callback
