"""The training step after an installation: what it trains, and that a device which ends the process is its failure."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from uneven.install import check
from uneven.install.check import Checked, check_devices


def answer(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str) -> None:
    """The process ends in this way."""

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(check.subprocess, "run", run)


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


def test_a_device_that_ends_the_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, -11, f"a library prints\n{DEVICES}{CPU_OK}", "Segmentation fault\n")
    said: list[Checked] = []
    results = check_devices(Path(sys.executable), said.append)
    assert [(result.device, result.ok) for result in results] == [("cpu", True), ("cuda:0", False)]
    assert results[1].error == "signal 11: Segmentation fault"
    assert said == results
    assert str(results[1]) == "cuda:0: FAILED: signal 11: Segmentation fault"


def test_a_torch_that_does_not_import_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 1, "", "Traceback\nImportError: libcudart.so.13: not found\n")
    (result,) = check_devices(Path(sys.executable))
    assert result == Checked("torch", False, error="exit code 1: ImportError: libcudart.so.13: not found")
