"""Stretches of a script with a loop of its own: what they run with goes with their policy and devices, as does the
choice that follows, and a loop that is over at once is measured, too. No process is started.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from uneven import TensorData
from uneven.api.loop_inputs import check_loop
from uneven.config import RunConfig, Task, resolve
from uneven.errors import InputError
from uneven.hardware.device import Device, parse_devices
from uneven.launch.checks.preflight import resolve_auto
from uneven.launch.find_script import Script
from uneven.plan import own_loop
from uneven.plan.own_loop import Stretch, probe_script, run_stretch, stretch_settings
from uneven.plan.plan import chosen_config, plan_from
from uneven.plan.probe import Probe
from uneven.train.requests import Requests

DATA = TensorData(torch.randn(40, 4), torch.randint(0, 3, (40,)))
TASK = Task(lambda: nn.Linear(4, 3), torch.optim.SGD, lambda *_: None, DATA, None, None)
DEVICES = parse_devices("cpu,cpu@0.4")
SCRIPT = {"batch_size": 6, "epochs": 2, "policy": "auto", "devices": "cpu,cpu@0.4"}
SAVES = {"save_every": 1, "out": "run", "checkpoint_copies": 2, "keep_best": 1, "monitor": "f1", "monitor_mode": "max"}


def check(config: RunConfig, devices: Sequence[Device]) -> None:
    """InputError for what a rank of these devices would refuse."""
    resolve_auto(config, tuple(devices))
    check_loop(config, len(devices))
    assert config.monitor is None


@dataclass
class Runs:
    """The stretches of a script: their policies and devices. A device alone is by far the fastest."""

    passed: dict[str, Any] = field(default_factory=dict)  # by the script to Ddp.setup
    seen: list[tuple[str, str]] = field(default_factory=list)

    def run(self, script: Script, settings: Mapping[str, Any], devices: Sequence[Device], seconds: float) -> Stretch:
        del script, seconds
        config = resolve(self.passed, {**settings, "out": "a folder of its own"})
        check(config, devices)
        self.seen.append((config.policy, config.devices))
        count = len(devices)
        return Stretch(1.0, [600 if count > 1 else 9000] * count, [100] * count, [0.9] * count, [], 3.0)

    def probe(self, given: Mapping[str, Any], *, is_in_script: bool = False) -> tuple[Probe, RunConfig]:
        """What is found, and the user's own settings; `given` is in the script, or on the command line."""
        own = {} if is_in_script else dict(given)
        self.passed = {**SCRIPT, **(given if is_in_script else {})}
        config = resolve(self.passed, own)
        return probe_script(Script(Path("own.py")), own, TASK, config, 1.0, lambda _: None), config


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(own_loop, "run_stretch", made.run)
    return made


@pytest.mark.parametrize("is_in_script", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"anchor": 8, "verify": True},
        {"max_staleness": 3, "optimizer_state": "average"},
        {"min_ranks": 2},
        {"strategy": "zero1", "memory_shares": (2, 1), "redundancy": 1},
        {"memory_cap": (8, 4)},
        {"shares": (2, 1)},
        SAVES,
    ],
    ids=lambda given: next(iter(given), "nothing"),
)
def test_settings_of_one_policy_or_several_devices_do_not_end_the_probe(
    given: dict[str, Any], is_in_script: bool, runs: Runs
) -> None:
    probe, config = runs.probe(given, is_in_script=is_in_script)
    assert runs.seen[0] == ("balanced", "cpu,cpu@0.4")
    assert runs.seen[-1] == ("balanced", "cpu")
    needs_several = {"min_ranks", "strategy", "memory_cap"} & {*given}
    plan = plan_from(probe, {})
    assert plan.advice.is_one_device == (not needs_several)
    chosen = chosen_config(config, plan)
    resolve_auto(chosen, parse_devices(chosen.devices))
    check_loop(chosen, len(chosen.devices.split(",")))


