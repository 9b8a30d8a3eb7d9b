"""policy="auto": when something is probed, what is taken instead, and what the run's folder then has."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import uneven
from tests.plan.probes import JOB, pair
from uneven import TensorData
from uneven.config import RunConfig, Task, resolve
from uneven.errors import InputError
from uneven.files import make_out_folder, read_json
from uneven.hardware.device import parse_devices
from uneven.launch.checks.preflight import resolve_auto
from uneven.launch.context import process_context
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.predicted import hand_down
from uneven.launch.visitor import LeftScript, RunVisitor
from uneven.plan import choose as choosing
from uneven.plan import plan as plans
from uneven.plan.advise import DISTURBED
from uneven.plan.choose import choose, describe_choice
from uneven.plan.plan import asked_for, chosen_config, plan_from, read_plan, restored, write_plan
from uneven.plan.probe import JobProbe, Probe, allowed_policies

X, Y = torch.randn(40, 4), torch.randint(0, 3, (40,))
TASK = Task(lambda: nn.Linear(4, 3), torch.optim.SGD, lambda *_: None, TensorData(X, Y), None, None)


def config(**settings: Any) -> RunConfig:
    given = {"batch_size": 8, "epochs": 2, "policy": "auto", "devices": "cpu,cpu@0.4", "progress": "off"}
    return resolve({**given, **settings})


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    script = tmp_path / "train.py"
    script.write_text("a script\n")
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    yield
    hand_down(None)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """What was probed; every probe finds the recorded pair."""
    seen: list[RunConfig] = []

    def probe(task: Task, wanted: RunConfig, seconds: float, say: Any) -> Probe:
        del task, seconds, say
        seen.append(wanted)
        return pair(job=replace(JOB, candidates=allowed_policies(wanted)))

    monkeypatch.setattr("uneven.plan.measure.probe", probe)
    return seen


def test_the_plan_decides_policy_and_devices(probed: list[RunConfig]) -> None:
    choice = choose(TASK, config())
    assert (choice.config.policy, choice.config.devices) == ("balanced", "cpu,cpu@0.4")
    (line,) = choice.notes
    assert line.startswith("  policy auto -> balanced on cpu,cpu@0.4: balanced on both: ")
    assert choice.plan is not None
    assert choice.plan["predicted"]["policy"] == "balanced"
    local = choose(TASK, config(anchor=5))
    assert local.config.policy in ("cadence", "async")
    assert len(probed) == 2


def test_other_policies_probe_nothing(probed: list[RunConfig]) -> None:
    assert choose(TASK, config(policy="sync")).config == config(policy="sync")
    assert choose(TASK, config(devices="cpu")).config.policy == "balanced"
    assert probed == []


def test_a_fresh_plan_in_the_folder_is_taken(
    probed: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    wanted = config(out=out)
    write_plan(plan_from(pair(), asked_for(wanted)), out)
    choice = choose(TASK, wanted)
    assert "(from its plan.json)" in choice.notes[0]
    assert probed == []
    assert make_out_folder(out) is None  # the plan is for this run, not of an earlier one
    assert (out / "plan.json").exists()
    choose(TASK, config(out=out, batch_size=16))
    assert len(probed) == 1
    monkeypatch.setattr(plans, "FRESH", timedelta(seconds=-1))
    choose(TASK, wanted)
    assert len(probed) == 2


@pytest.mark.parametrize("changed", [{"min_ranks": 2}, {"max_staleness": 3}, {"overhead_target": 0.1}])
def test_a_plan_of_other_candidates_is_not_taken(
    probed: list[RunConfig], tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Its advice, a policy without that setting or too few devices, would be refused."""
    out = tmp_path / "run"
    write_plan(plan_from(pair(), asked_for(config(out=out))), out)
    choice = choose(TASK, config(out=out, **changed))
    assert len(probed) == 1
    resolve_auto(choice.config, parse_devices(choice.config.devices))


