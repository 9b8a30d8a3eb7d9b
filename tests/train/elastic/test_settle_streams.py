"""A stream that one rank reads for all goes on when ranks are lost: whoever is rank 0 then reads it once more.

On threads, with real workers and readers. Each has a data set of its own, as in processes of their own.
"""

import threading
from functools import partial
from typing import Any

import pytest
import torch

from tests.train.clusters import Begun, DiedError, FakeMembership, Join, Loss, LossyGroup, flat, on_lossy_threads
from tests.train.elastic import lossy_local_runs
from tests.train.elastic.lossy_local_runs import SAMPLES, Numbers, SizedNumbers
from tests.train.exact_runs import OPTIMIZERS, Net, mean_loss
from tests.train.stream_runs import Plain, SizedPlain
from uneven.config import Task, resolve
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

EXACT = {"unsized": Plain, "sized": SizedPlain, "shrinking": partial(Plain, 70, 11)}
LOCAL = {"unsized": Numbers, "sized": SizedNumbers}
SOME_OR_ALL = [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.soak)]


@pytest.fixture(autouse=True)
def no_thread_is_left(request: pytest.FixtureRequest) -> Any:
    """Of readers, their servers and connections."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("uneven-reader")]
    for thread in left:
        thread.join(10.0)
    assert not [thread.name for thread in left if thread.is_alive()]


def train(
    size: int, losses: list[Loss], kind: str, joins: list[Join] | None = None, **changes: Any
) -> tuple[dict[str, TrainedState], Any]:
    """Of an exact policy."""
    config = resolve({"batch_size": 12, "epochs": 2, "seed": 3, "global_batch_size": 24, **changes})

    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> TrainedState:
        task = Task(partial(Net, torch.float64), OPTIMIZERS["adam"], mean_loss, EXACT[kind](), None, None)
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.membership = membership
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis))

    return on_lossy_threads(size, losses, rank, joins or [])


def check(found: dict[str, TrainedState], kind: str) -> None:
    """The params of one device alone, the same history; `collect` has counted the samples."""
    alone = train(1, [], kind)[0]["m0"]
    for state in found.values():
        assert state.finished
        torch.testing.assert_close(flat(state.params), flat(alone.params), rtol=0, atol=1e-12)
        entries = [(entry["epoch"], entry["step"], entry["samples"]) for entry in state.history]
        assert entries == [(entry["epoch"], entry["step"], entry["samples"]) for entry in alone.history]
        losses = [entry["train_loss"] for entry in state.history]
        assert losses == pytest.approx([entry["train_loss"] for entry in alone.history], rel=1e-10)


@pytest.mark.parametrize("everywhere", SOME_OR_ALL)
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("victim", ["m0", "m2"])
@pytest.mark.timeout(900)
def test_a_rank_of_an_exact_policy_is_lost(victim: str, kind: str, everywhere: bool) -> None:
    """The one that reads, or another; at every collective, those near the end of the stream among them."""
    _, leader = train(3, [], kind)
    for place in range(leader.begun, leader.collectives[0], 1 if everywhere else 5):
        for blind in (frozenset[str](), frozenset({"m1"})):
            found, after = train(3, [Loss(victim, place, after=bool(blind), blind=blind)], kind)
            assert set(found) == {"m0", "m1", "m2"} - {victim}
            assert len(after.generations) == 2
            check(found, kind)


@pytest.mark.parametrize("everywhere", SOME_OR_ALL)
@pytest.mark.timeout(900)
def test_reader_after_reader_is_lost(everywhere: bool) -> None:
    """The second one while the others settle, or open the stream, or later; then one rank is left alone."""
    _, leader = train(3, [], "unsized")
    first = Loss("m0", leader.begun + 4)
    _, leader = train(3, [first], "unsized")
    for place in range(0, leader.collectives[1], 1 if everywhere else 4):
        found, after = train(3, [first, Loss("m1", place, 1)], "unsized")
        assert set(found) == {"m2"}
        assert len(after.generations) == 3
        check(found, "unsized")


@pytest.mark.parametrize("kind", EXACT)
def test_a_newcomer_joins_an_exact_policy(kind: str) -> None:
    _, leader = train(2, [], kind)
    for place in range(leader.begun, leader.collectives[0], 5):
        found, _ = train(2, [], kind, [Join("new", place)])
        assert set(found) == {"m0", "m1", "new"}
        check(found, kind)


def test_the_samples_of_the_first_epoch_are_not_read_again_in_the_second() -> None:
    """Each reader begins with the epoch that is in progress."""
    read: list[Plain] = []

    def made() -> Plain:
        read.append(Plain())
        return read[-1]

    EXACT["counted"] = made
    try:
        _, leader = train(2, [], "unsized")
        train(2, [Loss("m0", leader.collectives[0] - 8)], "counted")
    finally:
        del EXACT["counted"]
    assert sorted(len(one.read) for one in read) == [70, 140]


local = pytest.mark.usefixtures("equal_speeds")
POLICIES = pytest.mark.parametrize("policy", ["cadence", "async"])


def begin_and_end(size: int, policy: str, kind: str) -> tuple[int, int]:
    found, leader = lossy_local_runs.train(size, [], policy=policy, epochs=2, stream=LOCAL[kind])
    lossy_local_runs.check(found, 2)
    return leader.begun, leader.collectives[0]


@local
@POLICIES
@pytest.mark.parametrize("everywhere", SOME_OR_ALL)
@pytest.mark.parametrize("kind", LOCAL)
@pytest.mark.parametrize("victim", ["m0", "m2"])
@pytest.mark.timeout(900)
def test_a_rank_of_a_local_policy_is_lost(victim: str, kind: str, everywhere: bool, policy: str) -> None:
    begun, end = begin_and_end(3, policy, kind)
    for place in range(begun, end, 1 if everywhere else 6):
        for blind in (frozenset[str](), frozenset({"m1"})):
            loss = Loss(victim, place, after=bool(blind), blind=blind)
            found, _ = lossy_local_runs.train(3, [loss], policy=policy, epochs=2, stream=LOCAL[kind])
            assert set(found) >= {"m0", "m1", "m2"} - {victim}  # rounds depend on time: it may have come through
            lossy_local_runs.check(found, 2)


@local
@POLICIES
@pytest.mark.parametrize("kind", LOCAL)
@pytest.mark.parametrize("step", [0, 2, 5, 6, 7, 12])
def test_a_reader_dies_between_two_rounds(step: int, kind: str, policy: str) -> None:
    """What it has trained since is left as gaps, some of them just before the end of the stream."""

    def act(member: str, steps: int) -> None:
        if (member, steps) == ("m0", step):
            raise DiedError

    for size in (3, 2):  # one is left alone, and trains the gaps without rounds
        found, _ = lossy_local_runs.train(size, [], act=act, policy=policy, epochs=2, stream=LOCAL[kind])
        lossy_local_runs.check(found, 2)


@local
@POLICIES
@pytest.mark.parametrize("kind", LOCAL)
def test_reader_after_reader_of_a_local_policy_is_lost(kind: str, policy: str) -> None:
    begun, _ = begin_and_end(3, policy, kind)
    first = Loss("m0", begun + 3)
    for place in (0, 3, 6, 9, 12, 15, 20):
        losses = [first, Loss("m1", place, 1)]
        found, _ = lossy_local_runs.train(3, losses, policy=policy, epochs=2, stream=LOCAL[kind])
        assert "m2" in found
        lossy_local_runs.check(found, 2)


@local
@POLICIES
@pytest.mark.parametrize("kind", LOCAL)
def test_a_newcomer_joins_a_local_policy(kind: str, policy: str) -> None:
    begun, end = begin_and_end(2, policy, kind)
    for place in range(begun, end - 6, 5):
        found, _ = lossy_local_runs.train(
            2, [], joins=[Join("new", place)], policy=policy, epochs=2, stream=LOCAL[kind]
        )
        lossy_local_runs.check(found, 2)
        assert all(state.samples == 2 * SAMPLES for state, _ in found.values())
