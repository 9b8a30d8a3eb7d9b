"""`uneven diagnose`: sections, exit code, and a machine with nothing installed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.forked import run_forked
from tests.hardware.fakes import CPU_BUILD
from tests.install.test_advice import MACHINES
from uneven.cli.diagnose import _advised
from uneven.cli.main import app
from uneven.hardware.cards import AmdGpu, AmdReport
from uneven.hardware.diagnosis import diagnose as run_diagnosis
from uneven.hardware.gpus import Gpu, GpuReport
from uneven.hardware.inventory import VisibleGpus
from uneven.hardware.torchbuild import TorchBuild
from uneven.hardware.wheels import WHEELS
from uneven.install.advice import advise
from uneven.install.builds import Build
from uneven.install.machine import read_record

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*)
    echo '0, NVIDIA GeForce RTX 5060 Ti, 16384, GPU-aaaa, 00000000:01:00.0, Disabled, 12.0'
    echo '1, NVIDIA GeForce GTX 1060 6GB, 6144, GPU-bbbb, 00000000:02:00.0, [N/A], 6.1' ;;
  *) echo '| Driver Version: 580.82.07    CUDA Version: 13.0 |' ;;
esac
"""
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
    done = diagnose(without=("torch", "psutil", "pynvml", "numpy"))
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert "Problem 1: torch is not installed" in done.stdout
    assert "fix: uneven setup" in done.stdout


def test_two_unlike_gpus_and_a_torch_for_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("needs a CPU build of torch")
    script = tmp_path / "nvidia-smi"
    script.write_text(SMI)
    script.chmod(0o755)
    done = diagnose(without=("pynvml",), path=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 3, done.stderr
    assert "MISSING  NVIDIA GeForce RTX 5060 Ti (sm_120)" in done.stdout
    assert "MISSING  NVIDIA GeForce GTX 1060 6GB (sm_61)" in done.stdout
    assert "no wheel covers sm_61 beside sm_120" in done.stdout
    # The command must stand on one line, to be copied.
    assert "uneven torch build --archs '6.1;12.0'" in done.stdout


K40 = Gpu(1, "Tesla K40c", sm="sm_35")
CU130 = TorchBuild(True, "2.13.0+cu130", "13.0", None, WHEELS[0].archs, gloo=True)
AMD = AmdReport((AmdGpu(0, "gfx1100"), AmdGpu(1, "gfx1036")), "6.4.1", True)


@pytest.mark.parametrize(
    ("name", "parts", "says"),
    [
        ("one-card", {"gpus": GpuReport((K40,), "470.1", "11.4")}, None),
        ("one-card", {"torch": CU130, "gpus": GpuReport((Gpu(0, "RTX 4090", sm="sm_89"), K40), "580.1", "13.0")}, None),
        ("no-gpu", {}, None),
        ("rocm", {"amd": AmdReport((AmdGpu(0, "gfx1036"),))}, None),
        ("one-card", {}, "but torch 2.13.0+cpu is a CPU build"),
        ("one-card", {"gpus": GpuReport((Gpu(0, "K80"),), "470.1", "11.4")}, "update the NVIDIA driver to 525.60.13"),
        ("two-archs-no-wheel", {"torch": CU130}, "uneven torch build --archs '6.1;12.0'"),
        ("card-without-driver", {}, "install the NVIDIA driver 580.65.06"),
        ("card-without-driver", {"torch": TorchBuild(installed=False)}, "install the NVIDIA driver 580.65.06"),
        ("container-without-gpu", {}, "--gpus all"),
        ("rocm", {"amd": AMD}, "uneven setup  (or: pip install --force-reinstall 'torch>=2.8,<2.10' --index-url"),
        ("jetson", {}, "install NVIDIA's own wheel"),
    ],
)
def test_it_finds_a_problem_where_setup_has_something_to_do(name: str, parts: dict[str, Any], says: str | None) -> None:
    """With the CPU build, unless another one is named; `says` is part of the problem or of its fix."""
    machine = replace(read_record(MACHINES / f"{name}.json"), **{"torch": CPU_BUILD, **parts})
    advice = advise(machine)
    visible = VisibleGpus(machine.gpus.gpus)
    found = run_diagnosis(machine.system, machine.gpus, machine.torch, visible, (), advised=_advised(advice))
    assert found.is_fine == advice.is_installed == (says is None), found.problems
    assert says is None or says in "\n".join(f"{problem.what}: {problem.fix}" for problem in found.problems)
    assert any("Tesla K40c (sm_35): it stays unused" in note for note in found.notes) == (K40 in machine.gpus.gpus)


def test_json_is_one_document_with_the_same_verdict() -> None:
    done = diagnose("--json", without=("torch", "pynvml"))
    found = json.loads(done.stdout)
    assert done.returncode == 3
    assert found["torch"]["installed"] is False
    assert found["problems"][0] == {"what": "torch is not installed", "fix": "uneven setup"}
    assert found["network"]["why"]
    assert found["advice"]["build"] is not None or found["gpus"]["gpus"]
    assert isinstance(found["builds"], list)


def test_the_other_builds_and_the_record_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build("cu126", "2.13.0+cu126", "12.6", None, ("sm_61",), 5 * 2**30, "python", "index", is_active=True)
    monkeypatch.setattr("uneven.cli.diagnose.list_builds", lambda: [build])
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(app, ["diagnose", "--record", str(tmp_path / "here.json")])
    lines = " ".join(done.stdout.split())
    assert "build cu126 torch 2.13.0+cu126 (CUDA 12.6), 5.0 GiB, sm_61, active" in lines
    assert json.loads((tmp_path / "here.json").read_text())["format"] == "uneven-machine-1"
    shown = json.loads(CliRunner().invoke(app, ["diagnose", "--json"]).stdout)["builds"]
    assert shown[0]["archs"] == ["sm_61"]
