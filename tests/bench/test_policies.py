import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.folders import make_timeline
from uneven.bench.orders import PoliciesOrder
from uneven.bench.policies import PolicyRow, Trial, busy_efficiency, read_row, recommend, try_policies
from uneven.errors import InputError
from uneven.files import json_text
from uneven.launch.find_script import Script
from uneven.timeline.record import STATES, Account
from uneven.timeline.timeline import Timeline

SCRIPT = """
import sys
import torch
from uneven import fit

x = torch.linspace(-1, 1, 96).unsqueeze(1)
fit(
    model=lambda: torch.nn.Linear(1, 1),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    step=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    dataset=torch.utils.data.TensorDataset(x, float(sys.argv[1]) * x), batch_size=8, epochs=50,
)
"""


def row(policy: str, loss: float, speed: float) -> PolicyRow:
    return PolicyRow(policy, loss, 1.0, speed, 0.9)


@pytest.mark.parametrize(
    ("rows", "policy", "words"),
    [
        ([row("sync", 0.30, 100), row("async", 0.303, 150)], "async", "1.50x as fast as sync, its loss is within 2%"),
        ([row("sync", 0.30, 100), row("async", 0.40, 150)], "sync", "async would be faster, at a higher loss"),
        ([row("sync", 0.30, 100), row("async", 0.20, 150)], "async", "its loss is the lowest"),
        ([row("sync", -2.0, 100), row("async", -1.97, 150)], "async", "within 2% of the lowest (sync)"),
    ],
)
def test_the_fastest_of_those_with_a_low_loss_is_recommended(rows: list[PolicyRow], policy: str, words: str) -> None:
    found = recommend(rows)
    assert found is not None
    assert found.policy == policy
    assert words in found.reason
    assert recommend(rows[:1]) is None


def test_no_policy_is_recommended_where_a_run_was_disturbed() -> None:
    rows = [row("sync", 0.30, 100), replace(row("async", 0.20, 150), is_disturbed=True)]
    assert recommend(rows) is None
    trial = Trial()
    for one in rows:
        trial.add(one)
    assert trial.recommended is None


def test_efficiency_is_joint_speed_over_that_while_computing() -> None:
    timeline = make_timeline(["cpu", "cpu@0.4"], 4.0)
    assert busy_efficiency(timeline, [500, 200]) == pytest.approx(0.75), "both compute three quarters of the time"
    idle = dict.fromkeys(STATES, 0.0) | {"wait": 4.0}
    other = Timeline(timeline.lanes, [timeline.accounts[0], Account(1, idle)], [], [])
    assert busy_efficiency(other, [500, 0]) is None
    assert busy_efficiency(timeline, [700]) is None


def test_a_script_that_leaves_nothing_is_told(tmp_path: Path) -> None:
    found = read_row("async", tmp_path)
    assert isinstance(found, str)
    assert "left no state" in found
    (tmp_path / "state.json").write_text(json.dumps({"history": []}))
    (tmp_path / "timeline.json").write_text(json.dumps(make_timeline(["cpu"], 1.0).to_json()))
    assert read_row("async", tmp_path) == "no epoch was finished"


@pytest.mark.soak
def test_a_script_runs_under_each_policy_with_its_own_arguments(tmp_path: Path) -> None:
    """On one device, which is quick and has no efficiency; `-m soak` runs scripts on several."""
    (tmp_path / "train.py").write_text(SCRIPT)
    reported: list[str] = []
    trial = Trial()
    order = PoliciesOrder(devices="cpu", epochs=2, policies=("balanced", "async"), out=tmp_path / "out")
    try_policies(Script(tmp_path / "train.py", ("3",)), order, trial, reported.append)
    assert reported == ["balanced", "async"]
    assert trial.failed == {}
    assert [row.policy for row in trial.policies] == ["balanced", "async"]
    assert all(row.loss < 3.0 and row.samples_per_s > 0 for row in trial.policies)
    assert json.loads(json_text(trial))["recommended"]["policy"] in ("balanced", "async")


def test_a_failing_policy_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import uneven\nraise SystemExit('no data here')")
    trial = Trial()
    script, order = (
        Script(tmp_path / "train.py"),
        PoliciesOrder(devices="cpu", policies=("sync",), out=tmp_path / "out"),
    )
    try_policies(script, order, trial, lambda _: None)
    assert "no data here" in trial.failed["sync"]
    with pytest.raises(InputError, match="'fast'"):
        try_policies(script, PoliciesOrder(policies=("fast",)), trial, lambda _: None)
    with pytest.raises(InputError, match="there is no such file"):
        try_policies(Script(tmp_path / "none.py"), PoliciesOrder(), trial, lambda _: None)
    with pytest.raises(InputError, match="cuda:99"):
        try_policies(script, replace(order, devices="cuda:99"), Trial(), lambda _: pytest.fail("a policy was tried"))
