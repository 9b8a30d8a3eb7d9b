"""Streams that are refused before ranks start, and one run on rank processes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, default_collate

from uneven import Ddp, InputError, fit
from uneven.config import Evaluation, Loading, Task, resolve
from uneven.data.reader import Extent, Reader, unpack
from uneven.data.stream import OnePass, OwnRandom
from uneven.launch.checks.settings import check_streams


class Numbers(IterableDataset[Any]):
    """y = 3 x, without a length."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(150):
            x = torch.tensor([number / 75 - 1])
            yield x, 3 * x


class Counted(Numbers):
    def __len__(self) -> int:
        return 150


class Empty(Numbers):
    def __len__(self) -> int:
        return 0


class Shards:
    shard_sizes = (3, 4)

    def open(self, shard: int, start: int) -> Iterator[Any]: ...


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def task(dataset: Any, scheduler: Any = None, test_set: Any = None) -> Task:
    evaluation = None if test_set is None else Evaluation(test_set, lambda *_: ({}, 0))
    return Task(lambda: nn.Linear(1, 1), torch.optim.SGD, step, dataset, scheduler, evaluation)


def with_length(optimizer: Any, total: int) -> Any:
    return StepLR(optimizer, total)


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        (task(Numbers()), {"num_workers": 2}, "num_workers=2: Numbers can only be read in order"),
        (task(Numbers()), {"compile": "graph"}, "compile='graph' with dataset Numbers"),
        (task(Numbers()), {"activations": "auto"}, "activations='auto' with dataset Numbers"),
        (task(Counted()), {"sync_batchnorm": True}, "sync_batchnorm=True with dataset Counted"),
        (task(Numbers(), with_length), {}, "scheduler takes the number of steps, and dataset Numbers has no length"),
        (task(Numbers()), {"replay": "runs/one"}, "replay='runs/one': dataset Numbers has no length"),
        (task([1], test_set=Counted()), {}, r"evaluate: Counted can only be read in order.*list\(test_set\)"),
        (task(Empty()), {}, "dataset is empty"),
        (task(Numbers()), {"drop_last": True}, "drop_last=True: dataset Numbers has no length"),
        (replace(task(Shards()), loading=Loading(sampler=[1])), {}, "sampler= with dataset Shards"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(given: Task, settings: dict[str, Any], words: str) -> None:
    config = resolve({"batch_size": 2, "epochs": 1, **settings})
    with pytest.raises(InputError, match=words):
        check_streams(given, config, 2, is_one_machine=True)


def test_what_a_stream_can_do_passes() -> None:
    config = resolve({"batch_size": 2, "epochs": 1, "num_workers": 3, "compile": "graph"})
    check_streams(task(Shards(), with_length, Shards()), config, 2, is_one_machine=False)
    config = resolve({"batch_size": 2, "epochs": 1, "num_workers": 1})
    check_streams(task(Counted(), with_length), config, 2, is_one_machine=True)
    with pytest.raises(InputError, match="by one reader on one machine"):
        check_streams(task(Counted()), config, 2, is_one_machine=False)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_rank_processes_train_on_a_stream_without_length(num_workers: int) -> None:
    state = fit(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=step,
        dataset=Numbers(),
        batch_size=8,
        epochs=2,
        num_workers=num_workers,
        policy="async",
        devices="cpu,cpu@0.4",
        progress="off",
    )
    assert state.finished
    assert [entry["samples"] for entry in state.history] == [150, 300]
    assert (state.samples, state.dataset_samples) == (300, 150)
    assert sum(samples for log in state.log for _, _, samples in log) == 300


def test_a_loop_of_ones_own_takes_its_batches_from_a_stream_in_a_loader() -> None:
    seen = []
    loader = DataLoader(Numbers(), batch_size=40, collate_fn=lambda samples: default_collate(samples[::-1]))
    with Ddp.setup(nn.Linear(1, 1), torch.optim.SGD, dataset=loader, epochs=2, devices="cpu", progress="off") as ddp:
        for epoch in range(ddp.epochs):
            for batch in ddp.batches(epoch):
                seen.append([len(batch[0]), round(75 * (batch[0][-1].item() + 1))])
                ddp.step(step(ddp, batch))
    assert seen == 2 * [[40, 0], [40, 40], [40, 80], [30, 120]]


class Random(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(40):
            yield random.random(), float(np.random.rand()), torch.rand(2)


def test_random_samples_are_the_same_wherever_they_are_read_apart_from_training() -> None:
    """One device reads between its steps, a loader process in pickled chunks; both are seeded by (seed, epoch)."""
    one_pass = OnePass(Random(), seed=5, epoch=1)
    before = torch.get_rng_state()
    reader = Reader(one_pass.read_seeded, Extent(2), around=OwnRandom().used)
    reader.take(0, 0, 40)
    here = [*reader.take(1, 0, 13), *reader.take(1, 13, 40)]
    assert torch.equal(before, torch.get_rng_state()), "reading moved the generators of the training"
    state = random.getstate(), np.random.get_state()
    sent = cloudpickle.loads(cloudpickle.dumps(one_pass))
    there = [sample for chunk in sent for sample in unpack(chunk)]
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(before)
    assert [sample[:2] for sample in here] == [sample[:2] for sample in there]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(here, there, strict=True))
