"""Ranks are lost at every collective of a loop of the user's own: whoever is left ends as one process would have.

On threads, with real loops; test_loop_kills.py has the same with processes that are really killed.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.api.loops import RunOnThreads
from tests.train.clusters import Begun, DiedError, FakeMembership, Join, Loss, LossyGroup, fill, flat, on_lossy_threads
from tests.train.elastic.lossy_local_runs import SAMPLES, Count, count_step, level
from tests.train.elastic.lossy_local_runs import check as check_count
from tests.train.elastic.lossy_runs import ways
from tests.train.exact_runs import OPTIMIZERS, X, Y
from tests.train.stream_runs import Plain, SizedPlain
from uneven import TrainedState
from uneven.api.loop import Loop
from uneven.api.loop_inputs import optimizer_factory
from uneven.config import Evaluation, RunConfig, Task, resolve
from uneven.data.tensors import TensorData
from uneven.launch.training import collect
from uneven.parallel.sharded_optimizer import ShardedOptimizer
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

SHARES = (3.0, 2.0, 1.0)
DATA = TensorData(X.double(), Y)
NUMBERS = TensorData(torch.arange(SAMPLES), torch.zeros(SAMPLES))
Epochs = Callable[[Loop, str], None]
Found = dict[str, tuple[TrainedState, Worker]]


class Net(nn.Module):
    """Counts its forwards in training: a batch that comes again must not be counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3)
        fill(self)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        return self.second(torch.tanh(self.first(x)))


def right(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    return {"right": (model(batch[0]).argmax(1) == batch[1]).sum().double()}, len(batch[1])


def own_epochs(loop: Loop, member: str) -> None:
    """With every call of a loop, and a number that it logs for each batch, before and after its step."""
    for epoch in range(loop.epochs):
        for x, y in loop.batches(epoch):
            loss = F.cross_entropy(loop(x), y)
            loop.log(before=x.sum() / len(x))
            loop.step(loss)
            loop.log(after=x.sum() / len(x))
        assert loop.scheduler_step(float(epoch)) == epoch
        loop.log(ended=float(epoch))


def run(
    task: Task | Callable[[], Task],
    config: RunConfig,
    epochs: Epochs,
    size: int,
    losses: Sequence[Loss],
    joins: Sequence[Join] = (),
) -> tuple[Found, Any]:
    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> tuple[TrainedState, Worker]:
        class Surviving(RunOnThreads):
            def make_worker(self, task: Task) -> Worker:
                worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
                worker.use_membership(membership)
                return worker

            def save(self, worker: Worker, was_interrupted: bool) -> TrainedState:
                result = worker.surviving(worker.result)
                return worker.finish(lambda: collect(worker.group, result, worker.axis))

        made = task if isinstance(task, Task) else task()
        with Loop(replace(made, is_own_loop=True), Surviving(group, config)) as loop:
            epochs(loop, str(info.member))
        return loop.finish(), loop.worker

    return on_lossy_threads(size, losses, rank, joins)


def train(
    size: int,
    losses: Sequence[Loss],
    loop: Epochs = own_epochs,
    joins: Sequence[Join] = (),
    data: Callable[[], Any] = lambda: DATA,
    **changes: Any,
) -> tuple[Found, Any]:
    config = resolve(
        {"batch_size": 12, "epochs": 2, "seed": 3, "global_batch_size": 30, "policy": "balanced"} | changes
    )

    def make_task() -> Task:
        """As in a script: every rank has a model and an optimizer, which stay the same objects."""
        model = Net()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        return Task(
            lambda: model,
            optimizer_factory(model, optimizer),
            lambda *_: None,
            data(),
            lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
            Evaluation(DATA, right, every=1),
        )

    return run(make_task, config, loop, size, losses, joins)


def lose(loss: Loss, loop: Epochs = own_epochs, **changes: Any) -> Found:
    found, leader = train(3, [loss], loop, shares=SHARES, **changes)
    assert set(found) == {"m0", "m1", "m2"} - {loss.victim}, loss
    assert len(leader.generations) == 2
    return found


def places(**changes: Any) -> list[int]:
    """The collectives of a run without a loss, from its first step on."""
    _, leader = train(3, [], shares=SHARES, **changes)
    assert leader.collectives[0] - leader.begun > 25
    return list(range(leader.begun, leader.collectives[0]))


def check(found: Found, alone: TrainedState) -> None:
    """All who are left hold the same bits, those of one process up to rounding; collect() has counted the samples."""
    states = [state for state, _ in found.values()]
    for state in states:
        assert torch.equal(flat(state.params), flat(states[0].params))
        torch.testing.assert_close(flat(state.params), flat(alone.params), rtol=0, atol=1e-10)
        assert state.buffers["forwards"] == alone.buffers["forwards"]
        assert state.finished
        assert state.samples == alone.samples
        assert len(state.history) == len(alone.history)
        for entry, same in zip(state.history, alone.history, strict=True):
            assert (entry["right"], entry["ended"]) == (same["right"], same["ended"])


@pytest.fixture(scope="module")
def alone() -> TrainedState:
    ((state, _),) = train(1, [], policy="sync")[0].values()
    return state


def test_a_rank_is_lost_at_some_collective_of_a_loop(alone: TrainedState) -> None:
    cases = list(itertools.product(places(), ways(("m0", "m2"))))
    for place, (after, blind) in cases[::29]:
        check(lose(Loss("m1", place, after=after, blind=blind)), alone)


def test_an_optimizer_in_a_loop_is_sharded_by_elements_where_it_treats_each_by_itself() -> None:
    """Though the loop looks at every step: a hook that may change something would make it whole tensors."""
    for _, worker in train(2, [], shares=SHARES[:2], strategy="zero1")[0].values():
        assert isinstance(worker.engine.optimizer, ShardedOptimizer)
        assert not worker.engine.optimizer.by_tensors


@pytest.mark.parametrize("victim", ["m0", "m2"])
def test_a_loop_with_sharded_optimizer_state_goes_on_with_the_optimizer_of_the_script(
    victim: str, alone: TrainedState
) -> None:
    """Twice: first with shards on two ranks, then with all of it on one."""
    settings = {"strategy": "zero1", "redundancy": 1}
    _, leader = train(3, [], shares=SHARES, **settings)
    place = (leader.begun + leader.collectives[0]) // 3
    check(lose(Loss(victim, place), **settings), alone)
    (second, *_) = sorted({"m0", "m1", "m2"} - {victim})
    found, _ = train(3, [Loss(victim, place), Loss(second, place, generation=1)], shares=SHARES, **settings)
    check(found, alone)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["m0", "m1", "m2"])
