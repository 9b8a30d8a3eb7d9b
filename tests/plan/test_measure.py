"""A probe is made from what short runs have left. What they run with goes with their policy and devices, as does the
choice that follows, and a loop that is over at once is measured, too. No process is started.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
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
from uneven.plan import measure
from uneven.plan.measure import Stretch, Timer, probe, probe_script, run_script_for_a_while
from uneven.plan.plan import chosen_config, plan_from
from uneven.plan.probe import Probe

# 40 and 100 ms a batch of 64, of which 4 and 10 are fixed. Balanced gave 92 and 36 samples, and a sum took 2 ms.
JOINT = Stretch(
    seconds=5.79,
    samples=[9200, 3600],
    steps=[100, 100],
    compute_s=[5.575, 6.0625 - 0.5],
    rounds=[],
    param_bytes=60,
    state_bytes=120,
)
ROUNDS = Stretch(
    seconds=6.0,
    samples=[150 * 64, 60 * 64],
    steps=[150, 60],
    compute_s=[6.0, 6.0],
    rounds=[{"wait_ms": 1.0, "transfer_ms": 2.0, "latency_ms": 2.5}] * 6,
)
ALONE = Stretch(seconds=2.0, samples=[3200], steps=[50], compute_s=[2.0], rounds=[])
BOTH = "cpu,cpu@0.4"
DEVICES = parse_devices(BOTH)
SCRIPT = {"batch_size": 64, "epochs": 20, "policy": "auto", "devices": BOTH}
TASK = Task(lambda: nn.Linear(4, 3), torch.optim.SGD, lambda *_: None, TensorData(torch.zeros(64_000, 1)), None, None)
SAVES = {"save_every": 1, "out": "run", "checkpoint_copies": 2, "keep_best": 1, "monitor": "f1", "monitor_mode": "max"}


@dataclass
class Runs:
    """In place of runs of a script: what each of them would have found. A rank refuses what would be ignored."""

    found: dict[tuple[str, str], Stretch] = field(default_factory=dict)
    passed: dict[str, Any] = field(default_factory=dict)  # by the script to Ddp.setup
    seen: list[tuple[str, str, int | None]] = field(default_factory=list)  # policy, devices, anchor
    default: Callable[[int], Stretch] = lambda count: Stretch(1.0, [600] * count, [100] * count, [0.9] * count, [])

    def train(self, script: Script, settings: Mapping[str, Any], devices: tuple[Device, ...], timer: Timer) -> Any:
        del script, timer
        config = resolve(self.passed, {**settings, "out": "a folder of its own"})
        resolve_auto(config, devices)
        check_loop(config, len(devices))
        assert config.monitor is None
        self.seen.append((config.policy, config.devices, config.anchor))
        found = self.found.get((config.policy, config.devices)) or self.default(len(devices))
        return SimpleNamespace(rank_samples=found.samples, found=found)

    def probe(self, given: Mapping[str, Any], *, is_in_script: bool = False) -> tuple[Probe, RunConfig]:
        """What is found, and the user's own settings; `given` is in the script, or on the command line."""
        own = {} if is_in_script else dict(given)
        self.passed = {**SCRIPT, **(given if is_in_script else {})}
        config = resolve(self.passed, own)
        return probe_script(Script(Path("own.py")), own, TASK, config, 1.0, lambda _: None), config


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs({("balanced", BOTH): JOINT, ("cadence", BOTH): ROUNDS, ("balanced", "cpu"): ALONE})
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr(measure, "run_script_for_a_while", made.train)
    monkeypatch.setattr(Stretch, "of", lambda state: state.found)
    return made


def test_costs_come_from_steps_of_both_kinds(runs: Runs) -> None:
    found, _ = runs.probe({"anchor": 8})
    fast, slow = found.ranks
    assert (fast.fixed_ms, fast.sample_ms) == (pytest.approx(4.0, abs=0.5), pytest.approx(0.5625, rel=0.02))
    assert (fast.slot_ms, slow.slot_ms) == (pytest.approx(40.0), pytest.approx(100.0))
    assert fast.round_ms == pytest.approx(0.5)
    assert found.local is not None
    assert (found.local.average_ms, found.local.anchor) == (pytest.approx(1.5), 8)
    assert [(solo.device, solo.speed) for solo in found.solos] == [("cpu", 1600.0), ("cpu@0.4", 640.0)]
    assert (found.job.param_bytes, found.job.gradient_bytes, found.job.state_bytes) == (60, 60, 120)


