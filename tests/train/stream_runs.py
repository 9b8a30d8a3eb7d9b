"""Streams, and runs on threads that read them."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from uneven.config import Evaluation, Task, resolve
from uneven.data.sample_order import prove_exactly_once
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

SIZES = [30, 0, 33, 7]  # 70 samples: the first ones of X in shard 0, and so on


STARTS = [0, 30, 30, 63]


class Shards:
    """A source that notes what was opened and read, by any rank: threads share it."""

    num_shards = len(SIZES)
    shard_sizes = SIZES

    def __init__(self) -> None:
        self.read: list[int] = []
        self.opened: list[tuple[int, int]] = []

    def open(self, shard: int, start: int) -> Iterator[Any]:
        self.opened.append((shard, start))
        for place in range(STARTS[shard] + start, STARTS[shard] + SIZES[shard]):
            self.read.append(place)
            yield X[place].double(), Y[place]


class Plain(IterableDataset[Any]):
    def __init__(self, samples: int = len(X), shrinks: int = 0) -> None:
        self.samples, self.shrinks = samples, shrinks  # so many samples fewer in every further epoch
        self.read: list[int] = []
        self.threads: set[int] = set()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.samples - self.shrinks * self.epoch):
            self.read.append(place)
            self.threads.add(threading.get_ident())
            yield X[place].double(), Y[place]


class SizedPlain(Plain):
    def __len__(self) -> int:
        return self.samples


def train(
    size: int, dataset: Any, *, evaluation: Evaluation | None = None, scheduler: Any = None, **changes: Any
) -> list[RankResult]:
    """Trained on threads; checked that every sample is trained once in the axis that the ranks agree on."""
    config = resolve({"batch_size": 8, "epochs": 2, "seed": 3, **changes})
    task = Task(partial(Net, torch.float64), OPTIMIZERS["sgd"], mean_loss, dataset, scheduler, evaluation)
    devices = parse_devices(["cpu"] * size)
    workers: dict[int, Worker] = {}

    def rank(group: ThreadGroup) -> RankResult:
        info = RankInfo(group.rank, devices)
        workers[group.rank] = worker = Worker(task, config, info, lambda _: group, Requests(), Silent())
        return worker.train()

    results = on_threads(size, rank)
    for worker in workers.values():
        assert worker.axis.total == workers[0].axis.total
        prove_exactly_once(worker.axis, [result.log for result in results], worker.axis.total)
    for result in results:
        assert result.state.finished
        for name, value in result.state.params.items():
            assert torch.equal(value, results[0].state.params[name])
    return results
