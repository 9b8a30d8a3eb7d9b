"""The efficiency harness on threads: real workers and segments, a few milliseconds each; no timing is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import Silent, ThreadGroup, on_threads
from uneven import InputError
from uneven.bench.efficiency import Pairs, alternate, measure_efficiency, sentences, summarise
from uneven.bench.orders import EfficiencyOrder
from uneven.config import RunConfig, Task
from uneven.data.sample_order import prove_exactly_once
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.results.progress import Reporter
from uneven.step.finite import OwnCheck
from uneven.train.gradient_sync import StepStats
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def measure(policy: str, tmp_path: Path, size: int = 2) -> tuple[Pairs, list[Worker]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorData(torch.randn(90, 4, generator=generator), torch.randn(90, 1, generator=generator))
    task = Task(lambda: nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01), step, data)
    config = RunConfig(batch_size=8, epochs=10**6, policy=policy)
    plan = EfficiencyOrder(model="lenet", seconds=0.002, least_pairs=2, most_pairs=4, half_width=0.0)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> Worker:
        home = tmp_path / f"{policy}-{group.rank}"
        home.mkdir()
        worker = Worker(task, config, RankInfo(group.rank, devices), lambda _: group, Requests(), Silent())
        alternate(plan, worker, home)
        return worker

    workers = on_threads(size, rank)
    return Pairs(**json.loads((tmp_path / f"{policy}-0" / "pairs.json").read_text())), workers


@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_pairs_are_complete_and_solo_segments_leave_the_replicas_equal(policy: str, tmp_path: Path) -> None:
    pairs, workers = measure(policy, tmp_path)
    assert len(pairs.ratios) == len(pairs.joint) == len(pairs.solo) == 4
    for ratio, joint, solo in zip(pairs.ratios, pairs.joint, pairs.solo, strict=True):
        assert ratio == pytest.approx(joint / sum(solo))
    if policy in ("sync", "balanced"):
        assert len(pairs.bounds) == 4
        assert all(sum(shares) == 16 for shares in pairs.shares)
    else:  # every segment ends with a round, on both ranks
        assert len(pairs.delays) >= 2 * 4
        parts = [part for worker in workers for part in worker.engine.state.log]
        prove_exactly_once(workers[0].axis, [worker.engine.state.log for worker in workers], len(parts))
    assert workers[0].engine.state.trained == workers[1].engine.state.trained > 0
    for a, b in zip(workers[0].engine.model.parameters(), workers[1].engine.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bytes_per_step_are_those_of_the_gradients_and_a_few_numbers(tmp_path: Path) -> None:
    pairs, _ = measure("sync", tmp_path)
    row = len(StepStats._fields) + len(OwnCheck._fields)
    numbers = 5 + 2 + 2 * row  # gradients, a flag per param, a row of statistics per rank
    assert pairs.payload_bytes == 4 * numbers


def test_the_interval_is_students() -> None:
    pairs = Pairs(ratios=[0.9, 1.0, 1.1, 1.0] * 10)
    mean, half = pairs.interval()
    assert mean == pytest.approx(1.0)
    assert half == pytest.approx(2.02 * 0.0716 / 40**0.5, rel=0.01)


def test_a_summary_says_gap_bound_and_where_the_time_goes() -> None:
    pairs = Pairs(
        [0.9, 0.92], [126.0, 128.8], [[100.0, 40.0]] * 2, [0.95, 0.95], [[12, 4]] * 2, [127.0] * 2, [[110, 115]] * 2
    )
    order = EfficiencyOrder(model="lenet", batch_size=8)
    result = summarise(order, RunConfig(batch_size=8, epochs=1), pairs)
    assert result.gap == 2.5
    assert result.ddp_bound == pytest.approx(4 / 7)
    text = "\n".join(sentences(result))
    assert "0.910 +-" in text
    assert "12:4 could reach 0.950" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "fast"}, "sync, balanced, cadence, async, torch-ddp"),
        ({"devices": "cpu"}, "at least two"),
        ({"model": "x"}, "unknown model"),
        ({"batch_size": 6000}, "more than the data set has"),
        ({"compile": "graph"}, "captures a CUDA graph, which cpu,cpu@0.4 cannot run"),
        ({"backend": "nccl"}, "a CUDA device for every rank"),
        ({"policy": "torch-ddp", "precision": "bf16"}, "measured in fp32"),
        ({"against_ddp": True, "compile": "default"}, "DDP runs eagerly"),
    ],
)
def test_bad_orders_are_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    order = EfficiencyOrder(**{"model": "logistic", "data": "mnist-mini", **changes})
    with pytest.raises(InputError, match=words):
        measure_efficiency(order, Reporter("off"))
