"""Callbacks when ranks are lost or join: every evaluation counts once, and the best params are the same on all ranks.

On threads, with real workers. The metrics grow with every step, so it is known which evaluation is the best one.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.clusters import DiedError, Join, Loss, flat
from tests.train.elastic import lossy_local_runs as local
from tests.train.elastic.lossy_runs import accuracy, check, train
from tests.train.exact_runs import X
from uneven import Callback, CallbackInfo, EarlyStopping, KeepBest
from uneven.results.state import TrainedState
from uneven.train.callbacks import Agreed, CallbackRunner

pytestmark = pytest.mark.usefixtures("equal_speeds")

STEPS = 3  # of an epoch, after each of which there is an evaluation


def age(model: nn.Module, batch: Any) -> tuple[dict[str, torch.Tensor], int]:
    sums, count = accuracy(model, batch)
    return {**sums, "age": model.norm.num_batches_tracked.double() * count}, count  # type: ignore[union-attr, operator]


def youngest(metric: str = "age") -> tuple[Any, ...]:
    return EarlyStopping(metric, patience=99), KeepBest(metric)


def oldest(metric: str = "age") -> tuple[Any, ...]:
    return EarlyStopping(metric, patience=99), KeepBest(metric, mode="max")


class Greatest(Callback):
    """As people write it: it does not keep a state."""

    best = -math.inf

    def on_eval(self, info: CallbackInfo) -> None:
        if info.metrics["age"] > self.best:
            self.best = info.metrics["age"]
            info.keep_state()


def check_callbacks(found: dict[str, Any], best: int, waited: int) -> None:
    """All have kept the tensors of the evaluation at step `best`, and stop after the same evaluation."""
    states = [state for state, _ in found.values()]
    for state, worker in found.values():
        assert state.best is not None
        assert state.best["step"] == best
        assert torch.equal(flat(state.params), flat(states[0].params))
        assert [entry["step"] for entry in state.history] == [entry["step"] for entry in states[0].history]
        for callback in worker.task.callbacks:
            if isinstance(callback, EarlyStopping):
                assert callback.waited == waited


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The collectives of the first generation by which its members agree after an evaluation; of a run to come."""
    places: list[int] = []
    agree = CallbackRunner.agree

    def noted(runner: CallbackRunner, group: Any) -> Agreed:
        if (group.member, group.number, runner._requests.hook) == ("m0", 0, "on_eval"):
            places.append(group.started[0])
        return agree(runner, group)

    monkeypatch.setattr(CallbackRunner, "agree", noted)
    return places


def start(size: int, losses: list[Loss], **options: Any) -> tuple[dict[str, Any], Any]:
    given: dict[str, Any] = {"evaluate": age, "callbacks": oldest, "policy": "sync"} | options
    return train(size, losses, **given)


def run(losses: list[Loss], size: int = 3, **options: Any) -> dict[str, Any]:
    found, _ = start(size, losses, **options)
    return found


@pytest.mark.parametrize("callbacks", [oldest, lambda: (Greatest(),)], ids=["state", "stateless"])
def test_an_evaluation_that_is_done_again_counts_once(
    callbacks: Any,
    agreements: list[int],
    alone: TrainedState,
) -> None:
    """Lost where the ranks agree after an evaluation: nobody has agreed, some have, or all have."""
    check_callbacks(run([], callbacks=callbacks), 2 * STEPS, 1)
    for place in agreements[:2]:
        for after, blind in ((False, ()), (True, ("m0", "m2")), (True, ("m0",)), (True, ("m2",)), (True, ())):
            found = run([Loss("m1", place, after=after, blind=frozenset(blind))], callbacks=callbacks)
            assert set(found) == {"m0", "m2"}
            check(found, alone)
            check_callbacks(found, 2 * STEPS, 1)


@pytest.mark.parametrize("blind", ["m0", "m2"])
def test_what_a_rank_asked_for_that_did_not_hear_the_answer_is_not_asked_again(
    blind: str, agreements: list[int]
) -> None:
    """The other one has kept the tensors of the first evaluation, and those of the second one are no better."""
    run([], callbacks=youngest)
    found = run([Loss("m1", agreements[0], after=True, blind=frozenset({blind}))], callbacks=youngest)
    check_callbacks(found, STEPS, 1)