def test_all_kinds_of_policies_are_measured_that_the_settings_allow(runs: Runs) -> None:
    runs.probe({"max_staleness": 3})
    assert runs.seen == [("balanced", "cpu,cpu@0.4"), ("async", "cpu,cpu@0.4"), ("balanced", "cpu")]
    runs.seen.clear()
    runs.probe({"memory_cap": 8})
    assert runs.seen == [("balanced", "cpu,cpu@0.4"), ("balanced", "cpu")]


def test_with_caps_all_devices_are_taken_and_balanced(runs: Runs) -> None:
    """A loop of one's own is refused with a cap on one device, with sync, and where too little is held."""
    probe, _ = runs.probe({"memory_cap": (8, 4)})
    assert (probe.job.candidates, probe.job.min_ranks) == (("balanced",), 2)
    with pytest.raises(InputError, match="min_ranks=3 is above the number of devices"):
        runs.probe({"min_ranks": 3})


def test_a_scheduler_keeps_the_metric_that_it_follows() -> None:
    def settings(task: Task) -> dict[str, Any]:
        return stretch_settings({"monitor": "f1"}, task, ("balanced",), DEVICES, "balanced")

    plateau = Task(TASK.make_model, TASK.make_optimizer, TASK.train_step, DATA, lambda _: None, None)
    assert settings(plateau)["monitor"] == "f1"
    assert settings(TASK)["monitor"] is None


def timer(seconds: float = 0.0) -> own_loop._Timer:
    return own_loop._Timer(Requests(), seconds)


@pytest.mark.parametrize(
    ("statuses", "has_begun"),
    [
        ([{"slot": 3}, {"slot": 1}], True),
        ([{"slot": 3}, {"slot": 0}], False),
        ([{"slot": 3}, {}], False),
        ([{"slot": 0, "reached": 4}, {"slot": 1}], True),
        ([{"slot": 0, "is_past": True}, {"slot": 0, "is_past": True}], True),
        ([{"slot": 0, "is_past": False}, {"slot": 2}], False),
    ],
)
def test_a_loop_that_was_over_before_the_next_heartbeat_has_begun(
    statuses: list[dict[str, Any]], has_begun: bool
) -> None:
    """Once no worker trains, the heartbeats say slot 0."""
    found = timer()
    found.ranks(statuses)
    assert (found.began_s is not None) == has_begun
    assert found._requests.stop.is_set() == has_begun


def leaving(samples: list[int] | None, unused: int = 0) -> Callable[..., int]:
    """A run of all ranks that leaves a log of so many samples, and of which no heartbeat was heard."""

    def run(*_: object, script: Mapping[str, Any]) -> int:
        out = Path(script["settings"]["out"])
        if samples is not None:
            out.mkdir()
            (out / "log.json").write_text("{}")
        return unused

    return run


def test_a_loop_of_which_no_heartbeat_told_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loop, "run_ranks", leaving([12, 4]))
    monkeypatch.setattr(own_loop, "read_stretch", lambda _: Stretch(0.1, [12, 4], [2, 2], [0.1, 0.1], []))
    found = run_stretch(Script(Path("own.py")), {}, DEVICES, 5.0)
    assert (found.samples, found.seconds) == ([12, 4], 0.1)
    assert found.start_s >= 0.0


@pytest.mark.parametrize(("samples", "unused"), [(None, 0), ([0, 0], 0), ([12, 4], 1)])
def test_a_script_without_a_step_is_told(
    samples: list[int] | None, unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_loop, "run_ranks", leaving(samples, unused))
    monkeypatch.setattr(own_loop, "read_stretch", lambda _: Stretch(0.1, samples or [], [0, 0], [0.0, 0.0], []))
    with pytest.raises(InputError, match=r"own.py ended without a step of its own loop"):
        run_stretch(Script(Path("own.py")), {}, DEVICES, 5.0)
