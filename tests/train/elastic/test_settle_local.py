"""Local policies when ranks are lost: every slot once in the lineage, replicas equal, and params that say the same.

On threads, with real workers. Each sample has a coordinate of the params, which grows with every step that trains it: a
ledger that lies is found out by a count in the params themselves.
"""

from collections.abc import Callable, Iterable

import pytest
import torch

from tests.train.clusters import Begun, DiedError, FakeMembership, Join, Loss, LossyGroup, flat, on_lossy_threads
from tests.train.elastic.lossy_local_runs import SAMPLES, check, train, undisturbed
from tests.train.elastic.lossy_sharded_runs import Deep
from tests.train.exact_runs import X, Y, make_muon, mean_loss
from uneven.config import Task, resolve
from uneven.data.tensors import TensorData
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

pytestmark = pytest.mark.usefixtures("equal_speeds")


def kill(victim: str, at: int) -> Callable[[str, int], None]:
    def act(member: str, steps: int) -> None:
        if (member, steps) == (victim, at):
            raise DiedError

    return act


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_undisturbed_the_params_tell_what_the_log_says(policy: str) -> None:
    undisturbed(3, policy, 3)
    undisturbed(3, policy, 3, is_evaluated=False)


def losses_in_sums(policy: str, blind: tuple[str, ...], places: Iterable[int]) -> None:
    begun, _ = undisturbed(3, policy, 3)
    for place in places:
        loss = Loss("m1", begun + place, after=bool(blind), blind=frozenset(blind))
        found, after = train(3, [loss], policy=policy, is_evaluated=True)
        check(found, is_evaluated=True)
        assert set(found) == {"m0", "m2"}
        assert len(after.generations) == 2


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_dies_with_a_sum_that_another_does_not_get(policy: str) -> None:
    """Sums of rows and of params in turn, then those of an evaluation."""
    losses_in_sums(policy, ("m2",), (0, 1, 3, 5, 7))


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("blind", [(), ("m0",), ("m2",), ("m0", "m2")])
def test_a_rank_dies_in_any_sum(policy: str, blind: tuple[str, ...]) -> None:
    losses_in_sums(policy, blind, range(30))


@pytest.mark.parametrize("place", [0, 5, 8])
def test_another_dies_while_the_rest_settle(place: int) -> None:
    """The first with a sum of params that m3 does not get; the second in an exchange that m2 does not get."""
    begun, _ = undisturbed(4, "async", 2, is_evaluated=False)
    first = Loss("m1", begun + 3, after=True, blind=frozenset({"m3"}))
    second = Loss("m0", place, generation=1, after=True, blind=frozenset({"m2"}))
    found, after = train(4, [first, second], policy="async", epochs=2)
    check(found, epochs=2)
    assert set(found) == {"m2", "m3"}
    assert len(after.generations) == 3


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_dies_between_sums_and_one_is_left_alone(policy: str) -> None:
    found, _ = train(2, [], act=kill("m0", 7), policy=policy, is_evaluated=True, epochs=2)
    check(found, epochs=2, is_evaluated=True)  # on a busy machine the rank may have fewer steps, and live
    found, _ = train(3, [], act=kill("m2", 3), act_on_record=kill("m0", 2), policy=policy, epochs=2)
    check(found, epochs=2)
    for _, worker in found.values():
        _, *later = worker.engine.state.segments  # of generations in which ranks have settled: not necessarily all
        assert all({"members", "rolled", "again_samples"} <= one.keys() for one in later)
        numbers = [one["generation"] for one in later]
        assert numbers == sorted(set(numbers))


def test_everybody_dies_but_one_whose_last_round_was_in_flight() -> None:
    """Everything is trained, and the round at the end came to nothing: its events are still reached."""
    _, collectives = undisturbed(2, "cadence", 1)
    for place in (12, 10, 8, 5, 1):
        found, _ = train(2, [Loss("m1", collectives - place)], policy="cadence", is_evaluated=True, epochs=1)
        check(found, epochs=1, is_evaluated=True)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_newcomer_joins(policy: str) -> None:
    begun, collectives = undisturbed(2, policy, 2)
    for place in (begun, begun + 3, (begun + collectives) // 2):
        found, after = train(2, [], joins=[Join("new", place)], policy=policy, is_evaluated=True, epochs=2)
        check(found, epochs=2, is_evaluated=True)
        assert set(found) == {"m0", "m1", "new"}
        assert len(after.generations) == 2


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_newcomer_joins_one_that_was_left_alone(policy: str) -> None:
    begun, _ = undisturbed(2, policy, 2)
    join = Join("new", 4, 1)
    found, after = train(2, [Loss("m1", begun + 3)], joins=[join], policy=policy, is_evaluated=True, epochs=2)
    assert set(found) == {"m0", "new"}
    assert len(after.generations) == 3
    for state, worker in found.values():
        assert state.samples == 2 * SAMPLES
        for name, tensor in worker.engine.model.state_dict().items():
            assert torch.equal(tensor, found["m0"][1].engine.model.state_dict()[name]), name


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_muon_is_whole_on_every_rank(policy: str) -> None:
    """Nothing of it is divided, so nobody goes back."""
    settings = {"batch_size": 4, "epochs": 2, "seed": 3, "anchor": 2, "max_anchor": 2, "lr_scale": 1.0}
    config = resolve({**settings, "policy": policy})
    task = Task(Deep, make_muon, mean_loss, TensorData(X.double(), Y))

    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> TrainedState:
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.use_membership(membership)
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis))

    _, plain = on_lossy_threads(3, [], rank)
    loss = Loss("m1", (plain.begun + plain.collectives[0]) // 2, after=True, blind=frozenset({"m2"}))
    found, _ = on_lossy_threads(3, [loss], rank)
    assert {*found} == {"m0", "m2"}
    assert torch.equal(flat(found["m0"].params), flat(found["m2"].params))
    assert found["m0"].samples == 2 * len(Y)
