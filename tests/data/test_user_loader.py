"""The user's own pipeline is what it is in a DataLoader: the same batches, on one rank or several; or a refusal."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from tests.data.pipelines import LENGTHS, SAMPLES, Net, assert_same_params, loss_of, pad, plain_loop, sgd
from tests.ranks import Silent, ThreadGroup, on_threads
from uneven import Ddp, InputError, TensorData, fit
from uneven.api.loop import Loop
from uneven.config import Loading, RunConfig, Task, resolve
from uneven.data.epoch_order import DrawnOrder, make_axis, make_order
from uneven.data.feed import make_feed
from uneven.data.sample_order import permutation, prove_exactly_once
from uneven.data.user_loader import take_apart
from uneven.hardware.device import parse_devices
from uneven.launch.training import collect
from uneven.policy.axis import part_of
from uneven.policy.exact import Fixed
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.worker import Worker

CPU = torch.device("cpu")
QUIET = {"devices": "cpu", "progress": "off"}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


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
        return Worker(task, config, RankInfo(group.rank, devices), lambda _: group, threading.Event(), Silent()).train()

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


def test_a_sampler_without_a_generator_draws_alike_on_every_rank_and_anew_in_every_epoch() -> None:
    sampler = WeightedRandomSampler([1.0] * 53, 30)
    before = torch.get_rng_state(), random.getstate()
    first, second = (DrawnOrder(Loading(sampler=sampler), 53, seed=3) for _ in range(2))
    torch.rand(7)
    for epoch in (0, 1, 5, 0):  # an epoch that was passed long ago is drawn again
        assert np.array_equal(first.indices(epoch), second.indices(epoch))
    assert not np.array_equal(first.indices(0), first.indices(1))
    assert first.fingerprint(2) == second.fingerprint(2)
    assert DrawnOrder(Loading(sampler=sampler), 53, seed=4).fingerprint(2) != first.fingerprint(2)
    torch.set_rng_state(before[0])
    assert random.getstate() == before[1]


class Entropy(Sampler[int]):
    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(50).tolist())


def test_ranks_whose_samplers_draw_differently_are_told_apart() -> None:
    prints = {DrawnOrder(Loading(sampler=Entropy()), 50, seed=0).fingerprint(1) for _ in range(2)}
    assert len(prints) == 2


class Varying(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 + self.epoch))


def test_drop_last_shortens_the_axis_and_the_schedule() -> None:
    def axis(ranks: int = 1, **settings: Any) -> Any:
        config = RunConfig(batch_size=8, epochs=3, drop_last=True, **settings)
        return make_axis(make_order(Task(Net, sgd, loss_of, SAMPLES), config), config, ranks)

    assert (axis().samples, axis().slots_per_epoch, axis().total, axis().schedule_length) == (48, 6, 18, 18)
    assert (axis(2).samples, axis(2, policy="async").samples, axis(accumulate=3).samples) == (48, 48, 48)
    assert {slot.samples for slot in axis(2).slots()} == {16}
    with pytest.raises(InputError, match="drop_last=True leaves nothing to train: an epoch has 53 samples and a step"):
        axis(global_batch_size=54)


class Sharded(BatchSampler):
    num_processes, process_index = 2, 0


def apart(loader: Any = None, loading: Loading = Loading(), **settings: Any) -> Any:  # noqa: B008
    return take_apart(SAMPLES if loader is None else loader, loading, settings)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two batch sizes": (
        lambda: apart(DataLoader(SAMPLES, batch_size=8), batch_size=16),
        "batch_size=16 and DataLoader",
    ),
    "two workers": (lambda: apart(DataLoader(SAMPLES, num_workers=1), num_workers=2), "num_workers=2 and DataLoader"),
    "two orders": (lambda: apart(DataLoader(SAMPLES), shuffle=True), r"shuffle=True and DataLoader\(shuffle=False\)"),
    "two collates": (
        lambda: apart(DataLoader(SAMPLES, collate_fn=pad), Loading(collate_fn=list)),
        "beside a DataLoader that has its own collate_fn",
    ),
    "a sampler beside a loader": (
        lambda: apart(DataLoader(SAMPLES), Loading(sampler=[1])),
        "give it to the DataLoader",
    ),
    "two samplers": (lambda: apart(None, Loading(sampler=[1], batch_sampler=[[1]])), "leave one out"),
    "a shuffled sampler": (lambda: apart(None, Loading(sampler=[1]), shuffle=True), "the sampler decides the order"),
    "distributed": (
        lambda: apart(DataLoader(SAMPLES, sampler=DistributedSampler(SAMPLES, num_replicas=2, rank=0))),
        "DistributedSampler divides the samples over ranks, and uneven does that itself",
    ),
    "distributed batches": (
        lambda: apart(DataLoader(SAMPLES, batch_sampler=Sharded(SequentialSampler(SAMPLES), 8, False))),
        "Sharded divides the samples over ranks",
    ),
    "no batches": (lambda: apart(DataLoader(SAMPLES, batch_size=None)), "the data set makes whole batches"),
    "a context": (
        lambda: apart(DataLoader(SAMPLES, num_workers=1, multiprocessing_context="spawn")),
        "uneven starts loader processes itself",
    ),
    "out of order": (lambda: apart(DataLoader(SAMPLES, in_order=False)), "in_order=False"),
    "batches and a size": (
        lambda: apart(None, Loading(batch_sampler=[[1]]), batch_size=4),
        "batch_size=4 with batch_s",
    ),
    "batches and accumulate": (
        lambda: apart(None, Loading(batch_sampler=[[1]]), accumulate=2),
        "accumulate=2 with bat",
    ),
    "an empty batch": (lambda: apart(None, Loading(batch_sampler=[[1], []])), "gave an empty batch"),
    "no samples": (lambda: DrawnOrder(Loading(sampler=[]), 5, 0), "draws no sample"),
    "no collate": (lambda: apart(None, Loading(collate_fn=3)), "collate_fn=3 must be a function"),  # type: ignore[arg-type]
    "no sampler": (lambda: apart(None, Loading(sampler=3)), "sampler=3 must be iterable"),  # type: ignore[arg-type]
    "names": (lambda: DrawnOrder(Loading(sampler=["a"]), 5, 0), "gave 'a': positions"),  # type: ignore[list-item]
    "too far": (lambda: DrawnOrder(Loading(sampler=[4, 5]), 5, 0), "gave 5, and the data set has 5 samples"),
    "negative": (lambda: DrawnOrder(Loading(sampler=[-1]), 5, 0), "gave -1, and the data set"),
    "other epochs": (lambda: DrawnOrder(Loading(sampler=Varying()), 50, 0).indices(1), "drew 11 in epoch 1 and 10"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_in_one_line(case: str) -> None:
    act, words = REFUSED[case]
    with pytest.raises(InputError, match=words) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_equal_values_and_the_command_line_are_no_conflict() -> None:
    assert apart(DataLoader(SAMPLES, batch_size=8), batch_size=8, num_workers=3).settings["num_workers"] == 3
    loader = DataLoader(SAMPLES, batch_size=8, drop_last=True, shuffle=True, collate_fn=pad)
    dataset, loading, settings = apart(loader)
    assert dataset is SAMPLES
    assert loading.collate_fn is pad
    assert loading.sampler is None
    assert settings == {"batch_size": 8, "drop_last": True, "shuffle": True}
    assert resolve({**settings, "epochs": 1}, {"batch_size": 16}).batch_size == 16


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (SAMPLES, {}, r"^dataset: samples of different shapes: pass collate_fn=, .* equal size"),
        ([object()] * 9, {}, "^dataset: samples that cannot be stacked: pass collate_fn="),
        (
            SAMPLES,
            {"collate_fn": lambda samples: samples[99]},
            "^collate_fn failed on 4 samples of dataset with IndexErr",
        ),
        (
            SAMPLES,
            {"collate_fn": pad, "evaluate": ([1, "a"], loss_of)},
            "^collate_fn failed on 2 samples of the test set",
        ),
        (SAMPLES, {"collate_fn": pad, "evaluate": (DataLoader(SAMPLES, collate_fn=pad), loss_of)}, None),
        (
            SAMPLES,
            {"collate_fn": pad, "evaluate": (DataLoader(SAMPLES, 9), loss_of)},
            "^the test set: samples of different",
        ),
        (
            TensorData(torch.zeros(8), transform=lambda rows, _: rows),
            {"collate_fn": default_collate},
            "the transform makes the batch; leave one out",
        ),
    ],
)
def test_samples_that_make_no_batch_are_refused_before_a_rank_starts(
    dataset: Any, options: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception): ...

    def start(*_: Any, **__: Any) -> None:
        raise StartedError

    monkeypatch.setattr("uneven.launch.run.Run", start)
    train = {"model": Net, "optimizer": sgd, "step": loss_of, "batch_size": 4, "epochs": 1, "devices": "cpu,cpu"}
    with pytest.raises(StartedError if words is None else InputError, match=words) as caught:
        fit(dataset=dataset, progress="off", **train, **options)
    assert "\n" not in str(caught.value)


def test_a_data_set_that_fails_is_named_with_the_sample() -> None:
    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise KeyError("no such\nfile")

    with pytest.raises(InputError, match=r"^dataset\[\d\] failed with KeyError: 'no such"):
        fit(model=Net, optimizer=sgd, step=loss_of, dataset=Broken(), batch_size=2, epochs=1, **QUIET)


def count(model: Any, batch: Any) -> tuple[dict[str, Any], int]:
    return {"seen": batch["y"].new_ones(len(batch["y"])).sum(), "lengths": batch["lengths"].sum()}, 1


@pytest.mark.parametrize(
    ("test_set", "seen", "batches"),
    [
        (SAMPLES[:10], 10, 2),  # read with the collate_fn and batch_size of fit
        (DataLoader(SAMPLES[:10], batch_size=4, collate_fn=pad), 10, 3),
        (DataLoader(SAMPLES[:10], batch_size=4, collate_fn=pad, drop_last=True, shuffle=True), 8, 2),
        (DataLoader(SAMPLES, batch_size=4, collate_fn=pad, sampler=SubsetRandomSampler([1, 5, 9])), 3, 1),
        (DataLoader(SAMPLES, collate_fn=pad, batch_sampler=[[0, 1, 2], [3, 4]]), 5, 2),
    ],
)
def test_the_test_set_may_be_a_loader(test_set: Any, seen: int, batches: int) -> None:
    train = DataLoader(SAMPLES, batch_size=8, collate_fn=pad)
    given = {"collate_fn": pad, "evaluate": (test_set, count)}
    state = fit(model=Net, optimizer=sgd, step=loss_of, dataset=train, epochs=1, **given, **QUIET)
    assert state.history[0]["seen"] * batches == pytest.approx(seen)  # count() counts batches


def test_a_loaders_collate_is_its_own() -> None:
    """A training loader's may mix samples up; the test set, loader or not, is not read with it."""

    def mixed(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {**pad(samples), "y": torch.zeros(len(samples), dtype=torch.int64)}

    def right(_: Any, batch: Any) -> tuple[dict[str, Any], int]:
        return {"ones": batch["y"].sum()}, len(batch["y"])

    train = DataLoader(SAMPLES, batch_size=8, collate_fn=mixed)
    same = [({**pad([sample]), "y": torch.tensor([1])}) for sample in SAMPLES[:1] * 4]
    rows = [{name: value[0] for name, value in row.items()} for row in same]
    for test_set in (rows, DataLoader(rows, batch_size=2)):
        state = fit(
            model=Net, optimizer=sgd, step=loss_of, dataset=train, evaluate=(test_set, right), epochs=1, **QUIET
        )
        assert state.history[0]["ones"] == 1.0


def test_tensors_are_read_whole_also_in_an_order_of_the_users() -> None:
    x = torch.arange(12.0).double()[:, None]
    seen: list[list[float]] = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        seen.append(batch[0].flatten().tolist())
        return model(batch[0]).mean()

    def order(**given: Any) -> list[list[float]]:
        seen.clear()
        fit(model=lambda: torch.nn.Linear(1, 1).double(), optimizer=sgd, step=step, epochs=1, **given, **QUIET)
        return list(seen)

    assert order(dataset=TensorDataset(x), shuffle=False, batch_size=5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert order(dataset=DataLoader(TensorDataset(x), batch_size=5, drop_last=True)) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert order(dataset=TensorDataset(x), sampler=[3, 3, 1], batch_size=2) == [[3, 3], [1]]
    assert order(dataset=TensorDataset(x), batch_sampler=[[7], [1, 2]]) == [[7], [1, 2]]


def test_rows_stay_with_their_rank_where_shares_and_order_are_fixed() -> None:
    """Sample t * 8 + k is piece t of text k: each rank sees every piece of its texts, in order."""
    texts: list[list[int]] = []
    for policy, shares in (("sync", None), ("balanced", (5, 3))):
        config = resolve({"batch_size": 4, "epochs": 1, "policy": policy, "shares": shares, "shuffle": False})
        task = Task(Net, sgd, loss_of, list(range(48)))
        fixed = Fixed.even(2) if shares is None else Fixed(shares)
        axis = make_axis(make_order(task, config), config, 2)
        for rank in (0, 1):
            feed = make_feed(task.dataset, CPU, 0, 4, order=make_order(task, config))
            parts = [part_of(slot, fixed.shares(slot.index, 8), rank, 8) for slot in axis.slots()]
            rows = torch.stack([batch for _, micros in feed.stream(parts) for batch, _ in micros])
            assert torch.equal(rows[1:], rows[:-1] + 8)
            texts.append((rows[0] % 8).tolist())
    assert texts == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_test_loaders_processes_may_live_on(is_kept: bool) -> None:
    class Whose(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return os.getpid()

    feed = make_feed(Whose(), CPU, 0, 2, 1, loading=Loading(persistent_workers=is_kept))
    first, second = ({int(pid) for batch, _ in feed.in_order() for pid in batch} for _ in range(2))
    assert (first == second) == is_kept
    assert os.getpid() not in first
    assert len(list(feed.in_order(1, 2))) == 1


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(2)
        self.first = nn.Parameter(torch.randn(4, generator=own).double())
        self.again = nn.Parameter(torch.randn(4, 4, generator=own).double() * 0.3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, None] * self.first + state @ self.again)


def test_a_state_carried_from_batch_to_batch_is_that_of_one_device_with_fixed_shares() -> None:
    """Eight texts of six pieces: sample t * 8 + k is piece t of text k."""
    pieces = torch.randn(48, generator=seeded()).double()
    plain = Recurrent()
    optimizer, state = sgd(plain.parameters()), torch.zeros(8, 4).double()
    for x in pieces.split(8):
        state = plain(x, state.detach())
        optimizer.zero_grad()
        (state.sum(1) - 1).square().mean().backward()
        optimizer.step()

    config = resolve(
        {"batch_size": 4, "epochs": 1, "shares": (5, 3), "shuffle": False, "drop_last": True, "policy": "balanced"}
    )
    devices = parse_devices(["cpu", "cpu"])

    def rank(group: ThreadGroup) -> dict[str, torch.Tensor]:
        def make_worker(task: Task) -> Worker:
            info = RankInfo(group.rank, devices)
            return Worker(task, config, info, lambda _: group, threading.Event(), Silent(), is_own_loop=True)

        def save(worker: Worker, was_interrupted: bool) -> Any:
            return collect(worker.group, worker.result(), worker.axis)

        model = Recurrent()
        task = Task(lambda: model, sgd, lambda *_: None, TensorData(pieces))
        ddp = Loop(task, make_worker, save, lambda: None)
        state = torch.zeros((5, 3)[group.rank], 4).double()
        for x in ddp.batches(0):
            state = ddp(x, state.detach())
            ddp.step((state.sum(1) - 1).square().mean())
        return ddp.finish().params

    for params in on_threads(2, rank):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(params[name], param.detach(), rtol=1e-12, atol=1e-12)


def test_an_own_loop_in_order_says_where_rows_move(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be seen in the user's loop is said: its next error here is that two devices need two processes."""

    def said(**settings: Any) -> bool:
        given = {"batch_size": 4, "epochs": 1, "devices": "cpu,cpu", "progress": "lines", **settings}
        with pytest.raises(InputError, match="one process each"):
            Ddp.setup(Net(), sgd, dataset=SAMPLES, collate_fn=pad, **given)
        return "rows move between devices" in capsys.readouterr().err

    assert [said(shuffle=False), said(shuffle=False, policy="async")] == [True, True]
    assert [said(), said(shuffle=False, shares=(1, 1)), said(shuffle=False, policy="sync")] == [False, False, False]
