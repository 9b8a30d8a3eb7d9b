"""Scripts as people have them, and their twins with uneven: a short diff, the same result on two devices."""

import difflib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.starts import BIN, start
from tests.forked import run_forked
from uneven.launch.context import ProcessContext
from uneven.launch.environment import ALONE, LaunchEnvironment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAIRS = {f"plain_{name}": name for name in ("mnist.py", "finetune.py", "gan.py", "chargpt.py")}
MOST_LINES = 12


def changes(plain: str, ours: str) -> list[str]:
    texts = [(EXAMPLES / name).read_text().splitlines() for name in (plain, ours)]
    return [line for line in difflib.unified_diff(*texts, n=0, lineterm="") if re.match(r"[+-](?![+-])", line)]


@pytest.mark.parametrize("plain", PAIRS)
def test_the_diff_is_short_and_the_one_that_the_tutorial_shows(plain: str) -> None:
    lines = [line for line in changes(plain, PAIRS[plain]) if line.strip("+-")]
    assert len(lines) <= MOST_LINES
    shown = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL)
    assert lines in [
        [line for line in block.splitlines() if line[:1] in ("+", "-") and line.strip("+-")] for block in shown
    ]


def params(folder: Path, *command: Any) -> dict[str, torch.Tensor]:
    script = EXAMPLES / command[0]
    args = ["--samples", "600", "--epochs", "2", "--save-model", folder / "model.pt"]
    starter = [sys.executable, script, *args]
    if len(command) > 1:
        starter = [sys.executable, "-m", "uneven", "run", *command[1:], script, "--", *args]
    done = run_forked([str(word) for word in starter], cwd=folder)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"accuracy (\S+)", done.stdout)  # lines of another rank may come last
    assert float(found[-1]) > 0.5
    values: dict[str, torch.Tensor] = torch.load(folder / "model.pt")
    return values


DEVICES = ("--devices", "cpu,cpu@0.4", "--progress", "off")


def test_the_digits_on_two_devices_are_those_of_the_plain_script(tmp_path: Path) -> None:
    plain = params(tmp_path, "plain_mnist.py")
    ours = params(tmp_path, "mnist.py", *DEVICES, "--global-batch-size", "50")
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
def test_the_digits_train_without_waiting(tmp_path: Path) -> None:
    params(tmp_path, "mnist.py", *DEVICES, "--policy", "async", "--batch-size", "25")


def test_the_sentences_on_two_devices_are_those_of_the_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runpy.run_path(str(EXAMPLES / "plain_finetune.py"), run_name="__main__")

    def run(**settings: Any) -> dict[str, Any]:
        context = ProcessContext(
            LaunchEnvironment(ALONE), settings={"devices": "cpu,cpu@0.4", "progress": "off", **settings}
        )
        monkeypatch.setattr("uneven.launch.context._contexts", [context])
        return runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")

    ours = run(global_batch_size=20)
    for name, value in plain["model"].state_dict().items():
        if not name.endswith("in_proj_bias"):  # keys' biases have no gradient, and Adam makes steps of its rounding
            torch.testing.assert_close(ours["model"].state_dict()[name], value, rtol=1e-3, atol=2e-4)
    for batch in plain["test_loader"]:
        torch.testing.assert_close(ours["model"](batch), plain["model"](batch), rtol=1e-3, atol=1e-3)
    state = run(policy="async", batch_size=10)["state"]
    assert state.finished
    assert state.samples == 1200


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fit", "builder", "own_loop", "manual", "muon_gpt"])
@pytest.mark.parametrize(
    "starter", [("uneven", "run", "--devices", "cpu,cpu@0.4"), ("torchrun", "--standalone", "--nproc-per-node", "2")]
)
def test_every_example_runs_by_every_starter(name: str, starter: tuple[str, ...], tmp_path: Path) -> None:
    """Plainly started they are run by test_readme.py."""
    example = Path(__file__).parents[2] / "examples" / f"{name}.py"
    done = start([BIN / starter[0], *starter[1:], example], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # the first rank's alone
    assert float(line.split()[-1]) > 0.88


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("name", ["fit", "builder", "own_loop"])
@pytest.mark.parametrize("starter", ["python", "uneven", "torchrun"])
def test_every_example_runs_with_the_local_policies(name: str, policy: str, starter: str, tmp_path: Path) -> None:
    """By changing one word of the script, or none of it and one of the command line."""
    source = (Path(__file__).parents[2] / "examples" / f"{name}.py").read_text()
    command: list[str | Path] = [BIN / "uneven", "run", "--devices", "cpu,cpu@0.4", "--policy", policy]
    if starter != "uneven":
        source = source.replace('"balanced"', f'"{policy}"').replace(
            "batch_size=32", f'batch_size=32, policy="{policy}"'
        )
        assert policy in source
        command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"]
    if starter == "python":
        command = [sys.executable]
        if name != "own_loop":  # a loop of one's own needs a starter for several devices
            source = source.replace("epochs=3", 'epochs=3, devices="cpu,cpu@0.4"').replace(
                ".epochs(3)", '.epochs(3).devices("cpu,cpu@0.4")'
            )
            assert "cpu@0.4" in source
    (tmp_path / "example.py").write_text(source)
    done = start([*command, tmp_path / "example.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert float(line.split()[-1]) > 0.86
