"""A probe of a loop of one's own is made from what short runs of the script have left: timeline and log."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from uneven import TensorData
from uneven.config import Task, resolve
from uneven.hardware.device import Device
from uneven.launch.find_script import Script
from uneven.plan import own_loop
from uneven.plan.own_loop import Stretch, probe_script
from uneven.plan.plan import plan_from
from uneven.plan.probe import Probe

# 40 and 100 ms a batch of 64, of which 4 and 10 are fixed. Balanced gave 92 and 36 samples, and a sum took 2 ms.
JOINT = Stretch(
    seconds=5.79,
    samples=[9200, 3600],
    steps=[100, 100],
    compute_s=[5.575, 6.0625 - 0.5],
    rounds=[],
    start_s=3.0,
)
ROUNDS = Stretch(
    seconds=6.0,
    samples=[150 * 64, 60 * 64],
    steps=[150, 60],
    compute_s=[6.0, 6.0],
    rounds=[{"wait_ms": 1.0, "transfer_ms": 2.0, "latency_ms": 2.5}] * 6,
    start_s=3.0,
)
ALONE = Stretch(seconds=2.0, samples=[3200], steps=[50], compute_s=[2.0], rounds=[], start_s=3.0)


class Stretches:
    """In place of runs of a script: what each of them would have found."""

    def __init__(self, found: dict[tuple[str, str], Stretch]) -> None:
        self._found = found

    def run(self, script: Script, settings: Mapping[str, Any], devices: Sequence[Device], seconds: float) -> Stretch:
        del script, devices, seconds
        return self._found[settings["policy"], settings["devices"]]


def probed(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Probe:
    both = "cpu,cpu@0.4"
    found = {("balanced", both): JOINT, ("cadence", both): ROUNDS, ("balanced", "cpu"): ALONE}
    monkeypatch.setattr(own_loop, "run_stretch", Stretches(found).run)
    config = resolve({"batch_size": 64, "epochs": 20, "policy": "auto", "devices": both, **settings})
    data = TensorData(torch.zeros(64_000, 1))
    task = Task(lambda: nn.Linear(4, 3), torch.optim.SGD, lambda *_: None, data, None, None)
    return probe_script(Script(Path("own.py")), {}, task, config, 1.0, lambda _: None)


def test_costs_come_from_steps_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probed(monkeypatch, anchor=8)
    fast, slow = probe.ranks
    assert (fast.fixed_ms, fast.sample_ms) == (pytest.approx(4.0, abs=0.5), pytest.approx(0.5625, rel=0.02))
    assert (fast.slot_ms, slow.slot_ms) == (pytest.approx(40.0), pytest.approx(100.0))
    assert fast.round_ms == pytest.approx(0.5)
    assert probe.local is not None
    assert probe.local.average_ms == pytest.approx(1.5)
    assert [(solo.device, solo.speed) for solo in probe.solos] == [("cpu", 1600.0), ("cpu@0.4", 640.0)]
    assert (probe.job.param_bytes, probe.job.state_bytes, probe.start_s) == (60, 120, 3.0)


def test_without_local_policies_nothing_is_known_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probed(monkeypatch, sync_batchnorm=True)
    assert probe.local is None
    plan = plan_from(probe, {})
    assert {one.policy for one in plan.predictions} == {"sync", "balanced", "equal", "alone"}
    balanced = plan.prediction("balanced", ("cpu", "cpu@0.4"))
    assert balanced is not None
    assert balanced.samples_per_s == pytest.approx(sum(JOINT.samples) / JOINT.seconds, rel=0.03)


@pytest.mark.parametrize(("cap", "caps"), [((48, 24), [48, 24]), (32, [32, 32]), (None, [None, None])])
def test_what_memory_cap_allows_is_part_of_the_probe(cap: Any, caps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rank.cap for rank in probed(monkeypatch, policy="balanced", memory_cap=cap).ranks] == caps
