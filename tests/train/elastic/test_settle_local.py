"""Local policies when ranks are lost: every slot once in the lineage, replicas equal, and params that say the same.

On threads, with real workers. Each sample has a coordinate of the params, which grows with every step that trains it: a
ledger that lies is found out by a count in the params themselves.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.clusters import Begun, DiedError, FakeMembership, Join, Loss, LossyGroup, on_lossy_threads
from uneven.config import Evaluation, Task, resolve
from uneven.data.sample_order import permutation
from uneven.data.tensors import TensorData
from uneven.launch.requests import Requests
from uneven.launch.training import collect
from uneven.policy.finish import Cost
from uneven.results.state import TrainedState
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

SAMPLES, SEED = 70, 3
Found = dict[str, tuple[TrainedState, Worker]]


class Count(nn.Module):
    """Each step adds 1 to the coordinates of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(2, dtype=torch.float64))


def count_step(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, Count)
    model.seen += 1
    model.level += 1.0
    grown = model.w[batch[0]]
    return batch[0].double().mean() - (grown - grown.detach()).sum()  # the loss is the mean of the samples' numbers


def level(model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    return {"level": model.w.sum() * len(batch[1])}, len(batch[1])  # type: ignore[union-attr, operator]


def train(
    size: int,
    losses: Sequence[Loss],
    *,
    act: Callable[[str, int], None] = lambda *_: None,
    act_on_record: Callable[[str, int], None] = lambda *_: None,
    is_evaluated: bool = False,
    joins: Sequence[Join] = (),
    failing: Sequence[str] = (),
    leaves: Mapping[str, int] = MappingProxyType({}),
    callbacks: Callable[[], tuple[Any, ...]] = tuple,
    **changes: Any,
) -> tuple[Found, Any]:
    """`act(member, steps)` is called before every step, `act_on_record` before a member writes down a round.

    `leaves`: members that are asked to leave in this step of theirs.
    """
    settings = {"batch_size": 4, "epochs": 3, "seed": SEED, "anchor": 2, "max_anchor": 2, "lr_scale": 1.0} | changes
    config = resolve(settings)
    data = TensorData(torch.arange(SAMPLES), torch.zeros(SAMPLES))
    evaluation = Evaluation(data, level, every=1) if is_evaluated else None

    def rank(info: RankInfo, group: LossyGroup, membership: FakeMembership) -> tuple[TrainedState, Worker]:
        steps, records = itertools.count(), itertools.count()
        is_training = False

        def step(model: nn.Module, batch: Any) -> Tensor:
            if is_training:
                act(str(info.member), number := next(steps))
                membership.is_asked |= leaves.get(str(info.member)) == number
            return count_step(model, batch)

        task = Task(Count, lambda params: torch.optim.SGD(params, lr=1.0), step, data, None, evaluation)
        task = replace(task, callbacks=callbacks())
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.membership = membership
        prepare = worker.prepare_for_losses

        def prepared() -> None:
            nonlocal is_training
            prepare()
            is_training = True
            assert info.records is not None
            write = info.records.write

            def watched(*arguments: Any) -> None:
                act_on_record(str(info.member), next(records))
                write(*arguments)

            info.records.write = watched  # type: ignore[method-assign]

        worker.prepare_for_losses = prepared  # type: ignore[method-assign]
        result = worker.train()
        return worker.finish(lambda: collect(worker.group, result, worker.axis)), worker

    return on_lossy_threads(size, losses, rank, joins, failing)


@pytest.fixture(autouse=True)
def equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank may look so slow that there are too few rounds."""
    monkeypatch.setattr("uneven.train.worker.measure", lambda _: Cost(0.0, 1.0))


def check(found: Found, epochs: int = 3, *, is_evaluated: bool = False) -> None:
    """`collect` has proven that each sample is in the logs once an epoch. Where all meet at its end, losses are its."""
    workers = [worker for _, worker in found.values()]
    expected = recount(workers)
    first, axis = workers[0].engine.model, workers[0].axis
    first_state, _ = next(iter(found.values()))
    for state, worker in found.values():
        model = worker.engine.model
        torch.testing.assert_close(model.w.detach(), expected, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, first.state_dict()[name]), name
        ends = [entry for entry in state.history if entry["step"] % axis.slots_per_epoch == 0]
        assert [entry["epoch"] for entry in ends] == list(range(1, epochs + 1)), "every epoch once"
        assert [entry["samples"] for entry in ends] == [SAMPLES * (1 + epoch) for epoch in range(epochs)]
        for entry, same in zip(state.history, first_state.history, strict=True):
            assert (entry["step"], str(entry["train_loss"])) == (same["step"], str(same["train_loss"]))
        if is_evaluated and len(ends) == len(state.history):
            assert [entry["train_loss"] for entry in ends] == pytest.approx([(SAMPLES - 1) / 2] * epochs, rel=1e-12)
        assert state.finished
        assert state.samples == epochs * SAMPLES


def recount(workers: list[Worker]) -> Tensor:
    """From the logs alone: what each sample's coordinate must be, by the weights of the round that it was in."""
    axis = workers[0].axis
    run = workers[0].run
    logs = [(one.engine.log, one.engine.rounds) for one in workers]
    logs += [(log["log"], log["rounds"]) for log in (*run.earlier_logs, *run.lost_logs)]
    most = len(workers[0].engine.rounds)
    # A newcomer's rounds, all of which are among the last, begin with one that tells where it joined.
    handed = [(0 if one[0][0] == 0 else most - len(one), parts, [row[1] for row in one]) for parts, one in logs]
    weights: Counter[int] = Counter()
    for first, parts, rounds in handed:
        for number, (start, stop) in enumerate(itertools.pairwise(rounds), first):
            weights[number] += sum(samples for _, _, samples in parts[start:stop])
    expected = torch.zeros(SAMPLES, dtype=torch.float64)
    for first, parts, rounds in handed:
        for number, (start, stop) in enumerate(itertools.pairwise(rounds), first):
            own = sum(samples for _, _, samples in parts[start:stop])
            _add(expected, axis, parts[start:stop], own / weights[number] if weights[number] else 0.0)
        _add(expected, axis, parts[rounds[-1] :], 1.0)  # alone at last
    return expected


def _add(expected: Tensor, axis: Any, parts: Sequence[tuple[int, int, int]], share: float) -> None:
    for slot, first, samples in parts:
        order = torch.from_numpy(permutation(SEED, axis.slot(slot).epoch, SAMPLES))[first : first + samples]
        expected[order] += share


def kill(victim: str, at: int) -> Callable[[str, int], None]:
    def act(member: str, steps: int) -> None:
        if (member, steps) == (victim, at):
            raise DiedError

    return act


@cache
def undisturbed(size: int, policy: str, epochs: int, is_evaluated: bool = True) -> tuple[int, int]:
    """Its collectives before the first step, and in all."""
    found, leader = train(size, [], policy=policy, is_evaluated=is_evaluated, epochs=epochs)
    check(found, epochs, is_evaluated=is_evaluated)
    assert len(leader.generations) == 1
    return leader.begun, leader.collectives[0]


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
        _, *later = worker.run.segments  # of generations in which ranks have settled: not necessarily all
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
