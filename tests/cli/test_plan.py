"""`uneven plan`: what is wrong is told before anything is measured; what it prints; how `uneven run` takes it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.plan.probes import pair
from tests.plan.scripts import alone, script  # noqa: F401, a fixture
from uneven.cli.main import app
from uneven.errors import InputError
from uneven.launch.find_script import Script
from uneven.plan.plan import plan_from
from uneven.plan.script import choose_here, find_task

USES = "from uneven import fit\n"
TRAINS = """import torch
from uneven import TensorData, fit
print("a line of the script")
try:
    fit(model=lambda: torch.nn.Linear(2, 2), optimizer=torch.optim.SGD, step=lambda m, b: m(b[0]).sum(),
        dataset=TensorData(torch.zeros(8, 2)), batch_size=4, epochs=3, devices="cpu")
except Exception:
    print("caught")
print("trained")
"""


pytestmark = pytest.mark.usefixtures("alone")


def test_a_script_that_never_trains_is_told() -> None:
    with pytest.raises(InputError, match="never imports uneven"):
        find_task(Script(script("print(1)\n")), {})
    for ends in ("", "raise SystemExit\n"):
        with pytest.raises(InputError, match="ended without training"):
            find_task(Script(script(USES + ends)), {})
    with pytest.raises(SystemExit, match="7"):
        find_task(Script(script(USES + "raise SystemExit('7')\n")), {})


def test_a_script_is_left_where_it_would_train(capsys: pytest.CaptureFixture[str]) -> None:
    task, config = find_task(Script(script(TRAINS), ("--own",)), {"batch_size": 2, "devices": "cpu,cpu@0.4"})
    assert (config.batch_size, config.epochs, config.devices) == (2, 3, "cpu,cpu@0.4")
    assert not task.is_own_loop
    assert capsys.readouterr().out == "a line of the script\n"


def test_a_run_on_one_device_needs_no_probe() -> None:
    choice = choose_here(Script(script(TRAINS)), {"policy": "auto"})
    assert choice == {"settings": {"policy": "balanced", "devices": "cpu"}, "plan": None, "notes": []}


def test_the_table_and_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uneven.plan.script.plan_script", lambda *_: plan_from(pair(), {"devices": "cpu,cpu@0.4"}))
    script(TRAINS)
    shown = CliRunner().invoke(app, ["plan", "train.py", "--out", "runs/a"])
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    rows = [line.split()[0] for line in lines if "cpu" in line.split()[1:2] + line.split()[1:3] or ",cpu" in line]
    assert {"async", "cadence", "balanced", "sync", "torch", "alone"} <= set(rows)
    assert lines[-1].startswith("recommendation: balanced on both: ")
    assert json.loads(Path("runs/a/plan.json").read_text())["recommendation"]["policy"] == "balanced"
    found = json.loads(CliRunner().invoke(app, ["plan", "train.py", "--json"]).stdout)
    assert found["recommendation"]["devices"] == ["cpu", "cpu@0.4"]
    assert {"probe", "predictions", "strategies", "predicted", "notes"} <= set(found)


def test_the_command_that_is_told_takes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other devices, settings or arguments the plan would not be taken."""
    monkeypatch.setattr("uneven.plan.script.plan_script", lambda *_: plan_from(pair(), {}))
    script(TRAINS)
    given = ["--devices", "cpu,cpu@0.4", "--batch-size", "8", "--shares", "5,2", "--no-sync-batchnorm"]
    order = ["train.py", *given, "--seconds", "2", "--out", "runs/my run", "--", "--width", "64"]
    told = CliRunner().invoke(app, ["plan", *order]).stderr
    typed = shlex.split(told.split("take it with: ")[1])
    assert typed[:7] == ["uneven", "run", "train.py", "--out", "runs/my run", "--policy", "auto"]
    assert typed[-3:] == ["--", "--width", "64"]
    assert sorted(typed[7:-3]) == sorted(given)
    plain = CliRunner().invoke(app, ["plan", "train.py", "--out", "runs/b"]).stderr
    assert plain.endswith("take it with: uneven run train.py --out runs/b --policy auto\n")


def test_run_takes_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    chosen = ({"policy": "cadence", "devices": "cpu,cpu"}, {"predicted": {}}, ["  policy auto -> cadence"])
    monkeypatch.setattr("uneven.plan.script.choose_for_script", lambda *_: chosen)
    monkeypatch.setattr("uneven.launch.script.run_script", lambda *order: seen.append(order))
    assert CliRunner().invoke(app, ["run", "train.py", "--policy", "auto"]).exit_code == 0
    assert seen == [(Script(Path("train.py")), chosen[0], chosen[1])]
    refused = CliRunner().invoke(app, ["run", "train.py", "--policy", "auto", "--nodes", "2"])
    assert isinstance(refused.exception, InputError)
