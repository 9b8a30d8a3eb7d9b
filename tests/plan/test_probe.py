"""A real probe: runs on two devices, then on one alone, with a model so small that each takes about a second."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from uneven import TensorData
from uneven.config import Task, resolve
from uneven.errors import InputError
from uneven.plan.measure import probe
from uneven.plan.plan import plan_from

X, Y = torch.randn(50, 8), torch.randint(0, 3, (50,))


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def task(dataset: Any = None) -> Task:
    return Task(make_model, torch.optim.Adam, step, dataset or TensorData(X, Y), None, None)


def test_two_devices_are_probed_and_each_alone() -> None:
    said: list[str] = []
    config = resolve({"batch_size": 16, "epochs": 3, "policy": "auto", "devices": "cpu,cpu@0.4", "seed": 1})
    found = probe(task(), config, 1.0, said.append)
    ways = ("cpu,cpu@0.4 with balanced", "cpu,cpu@0.4 with cadence", "cpu with balanced")
    assert [line.rsplit(",", 1)[0] for line in said] == [f"training on {way}" for way in ways]
    assert found.devices == ("cpu", "cpu@0.4")
    assert (found.job.samples_per_epoch, found.job.batch_size, found.job.epochs) == (50, 16, 3)
    params = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    assert (found.job.param_bytes, found.job.gradient_bytes) == (params, params)
    assert found.job.state_bytes >= 2 * params
    for rank in found.ranks:
        assert rank.sample_ms > 0.0
        assert rank.at_once > 0.0
        assert (rank.memory_bytes or 1) > 0
    assert found.exact is not None
    assert (found.exact.policy, found.exact.speed > 0.0, sum(found.exact.shares) <= 33) == ("balanced", True, True)
    assert found.local is not None
    assert (found.local.policy, found.local.speed > 0.0) == ("cadence", True)
    fast, slow = found.solos
    assert (fast.device, slow.device) == ("cpu", "cpu@0.4")
    assert slow.speed == pytest.approx(0.4 * fast.speed)
    plan = plan_from(replace(found, start_s=60.0), {})  # ranks that are forked start at once
    assert {one.policy for one in plan.predictions} == {"alone", "equal", "sync", "balanced", "cadence", "async"}
    assert plan.advice.is_one_device  # 150 samples: starting two processes takes longer


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_what_cannot_be_planned_is_refused_before_anything_starts() -> None:
    settings = {"batch_size": 16, "epochs": 3, "policy": "auto", "devices": "cpu,cpu@0.4"}
    with pytest.raises(InputError, match="Endless is a stream without length"):
        probe(task(Endless()), resolve(settings), 1.0, print)
    with pytest.raises(InputError, match="leave strategy out"):
        probe(task(), resolve({**settings, "strategy": "fsdp"}), 1.0, print)
    with pytest.raises(InputError, match=r"min_ranks=3 is above the number of devices, 2: cpu,cpu@0.4"):
        probe(task(), resolve({**settings, "min_ranks": 3}), 1.0, print)