def test_without_local_policies_nothing_is_known_of_rounds(runs: Runs) -> None:
    found, _ = runs.probe({"strategy": "zero1"})
    assert found.local is None
    plan = plan_from(found, {})
    assert {one.policy for one in plan.predictions} == {"sync", "balanced", "equal", "alone"}
    balanced = plan.prediction("balanced", ("cpu", "cpu@0.4"))
    assert balanced is not None
    assert balanced.samples_per_s == pytest.approx(sum(JOINT.samples) / JOINT.seconds, rel=0.03)


@pytest.mark.parametrize(("cap", "caps"), [((96, 48), [96, 48]), (64, [64, 64]), (None, [None, None])])
def test_what_memory_cap_allows_is_part_of_the_probe(cap: Any, caps: Any, runs: Runs) -> None:
    found, _ = runs.probe({"memory_cap": cap} if cap else {})
    assert [rank.cap for rank in found.ranks] == caps


@pytest.mark.parametrize("is_in_script", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"anchor": 8, "verify": True},
        {"max_staleness": 3, "optimizer_state": "average"},
        {"min_ranks": 2},
        {"strategy": "zero1", "memory_shares": (2, 1), "redundancy": 1},
        {"memory_cap": (96, 48)},
        {"shares": (2, 1)},
        SAVES,
    ],
    ids=lambda given: next(iter(given), "nothing"),
)
def test_settings_of_one_policy_or_several_devices_do_not_end_the_probe(
    given: dict[str, Any], is_in_script: bool, runs: Runs
) -> None:
    runs.found = {("balanced", "cpu"): Stretch(1.0, [9000], [100], [0.9], [])}  # by far the fastest
    found, config = runs.probe(given, is_in_script=is_in_script)
    assert runs.seen[0][:2] == ("balanced", BOTH)
    assert runs.seen[-1][:2] == ("balanced", "cpu")
    needs_several = {"min_ranks", "strategy", "memory_cap"} & {*given}
    plan = plan_from(found, {})
    assert plan.advice.is_one_device == (not needs_several)
    chosen = chosen_config(config, plan)
    resolve_auto(chosen, parse_devices(chosen.devices))
    check_loop(chosen, len(chosen.devices.split(",")))


def test_all_kinds_of_policies_are_measured_that_the_settings_allow(runs: Runs) -> None:
    runs.probe({"max_staleness": 3})
    assert runs.seen == [("balanced", BOTH, None), ("async", BOTH, 4), ("balanced", "cpu", None)]
    runs.seen.clear()
    runs.probe({"memory_cap": 64})
    assert runs.seen == [("balanced", BOTH, None), ("balanced", "cpu", None)]


def test_windows_are_longer_where_steps_are_short_and_as_the_user_has_them(runs: Runs) -> None:
    runs.found = {("balanced", BOTH): Stretch(1.0, [600] * 2, [100] * 2, [0.1] * 2, [])}
    runs.probe({})
    runs.probe({"max_anchor": 10})
    runs.probe({"anchor": 7})
    assert [anchor for policy, _, anchor in runs.seen if policy == "cadence"] == [60, 10, 7]


def test_with_caps_all_devices_are_taken_and_balanced(runs: Runs) -> None:
    """A loop of one's own is refused with a cap on one device, with sync, and where too little is held."""
    found, _ = runs.probe({"memory_cap": (96, 48)})
    assert (found.job.candidates, found.job.min_ranks) == (("balanced",), 2)
    with pytest.raises(InputError, match="min_ranks=3 is above the number of devices"):
        runs.probe({"min_ranks": 3})


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
    found = Timer(0.0)
    found.ranks(statuses)
    assert (found.began_s is not None) == has_begun
    assert found.requests.stop.is_set() == has_begun


@pytest.mark.parametrize(("samples", "unused"), [(None, 0), ([0, 0], 0), ([12, 4], 1), ([12, 4], 0)])
def test_a_script_without_a_step_is_told(
    samples: list[int] | None, unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of which no heartbeat was heard is read to its end."""

    def run(*_: object, script: Mapping[str, Any]) -> int:
        out = Path(script["settings"]["out"])
        if samples is not None:
            out.mkdir()
            (out / "log.json").write_text("{}")
        return unused

    monkeypatch.setattr(measure, "run_ranks", run)
    monkeypatch.setattr(measure, "read_state", lambda _: SimpleNamespace(rank_samples=samples))
    order = (Script(Path("own.py")), {}, DEVICES, Timer(5.0))
    if samples == [12, 4] and not unused:
        assert run_script_for_a_while(*order) is not None
    else:
        with pytest.raises(InputError, match=r"own.py ended without a step of its own loop"):
            run_script_for_a_while(*order)


def test_seconds_are_those_of_something_that_can_be_measured() -> None:
    for seconds in (0, -5.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"seconds={seconds} must be a number of at least 1"):
            probe(TASK, resolve(SCRIPT), seconds, print)
