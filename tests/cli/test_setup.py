"""`uneven setup`: what it prints, asks, refuses, runs and checks; no test installs anything."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.terminal import CTRL_C, CTRL_D, Terminal
from tests.hardware.fakes import CPU_BUILD, NO_GPUS, TWO_GPUS, make_system
from uneven.cli import main as command_line
from uneven.hardware.torchbuild import TorchBuild
from uneven.install import steps
from uneven.install.advice import Machine
from uneven.install.check import Checked

Call = Callable[..., tuple[int, str, str]]
BARE = Machine(make_system(), NO_GPUS)
READY = Machine(make_system(), NO_GPUS, CPU_BUILD)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that would have installed something."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr("uneven.cli.setup.run_step", lambda step, say: commands.append(step.command) or say("done"))
    monkeypatch.setattr(steps.shutil, "which", lambda _: None)
    return commands


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: list[tuple[str, ...]]) -> Call:
    """`uneven setup` on a machine that is passed in, with a training step that passes; (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")
    good = Checked("cpu", True, loss=2.3)

    def check_devices(python: Path, say: Callable[[Checked], None]) -> list[Checked]:
        say(good)
        return [good]

    monkeypatch.setattr("uneven.cli.setup.check_devices", check_devices)

    def run(*arguments: str, on: Machine = BARE) -> tuple[int, str, str]:
        monkeypatch.setattr("uneven.cli.setup.read_machine", lambda: on)
        monkeypatch.setattr(sys, "argv", ["uneven", "setup", *arguments])
        code: Any = 0
        try:
            command_line.main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return run


def test_a_dry_run_shows_the_advice_and_installs_nothing(call: Call, installed: list[tuple[str, ...]]) -> None:
    code, out, err = call("--dry-run", "--json", on=Machine(make_system(), TWO_GPUS))
    found = json.loads(out)["advice"]
    assert (code, err, found["kind"], found["build"]) == (0, "", "source", None)
    code, out, _ = call("--dry-run", on=Machine(make_system(), TWO_GPUS))
    assert code == 0
    assert "\n  uneven torch build --archs '6.1;12.0'\n" in out  # on a line of its own, to be copied
    assert installed == []


def test_the_cpu_build_on_a_machine_without_gpu_then_the_check(call: Call, installed: list[tuple[str, ...]]) -> None:
    code, out, err = call("-y")
    assert (code, err) == (0, "")
    (command,) = installed
    assert command[0] == sys.executable
    assert command[-3:] == ("torch>=2.8", "--index-url", "https://download.pytorch.org/whl/cpu")
    assert "--force-reinstall" not in command
    assert "cpu: ok, loss 2.300" in out


def test_without_a_terminal_and_without_y_it_ends_with_the_hint(call: Call, installed: list[tuple[str, ...]]) -> None:
    code, _, err = call()
    assert (code, installed) == (2, [])
    assert "add -y" in err
    assert "--dry-run" in err


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_at_a_terminal_it_asks(
    answer: str, code: int, call: Call, installed: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    found, _, err = call()
    assert found == code
    assert f"Install into {sys.prefix}? [y/N]: " in err
    assert len(installed) == (1 if code == 0 else 0)


@pytest.mark.parametrize(("key", "code"), [(CTRL_C, 130), (CTRL_D, 2)], ids=["Ctrl-C", "Ctrl-D"])
def test_a_question_that_is_not_answered_installs_nothing(
    key: str, code: int, call: Call, installed: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(key))
    found, _, err = call()
    assert (found, installed) == (code, [])
    assert ("nobody answered: add -y" in err) == (key == CTRL_D)


def test_a_build_that_is_asked_for_comes_with_its_warning(call: Call) -> None:
    out = call("--dry-run", "--build", "cu126", on=Machine(make_system(), TWO_GPUS))[1]
    assert "cu126 has no code for NVIDIA GeForce RTX 5060 Ti (sm_120)" in " ".join(out.split())


def test_the_right_build_is_only_checked_unless_forced(call: Call, installed: list[tuple[str, ...]]) -> None:
    code, out, _ = call(on=READY)
    assert (code, installed) == (0, [])
    assert "nothing: torch 2.13.0+cpu is installed" in out
    assert "cpu: ok" in out
    assert call("--force", "-y", on=READY)[0] == 0
    assert "--force-reinstall" in installed[0]


def test_where_nothing_can_be_installed_it_says_what_to_do(call: Call, installed: list[tuple[str, ...]]) -> None:
    code, out, err = call("-y", "--json", on=Machine(make_system(), TWO_GPUS))
    assert (code, out, installed) == (3, "", [])
    assert err.startswith("uneven: setup cannot install torch here: no prebuilt torch covers sm_61 beside sm_120")
    assert "uneven torch build" in err
    assert call("-y", "--build", "cu126", on=Machine(make_system(), TWO_GPUS))[0] == 1  # installed, but shows no GPU
    assert installed[0][-1].endswith("/cu126")


def test_a_gpu_build_that_shows_no_gpu_has_failed(call: Call) -> None:
    build = TorchBuild(True, "2.10.0", "12.8", None, ("sm_61", "sm_120"), gloo=True)
    code, _, err = call(on=Machine(make_system(), TWO_GPUS, build))
    assert code == 1
    assert "torch shows none of NVIDIA GeForce RTX 5060 Ti (sm_120)" in err
    assert err.endswith("uneven: torch does not train on cuda\n")


def test_a_mirror_takes_the_place_of_the_index(call: Call, installed: list[tuple[str, ...]]) -> None:
    assert call("-y", "--index-url", "https://mirror/simple")[0] == 0
    assert installed[0][-2:] == ("--index-url", "https://mirror/simple")


def test_json_after_an_installation(call: Call) -> None:
    code, out, err = call("-y", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["installed"] is True
    assert found["checks"] == [{"device": "cpu", "ok": True, "name": "", "loss": 2.3, "error": None}]
    assert found["environment"] == sys.prefix
    assert found["command"][1:4] == ["-m", "pip", "install"]
    assert "done" in err


WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
import cloudpickle, numpy, psutil, pynvml, rich, safetensors, typer
import uneven
from uneven.cli.main import main
def call(line):
    sys.argv = ["uneven", *line.split()]
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0
fine = ["--help", "--version", "data list", "data get mnist-mini", "devices", "setup --dry-run", "run --help"]
print("FINE", [call(line) for line in fine], file=sys.stderr)
needing = ["diagnose", "run --devices cpu train.py", "bench list", "demo", "preflight"]
print("NEEDING", [call(line) for line in needing], file=sys.stderr)
for name in ("fit", "Ddp"):
    try:
        getattr(uneven, name)
    except ImportError as error:
        assert isinstance(error, uneven.MachineError)
        print("IMPORT", error, file=sys.stderr)
"""


def test_the_command_line_and_our_dependencies_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import uneven\nuneven.fit\n")
    root = str(Path(__file__).parents[2])
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "HOME": str(tmp_path), "COLUMNS": "100"}
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120, check=True)
    line = "torch is not installed: `uneven setup` chooses and installs the build for this machine"
    assert "FINE [0, 0, 0, 0, 0, 0, 0]" in done.stderr
    assert "NEEDING [3, 3, 3, 3, 3]" in done.stderr
    assert done.stderr.count(f"uneven: {line}\n") == 4  # all of those but diagnose, which reports
    assert done.stderr.count(f"IMPORT {line}\n") == 2
    assert "Traceback" not in done.stderr
    assert "install the cpu build of torch" in done.stdout or "no GPU" not in done.stdout
