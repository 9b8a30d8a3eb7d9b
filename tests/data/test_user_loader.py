"""The user's own pipeline is what it is in a DataLoader: the same batches, on one rank or several; or a refusal."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.data.pipelines import LENGTHS, QUIET, SAMPLES, Net, assert_same_params, loss_of, pad, plain_loop, seeded, sgd
from tests.ranks import Silent, ThreadGroup, on_threads
from uneven import Ddp, fit
from uneven.config import Loading, Task, resolve
from uneven.data.epoch_order import make_axis, make_order
from uneven.data.sample_order import permutation, prove_exactly_once
from uneven.data.user_loader import take_apart
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker


class ByLength(Sampler[list[int]]):
    """Batches of samples of about the same length, in an order that changes with the epoch; sizes differ."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        cuts = [0, 9, 13, 24, 30, 44, len(order)]
        batches = [order[first:stop] for first, stop in pairwise(cuts)]
        random.Random(self.epoch).shuffle(batches)
        return iter(batches)


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 8},
    "drop_last": lambda: {"batch_size": 8, "drop_last": True},
    "shuffled by a generator": lambda: {"batch_size": 8, "shuffle": True, "generator": seeded()},
    "weighted": lambda: {"batch_size": 8, "sampler": WeightedRandomSampler([1.0, 5.0] * 26, 40, generator=seeded())},
    "subset": lambda: {"batch_size": 8, "sampler": SubsetRandomSampler(range(0, 53, 2), generator=seeded())},
    "a list": lambda: {"batch_size": 8, "sampler": [*range(30, 50), *range(10)]},
    "batch sampler of torch": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(SAMPLES, generator=seeded()), 8, True)
    },
    "batches by length": lambda: {"batch_sampler": ByLength(LENGTHS)},
}


def epochs_of(loader: "DataLoader[Any]", epochs: int) -> Iterator["DataLoader[Any]"]:
    for epoch in range(epochs):
        if isinstance(loader.batch_sampler, ByLength):
            loader.batch_sampler.set_epoch(epoch)
        yield loader


@pytest.mark.parametrize("kind", LOADERS)
def test_fit_with_a_loader_equals_the_plain_loop_over_it(kind: str) -> None:
    loader = DataLoader(SAMPLES, collate_fn=pad, **LOADERS[kind]())
    state = fit(model=Net, optimizer=sgd, step=loss_of, dataset=loader, epochs=2, **QUIET)
    assert_same_params(state.params, plain_loop(epochs_of(loader, 2)))  # and the loader is as it was before
    samples = sum(len(batch["y"]) for epoch in epochs_of(loader, 2) for batch in epoch)
    assert (state.samples, state.history[-1]["samples"]) == (samples, samples)


def test_an_own_loop_with_a_loader_equals_the_plain_loop_over_it() -> None:
    loader = DataLoader(SAMPLES, collate_fn=pad, batch_size=8, shuffle=True, generator=seeded())
    model = Net()
    ddp = Ddp.setup(model, sgd, dataset=loader, epochs=2, **QUIET)
    for epoch in range(ddp.epochs):
        for batch in ddp.batches(epoch):
            ddp.step(loss_of(ddp, batch))
    ddp.finish()
    assert_same_params(dict(model.named_parameters()), plain_loop([loader, loader]))


def test_the_same_pieces_may_be_given_without_a_loader() -> None:
    state = fit(
        model=Net, optimizer=sgd, step=loss_of, dataset=SAMPLES, collate_fn=pad, batch_size=8, epochs=1, **QUIET
    )
    order = permutation(0, 0, len(SAMPLES)).tolist()
    batches = [pad([SAMPLES[index] for index in order[first : first + 8]]) for first in range(0, 53, 8)]
    assert_same_params(state.params, plain_loop([batches]))
    sampler = [*range(20, 40), 3, 3, 3]
    given = {"collate_fn": pad, "batch_size": 8, "sampler": sampler, "drop_last": True}
    built = Ddp.builder(Net, sgd, loss_of).dataset(SAMPLES).collate_fn(pad).sampler(sampler)
    expected = plain_loop([DataLoader(SAMPLES, **given)])
    assert_same_params(built.settings(batch_size=8, drop_last=True, epochs=1, **QUIET).run().join().params, expected)
    assert_same_params(
        fit(model=Net, optimizer=sgd, step=loss_of, dataset=SAMPLES, epochs=1, **given, **QUIET).params, expected
    )


def train_on_threads(size: int, loader: "DataLoader[Any]", **settings: Any) -> list[RankResult]:
    dataset, loading, taken = take_apart(loader, Loading(), {"epochs": 2, **settings})
    task, config = Task(Net, sgd, loss_of, dataset, loading=loading), resolve(taken)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        return Worker(task, config, RankInfo(group.rank, devices), lambda _: group, Requests(), Silent()).train()

    results = on_threads(size, rank)
    axis = make_axis(make_order(task, config), config, size)
    assert prove_exactly_once(axis, [result.log for result in results], axis.total) == axis.total
    return results


@pytest.mark.parametrize("kind", LOADERS)
def test_two_ranks_train_what_one_does(kind: str) -> None:
    """Every draw once, whichever rank trains it; exact policies keep the params."""
    given = LOADERS[kind]()
    loader = DataLoader(SAMPLES, collate_fn=pad, **given)
    expected = plain_loop(epochs_of(DataLoader(SAMPLES, collate_fn=pad, **LOADERS[kind]()), 2))
    whole = {} if isinstance(given.get("batch_sampler"), ByLength) else {"global_batch_size": 8}
    is_measured = kind in ("weighted", "batches by length")  # shares by speed, and claims, take a second each
    for result in train_on_threads(2, loader, shares=None if is_measured else (3, 1), **whole):
        assert_same_params(result.state.params, expected)
    if is_measured:
        train_on_threads(2, loader, policy="async", anchor=2)
