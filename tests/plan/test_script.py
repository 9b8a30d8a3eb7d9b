"""A script is visited before anything is planned: what cannot be planned is refused there, and at once."""

from typing import Any

import pytest
from torch import nn

from tests.plan.probes import pair
from tests.plan.scripts import alone, script  # noqa: F401, a fixture
from uneven.api.fit import Ddp
from uneven.config import RunConfig, Task
from uneven.errors import InputError
from uneven.launch.context import process_context
from uneven.launch.find_script import Script
from uneven.launch.visitor import LeftScript, RunVisitor
from uneven.plan.probe import Probe
from uneven.plan.script import find_task, plan_script

BY_HAND = """import torch
from uneven import Ddp
print("begun")
try:
    ddp = Ddp.wrap(torch.nn.Linear(2, 2))
except Exception:
    print("caught")
print("trained")
"""
SAVES = """import torch
from uneven import TensorData, fit
fit(model=lambda: torch.nn.Linear(2, 2), optimizer=torch.optim.SGD, step=lambda m, b: m(b[0]).sum(),
    dataset=TensorData(torch.zeros(8, 2)), batch_size=4, epochs=3, out="run", overwrite=True, save_every=1, keep_last=2)
"""


pytestmark = pytest.mark.usefixtures("alone")


def test_a_loop_by_hand_is_left_where_it_would_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """It was trained to its end, on one device, before it was refused."""
    with pytest.raises(InputError, match=r"train.py calls Ddp.wrap: a loop by hand cannot be planned"):
        find_task(Script(script(BY_HAND)), {"policy": "auto", "devices": "cpu,cpu@0.4"})
    assert capsys.readouterr().out == "begun\n"


def test_a_visitor_sees_what_is_wrapped_before_anything_is_done() -> None:
    with pytest.raises(LeftScript), process_context().shown_to(RunVisitor()):
        Ddp.wrap(nn.Linear(1, 1))


@pytest.mark.parametrize("given", [{"save_every": 1, "checkpoint_copies": 2}, {"resume": None}])
def test_a_script_with_checkpoints_can_be_planned(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan leaves the run's folder out, and checkpoints without a folder were refused."""
    seen: list[RunConfig] = []

    def probe(task: Task, config: RunConfig, seconds: float, say: Any) -> Probe:
        del task, seconds, say
        seen.append(config)
        return pair()

    monkeypatch.setattr("uneven.plan.measure.probe", probe)
    plan_script(Script(script(SAVES)), {**given, "policy": "auto", "devices": "cpu,cpu@0.4"}, 1.0)
    assert [(config.out, config.save_every, config.overwrite) for config in seen] == [(None, None, False)]


@pytest.mark.parametrize("seconds", [0, -5, 0.5, float("nan"), float("inf")])
def test_seconds_are_checked_before_the_script_runs(seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a loop of one's own nothing else checks them."""
    with pytest.raises(InputError, match=f"seconds={seconds} must be a number of at least 1"):
        plan_script(Script(script(BY_HAND)), {"devices": "cpu,cpu@0.4"}, seconds)
    assert capsys.readouterr().out == ""