def test_any_rank_is_lost_at_any_collective_of_a_loop(victim: str, alone: TrainedState) -> None:
    left = tuple(name for name in ("m0", "m1", "m2") if name != victim)
    for place, (after, blind) in itertools.product(places(), ways(left)):
        check(lose(Loss(victim, place, after=after, blind=blind)), alone)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("stream", [Plain, SizedPlain])
@pytest.mark.parametrize("victim", ["m0", "m1"])
def test_a_loop_over_a_stream_goes_on_without_a_rank(victim: str, stream: type[Plain], policy: str) -> None:
    """Also without the one that reads it for all."""
    settings = {"policy": policy} | ({} if policy == "sync" else {"global_batch_size": None, "batch_size": 4})
    ((one, _),) = train(1, [], data=stream, **settings)[0].values()
    _, leader = train(3, [], data=stream, **settings)
    for place in range(leader.begun, leader.collectives[0], 11):
        found, _ = train(3, [Loss(victim, place)], data=stream, **settings)
        if policy == "sync":
            check(found, one)
        assert all(state.samples == one.samples for state, _ in found.values())


@pytest.mark.parametrize("is_after", [False, True])
def test_a_batch_that_comes_again_is_in_the_log_once(is_after: bool) -> None:
    """`log` of a step that did not happen counts for nothing, whether it was called before the step or after it."""
    counted: dict[str, list[Tensor]] = {}
    others = threading.Barrier(3)  # all have their second batch

    def epochs(loop: Loop, member: str) -> None:
        own, given = counted.setdefault(member, []), 0
        for epoch in range(loop.epochs):
            for x, y in loop.batches(epoch):
                given += 1
                if given == 2:
                    others.wait()
                    if member == "m1":
                        raise DiedError
                loss, known = F.cross_entropy(loop(x), y), len(loop.worker.engine.state.log)
                if not is_after:
                    loop.log(mean=x.mean())
                loop.step(loss)
                if is_after:
                    loop.log(mean=x.mean())
                if len(loop.worker.engine.state.log) > known:
                    own.append(x)
                else:
                    loop.step(loss)  # does nothing
        assert given == len(own) + 1, "one batch was void"

    found, _ = train(3, [], epochs, shares=SHARES, epochs=1)
    assert set(found) == {"m0", "m2"}
    expected = torch.cat([*counted["m0"], *counted["m2"]]).mean()
    for state, _ in found.values():
        assert state.history[0]["mean"] == pytest.approx(float(expected), rel=1e-12)


