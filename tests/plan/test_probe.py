"""A real probe: rank processes on two devices, then one alone, with a model so small that each takes about a second."""

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
from uneven.plan.measure import exact_config, probe, probe_config, solo_config
from uneven.plan.plan import plan_from
from uneven.plan.ranks import own_config, relative_deviation

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
    assert said == ["measuring 2 devices together, for 1 s", "measuring cpu alone"]
    assert found.devices == ("cpu", "cpu@0.4")
    assert (found.job.samples_per_epoch, found.job.batch_size, found.job.epochs) == (50, 16, 3)
    params = 4 * (8 * 16 + 16 + 16 * 3 + 3)
    assert (found.job.param_bytes, found.job.gradient_bytes) == (params, params)
    assert found.job.state_bytes >= 2 * params
    for rank in found.ranks:
        assert rank.sample_ms > 0.0
        assert rank.at_once > 0.0
        assert rank.slot_ms > 0.0
        assert (rank.memory_bytes or 1) > 0
    assert found.exact is not None
    assert (found.exact.policy, found.exact.speed > 0.0, sum(found.exact.shares)) == ("balanced", True, 32)
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
    for seconds in (0, -5.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"seconds={seconds} must be a number of at least 1"):
            probe(task(), resolve(settings), seconds, print)
    with pytest.raises(InputError, match=r"min_ranks=3 is above the number of devices, 2: cpu,cpu@0.4"):
        probe(task(), resolve({**settings, "min_ranks": 3}), 1.0, print)


def test_a_probe_touches_no_files_of_the_run() -> None:
    config = resolve({"batch_size": 4, "epochs": 1, "out": "run", "save_every": 1, "keep_last": 2, "resume": "run"})
    plain = probe_config(config, "sync")
    assert (plain.out, plain.resume, plain.save_every, plain.keep_last, plain.policy) == (
        None,
        None,
        None,
        None,
        "sync",
    )


def test_exact_steps_go_without_the_settings_of_local_policies() -> None:
    settings = {"batch_size": 4, "epochs": 1, "policy": "async", "anchor": 3, "max_staleness": 2, "verify": True}
    config = resolve(settings)
    exact = exact_config(config, ("async",))
    assert (exact.policy, exact.anchor, exact.max_staleness, exact.verify) == ("balanced", None, None, False)
    assert exact_config(resolve({"batch_size": 4, "epochs": 1}), ("sync", "balanced")).policy == "balanced"


def test_a_device_by_itself_goes_without_what_needs_several() -> None:
    sharded = {"strategy": "zero1", "memory_shares": (2, 1), "redundancy": 1, "memory_cap": (8, 4), "shares": (2, 1)}
    solo = solo_config(resolve({"batch_size": 4, "epochs": 1, **sharded}), "cpu")
    assert (solo.devices, solo.strategy, solo.redundancy, solo.memory_shares) == ("cpu", None, 0, None)
    assert (solo.memory_cap, solo.shares) == (None, None)


def test_a_rank_by_itself_has_no_global_batch() -> None:
    limited = {"batch_size": 4, "epochs": 1, "global_batch_size": "auto", "max_global_batch_size": 64}
    own = own_config(resolve(limited))
    assert (own.global_batch_size, own.max_global_batch_size) == (None, None)


def test_outliers_are_not_part_of_the_jitter() -> None:
    assert relative_deviation([10.0] * 50 + [1000.0] * 3) == 0.0
    assert relative_deviation([9.0, 11.0] * 50) == pytest.approx(1.0 / 9.0)
