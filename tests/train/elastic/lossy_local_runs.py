"""Runs of local policies on threads in which ranks are lost, leave and join."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.train.clusters import Begun, FakeMembership, Join, Loss, LossyGroup, on_lossy_threads
from uneven.config import Evaluation, Task, resolve
from uneven.data.sample_order import permutation
from uneven.data.tensors import TensorData
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

SAMPLES, SEED = 70, 3


Found = dict[str, tuple[TrainedState, Worker]]


class Numbers(IterableDataset[Any]):
    """The samples as a stream, in order. `read` has what was read of it, in any process of threads."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in range(SAMPLES):
            self.read.append(number)
            yield torch.tensor(number), torch.tensor(0.0)


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return SAMPLES


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
    stream: Callable[[], Numbers] | None = None,
    **changes: Any,
) -> tuple[Found, Any]:
    """`act(member, steps)` is called before every step, `act_on_record` before a member writes down a round.

    `leaves`: members that are asked to leave in this step of theirs. `stream` makes the data set of one member.
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

        dataset = data if stream is None else stream()
        task = Task(Count, lambda params: torch.optim.SGD(params, lr=1.0), step, dataset, None, evaluation)
        task = replace(task, callbacks=callbacks())
        worker = Worker(task, config, info, lambda _: group, Requests(), Begun(group))
        worker.use_membership(membership)
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
        ends = [entry for entry in state.history if entry["step"] % -(-SAMPLES // axis.slot_size) == 0]
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
    run, engine = workers[0].engine.state, workers[0].engine
    logs = [(one.engine.state.log, one.engine.state.rounds) for one in workers]
    logs += [(log["log"], log["rounds"]) for log in (*run.earlier_logs, *run.lost_logs)]
    most = len(workers[0].engine.state.rounds)
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
            _add(expected, engine, parts[start:stop], own / weights[number] if weights[number] else 0.0)
        _add(expected, engine, parts[rounds[-1] :], 1.0)  # alone at last
    return expected


def _add(expected: Tensor, engine: Engine, parts: Sequence[tuple[int, int, int]], share: float) -> None:
    for slot, first, samples in parts:
        order = torch.arange(SAMPLES)
        if engine.reader is None:
            order = torch.from_numpy(permutation(SEED, engine.axis.slot(slot).epoch, SAMPLES))
        expected[order[first : first + samples]] += share


@cache
def undisturbed(size: int, policy: str, epochs: int, is_evaluated: bool = True) -> tuple[int, int]:
    """Its collectives before the first step, and in all."""
    found, leader = train(size, [], policy=policy, is_evaluated=is_evaluated, epochs=epochs)
    check(found, epochs, is_evaluated=is_evaluated)
    assert len(leader.generations) == 1
    return leader.begun, leader.collectives[0]