def lose_at_batch(victim: str, at: int) -> Epochs:
    """Count's own loop, in which this member dies at a batch, with the loss of it in its hands."""

    def epochs(loop: Loop, member: str) -> None:
        given = itertools.count()
        for epoch in range(loop.epochs):
            for batch in loop.batches(epoch):
                loss = count_step(loop.model, batch)
                if (member, next(given)) == (victim, at):
                    raise DiedError
                loop.step(loss)

    return epochs


UNDISTURBED = lose_at_batch("", 0)


def count(policy: str, losses: Sequence[Loss] = (), epochs: Epochs = UNDISTURBED) -> tuple[Found, Any]:
    settings = {"batch_size": 4, "epochs": 3, "seed": 3, "anchor": 2, "max_anchor": 2, "lr_scale": 1.0}
    config = resolve({**settings, "policy": policy})

    def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    task = Task(Count, sgd, lambda *_: None, NUMBERS, None, Evaluation(NUMBERS, level, every=1))
    return run(task, config, epochs, 3, losses)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_of_a_local_policy_is_lost_in_a_loop(policy: str) -> None:
    """Every sample once, by a count in the params themselves."""
    found, leader = count(policy)
    check_count(found)
    check_count(count(policy, [Loss("m1", (leader.begun + leader.collectives[0]) // 2)])[0])
    check_count(count(policy, epochs=lose_at_batch("m1", 0))[0])


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("victim", ["m0", "m1", "m2"])
def test_any_rank_of_a_local_policy_is_lost_anywhere_in_a_loop(policy: str, victim: str) -> None:
    _, leader = count(policy)
    left = tuple(name for name in ("m0", "m1", "m2") if name != victim)
    for place, (after, blind) in itertools.product(range(leader.begun, leader.collectives[0]), ways(left)):
        check_count(count(policy, [Loss(victim, place, after=after, blind=blind)])[0])
    for at in range(12):
        check_count(count(policy, epochs=lose_at_batch(victim, at))[0])


@pytest.fixture(scope="module")
def three_epochs() -> TrainedState:
    ((state, _),) = train(1, [], policy="sync", epochs=3)[0].values()
    return state


def check_join(place: int, losses: Sequence[Loss], alone: TrainedState) -> None:
    found, leader = train(2, losses, joins=[Join("n", place)], epochs=3, policy="sync")
    assert "n" in found
    check(found, alone)
    _, newcomer = found["n"]
    if not losses:
        assert [len(generation.members) for generation in leader.generations] == [2, 3]
        firsts = [slot for slot, _, _ in newcomer.engine.state.log[:1]]
        assert all(slot % newcomer.axis.slots_per_epoch == 0 for slot in firsts), "at an epoch's start"


def joins(epochs: int = 3) -> range:
    """The collectives of two ranks, from the first step on to the end of their training."""
    _, leader = train(2, [], epochs=epochs, policy="sync")
    return range(leader.begun, leader.collectives[0])


def test_who_joins_a_loop_comes_in_at_an_epochs_start(three_epochs: TrainedState) -> None:
    places = joins()
    for place in (places[2], places[len(places) // 2]):
        check_join(place, [], three_epochs)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_who_joins_a_loop_at_any_moment(three_epochs: TrainedState) -> None:
    places = joins()
    for place in places[:-12]:
        check_join(place, [], three_epochs)
    for place in places[:-30:3]:  # and while it waits another rank is lost
        check_join(place, [Loss("m1", place + 1, 0)], three_epochs)