def test_an_evaluation_that_is_done_again_with_a_newcomer_is_in_the_history_once(
    agreements: list[int],
    alone: TrainedState,
) -> None:
    check_callbacks(run([], size=2), 2 * STEPS, 1)
    for place in agreements[:2]:
        found = run([], size=2, joins=[Join("new", place)])
        assert set(found) == {"m0", "m1", "new"}
        check(found, alone)
        check_callbacks(found, 2 * STEPS, 1)


def test_a_stop_that_was_asked_for_in_an_evaluation_that_is_done_again(agreements: list[int]) -> None:
    """The evaluation is in the history, and the reason counts evaluations once."""

    def impatient() -> tuple[Any, ...]:
        return (EarlyStopping("age", patience=1),)

    run([], callbacks=impatient, epochs=5)
    for blind in ((), ("m0", "m2")):
        loss = Loss("m1", agreements[1], after=bool(blind), blind=frozenset(blind))
        for state, _ in run([loss], callbacks=impatient, epochs=5).values():
            assert not state.finished
            assert (state.stopped or "").startswith("EarlyStopping: age has not improved in 1 evaluations")
            assert [entry["step"] for entry in state.history] == [STEPS, 2 * STEPS]


def test_dropped_samples_are_reported_once(agreements: list[int]) -> None:
    """By a rank that takes the evaluation over from another one, too."""
    x = X.clone()
    x[17] = math.nan
    first = run([], x=x)
    dropped = [entry.get("dropped", 0) for entry in next(iter(first.values()))[0].history]
    assert sum(dropped) > 0
    for blind in (("m0",), ("m2",), ("m0", "m2")):
        loss = Loss("m1", agreements[0], after=True, blind=frozenset(blind))
        for state, _ in run([loss], x=x).values():
            assert [entry.get("dropped", 0) for entry in state.history] == dropped


def test_a_newcomer_goes_on_from_the_callbacks_of_the_others() -> None:
    """Else its first evaluation is the best one to it, and all ranks take those params for the best."""
    options: dict[str, Any] = {"callbacks": youngest, "epochs": 3}
    _, leader = start(2, [], **options)
    for place in range(leader.begun, leader.collectives[0] - 6, 4):
        found = run([], size=2, joins=[Join("new", place)], **options)
        assert set(found) == {"m0", "m1", "new"}
        check_callbacks(found, STEPS, 2)


def test_a_newcomer_that_is_left_alone_has_the_best_params() -> None:
    options: dict[str, Any] = {"callbacks": youngest, "epochs": 3}
    undisturbed, leader = start(2, [], **options)
    best = flat(undisturbed["m0"][0].params)
    options["joins"] = [Join("new", (leader.begun + leader.collectives[0]) // 2)]
    _, leader = start(2, [], **options)
    first = Loss("m0", leader.collectives[1] // 2, 1)
    _, leader = start(2, [first], **options)
    found, _ = start(2, [first, Loss("m1", leader.collectives[2] - 8, 2)], **options)
    assert set(found) == {"new"}
    check_callbacks(found, STEPS, 2)
    torch.testing.assert_close(flat(found["new"][0].params), best, rtol=0, atol=1e-10)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_an_evaluation_of_a_local_policy_that_is_done_again_counts_once(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree = CallbackRunner.agree

    def dying(runner: CallbackRunner, group: Any) -> Agreed:
        engine = runner._engine
        is_second = runner._requests.hook == "on_eval" and engine.state.trained == engine.axis.epoch_end(1)
        if group.member == "m1" and is_second:
            raise DiedError
        return agree(runner, group)

    monkeypatch.setattr(CallbackRunner, "agree", dying)
    found, leader = local.train(3, [], policy=policy, is_evaluated=True, callbacks=lambda: oldest("level"))
    assert len(leader.generations) == 2
    assert set(found) == {"m0", "m2"}
    last = found["m0"][1].axis.total
    check_callbacks(found, last, 2)
    local.check(found, is_evaluated=True)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_newcomer_to_a_local_policy_goes_on_from_the_callbacks_of_the_others(policy: str) -> None:
    options: dict[str, Any] = {"policy": policy, "is_evaluated": True, "callbacks": lambda: youngest("level")}
    _, leader = local.train(2, [], **options)
    join = Join("new", (leader.begun + leader.collectives[0]) // 2)
    found, leader = local.train(2, [], joins=[join], **options)
    assert len(leader.generations) == 2
    assert set(found) == {"m0", "m1", "new"}
    check_callbacks(found, found["m0"][1].axis.epoch_end(0), 2)