def test_a_plan_of_other_arguments_of_the_script_is_not_taken(
    probed: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may name another model."""
    wanted, script = config(out=tmp_path / "run"), sys.argv[0]
    monkeypatch.setattr("sys.argv", [script, "--width", "64"])
    write_plan(plan_from(pair(), asked_for(wanted)), tmp_path / "run")
    choose(TASK, wanted)
    assert probed == []
    monkeypatch.setattr("sys.argv", [script, "--width", "4096"])
    choose(TASK, wanted)
    assert len(probed) == 1


def test_a_run_with_a_policy_of_its_own_is_compared_with_the_plan_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    write_plan(plan_from(pair(), asked_for(config())), out)
    choice = choose(TASK, config(policy="cadence", out=out))
    assert choice.plan is not None
    assert choice.plan["predicted"]["policy"] == "cadence"
    assert choose(TASK, config(policy="cadence", out=out, devices="cpu,cpu")).plan is None


def test_ranks_that_run_already_take_the_rule(probed: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    from uneven.launch.context import ProcessContext

    started = ProcessContext(LaunchEnvironment("torchrun", rank=0, world_size=2))
    monkeypatch.setattr(choosing, "process_context", lambda: started)
    choice = choose(TASK, config())
    assert choice.config.policy == "balanced"
    assert "by rule" in choice.notes[0]
    assert "torchrun" in choice.notes[0]
    assert probed == []


def test_what_was_handed_down_goes_to_the_first_run_alone() -> None:
    hand_down({"predicted": {}})
    assert choose(TASK, config(policy="sync")).plan == {"predicted": {}}
    assert choose(TASK, config(policy="sync")).plan is None


def test_a_plan_leaves_the_script_where_it_would_train() -> None:
    wanted = config()
    with pytest.raises(LeftScript) as left, process_context().shown_to(RunVisitor()):
        choose(TASK, wanted)
    assert left.value.found == (TASK, wanted)


def test_settings_narrow_down_the_policies() -> None:
    assert allowed_policies(config()) == ("sync", "balanced", "cadence", "async")
    assert allowed_policies(config(anchor=3)) == ("cadence", "async")
    assert allowed_policies(config(max_staleness=3)) == ("async",)
    assert allowed_policies(config(strategy="zero1")) == ("sync", "balanced")
    assert allowed_policies(config(shares=(2, 1))) == ("balanced", "cadence")
    assert allowed_policies(config(sync_batchnorm=True)) == ("sync", "balanced")
    assert allowed_policies(config(global_batch_size="auto")) == ("balanced",)
    with pytest.raises(InputError, match="no policy goes with all"):
        allowed_policies(config(anchor=3, memory_cap=4))


def test_settings_per_device_follow_the_devices() -> None:
    small = pair(job=replace(JOB, samples_per_epoch=2_000, epochs=1))
    chosen = chosen_config(config(memory_cap=(8, 4)), plan_from(small, {}))
    assert (chosen.devices, chosen.policy, chosen.memory_cap) == ("cpu", "balanced", (8,))


@pytest.mark.parametrize("strategy", [None, "ddp-flat", "zero1"])
def test_a_strategy_that_divides_something_is_not_given_one_device(strategy: str | None) -> None:
    """The run was refused after the plan: one device has nobody to divide its state with."""
    wanted = config(strategy=strategy, epochs=1)
    job = replace(JobProbe.of(wanted, 2_000, allowed_policies(wanted)), param_bytes=4_000, gradient_bytes=4_000)
    chosen = chosen_config(wanted, plan_from(pair(job=job), {}))
    assert chosen.devices == ("cpu,cpu@0.4" if strategy == "zero1" else "cpu")
    resolve_auto(chosen, parse_devices(chosen.devices))


@pytest.mark.parametrize(
    ("had", "given", "taken"),
    [
        ({"shares": [5.0, 1.0], "memory_cap": [8, 2]}, {"shares": (5, 2, 1), "memory_cap": (8, 4, 2)}, None),
        ({"shares": None, "memory_cap": 6}, {"shares": (5, 1), "memory_cap": 6}, {"shares": (5, 1), "memory_cap": 6}),
    ],
)
def test_a_run_that_is_resumed_has_its_settings_per_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, had: dict[str, Any], given: dict[str, Any], taken: Any
) -> None:
    """Those that are given are of all devices that were asked for, and the plan had chosen two of three."""
    record = {"config": {"policy": "balanced", "devices": "cpu,cpu@0.2", **had}}
    monkeypatch.setattr(choosing, "_record_of", lambda _: record)
    found = choosing.recorded(config(devices="auto", resume=tmp_path, out=tmp_path, **given))
    assert found is not None
    wanted = {name: tuple(value) for name, value in had.items()} if taken is None else taken
    assert {name: getattr(found.config, name) for name in had} == wanted
    resolve_auto(found.config, parse_devices(found.config.devices))
    other = choosing.recorded(config(devices="cpu,cpu,cpu", resume=tmp_path, out=tmp_path, shares=(5, 2, 1)))
    assert other is not None
    assert other.config.shares == (5, 2, 1)


def test_a_plan_in_an_empty_folder_leaves_it_to_the_run(tmp_path: Path) -> None:
    """The folder was taken for somebody's own: plan.json lay in it, and no mark."""
    write_plan(plan_from(pair(), asked_for(config())), tmp_path / "run")
    (tmp_path / "empty").mkdir()
    write_plan(plan_from(pair(), asked_for(config())), tmp_path / "empty")
    assert make_out_folder(tmp_path / "empty") is None
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    write_plan(plan_from(pair(), asked_for(config())), tmp_path / "full")
    with pytest.raises(InputError, match=r"no run of uneven wrote \(notes.txt"):
        make_out_folder(tmp_path / "full")


def test_a_plan_that_is_read_and_written_again_gets_no_younger(tmp_path: Path) -> None:
    old = (datetime.now(timezone.utc) - timedelta(hours=23)).isoformat(timespec="seconds")
    write_plan(plan_from(pair(), asked_for(config()), old), tmp_path)
    again = restored(read_plan(tmp_path) or {})
    assert again is not None
    assert again.to_json()["date"] == old
    older = (datetime.now(timezone.utc) - timedelta(hours=25)).isoformat(timespec="seconds")
    write_plan(plan_from(pair(), asked_for(config()), older), tmp_path)
    assert read_plan(tmp_path, asked_for(config())) is None


def test_the_one_line_tells_that_other_programs_used_the_cores() -> None:
    quiet, busy = (describe_choice(plan_from(pair(is_disturbed=is_busy), {})) for is_busy in (False, True))
    assert busy == f"{quiet}; {DISTURBED}"


def test_the_probe_of_a_job_has_its_fixed_shares() -> None:
    wanted = config(shares=(5, 2), accumulate=2)
    job = JobProbe.of(wanted, 2_000, allowed_policies(wanted))
    assert (job.shares, job.accumulate, job.batch_size) == ((5, 2), 2, 16)


def test_a_damaged_plan_is_none(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None
    (tmp_path / "plan.json").write_text('{"version": 1}')
    assert read_plan(tmp_path) is None
    found = plan_from(pair(), {}).to_json()
    assert restored(found) is not None
    assert restored({**found, "probe": {}}) is None


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_run_records_its_choice_and_resume_and_replay_take_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device is chosen, so no process is started."""
    probes: list[Probe] = []

    def small(task: Task, wanted: RunConfig, seconds: float, say: Any) -> Probe:
        del task, wanted, seconds, say
        probes.append(pair(job=replace(JOB, samples_per_epoch=40, epochs=2)))
        return probes[-1]

    monkeypatch.setattr("uneven.plan.measure.probe", small)

    def fit(**settings: Any) -> uneven.TrainedState:
        given = {"batch_size": 8, "policy": "auto", "devices": "cpu,cpu@0.4", "progress": "lines"}
        made = lambda: nn.Linear(4, 3)  # noqa: E731
        return uneven.fit(
            model=made, optimizer=torch.optim.Adam, step=step, dataset=TensorData(X, Y), **{**given, **settings}
        )

    state = fit(epochs=2, out=tmp_path / "run", save_every="1 epoch")
    printed = capsys.readouterr().err
    assert "policy auto -> one device on cpu: one device, cpu: " in printed
    assert "plan: predicted 0.02 s per epoch at efficiency 1.00, achieved " in printed
    kept = read_json(tmp_path / "run" / "plan.json")
    assert isinstance(kept, dict)
    assert kept["achieved"]["seconds_per_epoch"] > 0.0
    assert kept["predicted"]["devices"] == ["cpu"]
    record = read_json(tmp_path / "run" / "state.json")
    assert isinstance(record, dict)
    assert (record["config"]["policy"], record["config"]["devices"]) == ("balanced", "cpu")
    again = fit(epochs=2, replay=tmp_path / "run")
    longer = fit(epochs=3, resume=tmp_path / "run")
    assert len(probes) == 1
    assert "policy auto -> balanced on cpu, as recorded in" in capsys.readouterr().err
    assert all(torch.equal(state.params[name], again.params[name]) for name in state.params)
    assert longer.samples == 120
