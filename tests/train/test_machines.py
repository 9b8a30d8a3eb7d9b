"""Training on 1 + 2 + 1 ranks of three machines, as threads over real transports, against one process."""

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm.machine_ranks import on_machines
from tests.ranks import Silent
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, assert_exact, mean_loss, params
from tests.train.exact_runs import train as train_on_threads
from tests.train.local_runs import assert_replicas_equal
from uneven.comm.hierarchy import HierarchicalGroup
from uneven.comm.work import Work
from uneven.config import Task, resolve
from uneven.data.sample_order import prove_exactly_once
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.policy.axis import Axis
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

MACHINES = (0, 1, 1, 2)


def checksum(tensors: list[Tensor]) -> int:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), value)
    return value


class Recorded(torch.optim.AdamW):
    """AdamW with a checksum of gradients, clipped as they are, and of params for every step."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, lr=1e-2)
        self.steps: list[tuple[int, int]] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        own = [param for group in self.param_groups for param in group["params"]]
        gradients = checksum([param.grad for param in own if param.grad is not None])
        super().step(closure)
        self.steps.append((gradients, checksum(own)))


def record_sums(group: HierarchicalGroup) -> list[int]:
    """A checksum of every sum that this rank waits for: gradients, the ranks' statistics, what ends an epoch."""
    sums: list[int] = []
    start = group.all_reduce

    def all_reduce(tensor: Tensor) -> Work:
        work = start(tensor)
        wait = work.wait

        def recorded() -> Tensor:
            work.wait = wait  # type: ignore[method-assign]
            result = wait()
            sums.append(checksum([result]))
            return result

        work.wait = recorded  # type: ignore[method-assign]
        return work

    group.all_reduce = all_reduce  # type: ignore[method-assign]
    return sums


def train(make_optimizer: Callable[[Any], torch.optim.Optimizer], **changes: Any) -> tuple[list[RankResult], Any]:
    config = resolve({"batch_size": 4, "epochs": 2, "seed": 3, **changes})
    data = TensorData(X.double(), Y)
    devices = parse_devices(["cpu"] * len(MACHINES))

    def rank(group: HierarchicalGroup) -> tuple[RankResult, Any, list[int]]:
        made = []

        def make(given: Any) -> torch.optim.Optimizer:
            made.append(make_optimizer(given))
            return made[-1]

        sums = record_sums(group)
        task = Task(lambda: Net(torch.float64), make, mean_loss, data)
        info = RankInfo(group.rank, devices)
        result = Worker(task, config, info, lambda _: group, Requests(), Silent()).train()
        return result, made[-1], sums

    found = on_machines(MACHINES, rank)
    results = [result for result, _, _ in found]
    axis = Axis(len(X), config.slot_size(len(MACHINES)), config.epochs)
    prove_exactly_once(axis, [result.log for result in results], axis.total)
    return results, [(optimizer, sums) for _, optimizer, sums in found]


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_balanced_equals_one_process_with_the_same_bits_in_every_step(max_grad_norm: float | None) -> None:
    results, recorded = train(Recorded, max_grad_norm=max_grad_norm)
    (first, sums), *others = recorded
    steps = 2 * -(-len(X) // 16)  # those before were a rank's own, to warm up
    assert len(set(first.steps[-steps:])) == steps < len(sums)
    for optimizer, own in others:
        assert optimizer.steps[-steps:] == first.steps[-steps:]
        assert own == sums
    dense = train_on_threads(1, optimizer="adamw", max_grad_norm=max_grad_norm)[0]
    assert_exact(results, dense, "adamw", torch.float64)


def test_a_strategy_that_shards_equals_one_process() -> None:
    """The others: tests/parallel/test_strategy_machines.py."""
    results, _ = train(OPTIMIZERS["adamw"], strategy="zero2", memory_shares=(2, 1, 3, 0), shares=(1, 3, 0, 4))
    assert_exact(results, train_on_threads(1, optimizer="adamw")[0], "adamw", torch.float64)


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_replicas_of_local_policies_end_bit_equal(policy: str) -> None:
    results, _ = train(OPTIMIZERS["adamw"], policy=policy, anchor=2, batch_size=2)
    assert_replicas_equal(results)
    begun = dict(Net(torch.float64).named_parameters())
    assert not torch.equal(params(results[0])["first.weight"], begun["first.weight"])
