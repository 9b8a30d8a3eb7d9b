"""`uneven diagnose`: sections, exit code, and a machine with nothing installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.forked import run_forked
from uneven.cli.main import app
from uneven.install.builds import Build

SECTIONS = [
    "System",
    "GPUs and driver",
    "torch build",
    "Compatibility",
    "Precision",
    "Backends",
    "Network",
]


def diagnose(
    *arguments: str, without: tuple[str, ...] = (), path: str = "/usr/bin:/bin"
) -> "subprocess.CompletedProcess[str]":
    """Run in a process of its own, with some packages made to look not installed.

    Where it loads torch it is forked, which has that already.
    """
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    code = f"import sys; {hide}from uneven.cli.main import main; main()"
    command: list[str | Path] = [sys.executable, "-c", code, "diagnose", *arguments]
    env = {"PATH": path, "COLUMNS": "80", "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": "/nowhere"}
    if "torch" not in without:
        return run_forked(command, env=env)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def test_a_machine_with_torch_and_no_gpu_is_fine() -> None:
    pytest.importorskip("torch")
    done = diagnose(without=("pynvml",))
    if (
        "GPU 0" in done.stdout
        or "NVIDIA Container Toolkit" in done.stdout
        or "install the NVIDIA driver" in done.stdout
    ):
        pytest.skip("this machine has a GPU")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in SECTIONS] == SECTIONS
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1] == "All fine."
    assert "Note: no NVIDIA GPU" in done.stdout
    assert "ranks here use shared memory" in " ".join(done.stdout.split())


def test_a_bare_machine_reports_and_says_what_to_install() -> None:
    done = diagnose(without=("torch", "pynvml", "numpy"))
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert "Problem 1: torch is not installed" in done.stdout
    assert "fix: uneven setup" in done.stdout


def test_json_is_one_document_with_the_same_verdict() -> None:
    done = diagnose("--json", without=("torch", "pynvml"))
    found = json.loads(done.stdout)
    assert done.returncode == 3
    assert found["torch"]["installed"] is False
    assert found["problems"][0] == {"what": "torch is not installed", "fix": "uneven setup"}
    assert found["network"]["why"]
    assert found["advice"]["build"] is not None or found["gpus"]["gpus"]
    assert isinstance(found["builds"], list)


def test_the_other_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build("cu126", "2.13.0+cu126", "12.6", None, ("sm_61",), 5 * 2**30, "python", "index", is_active=True)
    monkeypatch.setattr("uneven.install.diagnosis.list_builds", lambda: [build])
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(app, ["diagnose"])
    lines = " ".join(done.stdout.split())
    assert "build cu126 torch 2.13.0+cu126 (CUDA 12.6), sm_61, active" in lines
    shown = json.loads(CliRunner().invoke(app, ["diagnose", "--json"]).stdout)["builds"]
    assert shown[0]["archs"] == ["sm_61"]
