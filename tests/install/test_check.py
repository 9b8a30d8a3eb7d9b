"""The training step after an installation: what it trains, and that a device which ends the process is its failure."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from uneven.install import check
from uneven.install.check import Checked, check_devices


def answers(monkeypatch: pytest.MonkeyPatch, *processes: tuple[int, str, str]) -> list[int]:
    """Processes that end in these ways; the list collects how many devices each was told to skip."""
    skips: list[int] = []
    left = list(processes)

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        skips.append(int(command[-1]))
        return subprocess.CompletedProcess(command, *left.pop(0))

    monkeypatch.setattr(check.subprocess, "run", run)
    return skips


def test_the_step_trains_on_the_cpu() -> None:
    result = check.train("cpu")
    assert result["ok"]
    assert result["error"] is None
    assert 1.5 < result["loss"] < 4.0  # ten classes, an untrained model: ln 10 is 2.3


def test_a_loss_that_is_not_finite_or_weights_that_stay_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
    assert check.train("cpu")["error"].endswith("weights did not move")
    monkeypatch.undo()
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda x, y: x.sum() * float("nan"))
    assert check.train("cpu")["ok"] is False


DEVICES = '{"devices": ["cpu", "cuda:0", "cuda:1"]}\n'
CPU_OK = '{"device": "cpu", "name": "", "ok": true, "loss": 2.3, "error": null}\n'
LAST_OK = '{"device": "cuda:1", "name": "B", "ok": true, "loss": 2.3, "error": null}\n'


def test_a_device_that_ends_the_process_fails_and_those_after_it_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = (-11, f"a library prints\n{DEVICES}{CPU_OK}", "Segmentation fault\n")
    skips = answers(monkeypatch, crashed, (0, f"{DEVICES}{LAST_OK}", ""))
    said: list[Checked] = []
    results = check_devices(Path(sys.executable), said.append)
    assert skips == [0, 2]
    assert [(result.device, result.ok) for result in results] == [("cpu", True), ("cuda:0", False), ("cuda:1", True)]
    assert results[1].error == "signal 11: Segmentation fault"
    assert said == results
    assert str(results[1]) == "cuda:0: FAILED: signal 11: Segmentation fault"


def test_the_last_device_may_end_the_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    two = '{"devices": ["cpu", "cuda:0"]}\n'
    assert answers(monkeypatch, (-4, f"{two}{CPU_OK}", "")) == []
    assert [result.ok for result in check_devices(Path(sys.executable))] == [True, False]


def test_a_torch_that_does_not_import_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, (1, "", "Traceback\nImportError: libcudart.so.13: not found\n"))
    (result,) = check_devices(Path(sys.executable))
    assert result == Checked("torch", False, error="exit code 1: ImportError: libcudart.so.13: not found")
