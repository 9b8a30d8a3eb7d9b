import json
import subprocess
import sys
from typing import Any

import pytest

from uneven.errors import InputError, MachineError
from uneven.hardware import measure as module
from uneven.hardware.cores import assign_cores
from uneven.hardware.device import parse_devices
from uneven.hardware.measure import measure

from .fake_mps import FakeMps
from .fake_mps import fake_mps as fake_mps


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Every process that measure() starts."""
    found: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def start(*args, **kwargs):  # type: ignore[no-untyped-def]
        found.append(real(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    return found


def test_slices_are_measured_under_a_daemon_of_their_own(fake_mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = parse_devices("cuda:0%60,cuda:0%24")
    order: list[str] = []

    class Child:
        def __init__(self, *given: Any) -> None:
            order.append(given[-1]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])

        def expect(self, _start: str) -> str:
            return json.dumps({"speed": 1.0, "slowest": 1.0, "fastest": 1.0})

        def go(self) -> None: ...

        def stop(self) -> None:
            order.append(f"stopped after {fake_mps.quits()} quits")

    monkeypatch.setattr(module, "_Child", Child)
    assert [speed.device for speed in measure(devices, assign_cores(devices, range(4)))] == list(devices)
    assert order == ["60", "24", *["stopped after 0 quits"] * 2]
    assert fake_mps.quits() == 1
    assert fake_mps.left() == []


def test_a_slice_beside_a_whole_gpu_is_refused() -> None:
    devices = parse_devices("cuda:0,cuda:0%24")
    with pytest.raises(InputError, match="all ranks of a GPU are slices or none is"):
        measure(devices, assign_cores(devices, range(4)))


def test_a_device_that_fails_is_named_and_every_process_ends(started) -> None:  # type: ignore[no-untyped-def]
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() and torch.cuda.device_count() > 7:
        pytest.skip("this machine really has cuda:7")
    devices = parse_devices("cpu,cuda:7")
    with pytest.raises(MachineError) as caught:
        measure(devices, assign_cores(devices, range(2)), seconds=0.2)
    message = str(caught.value)
    assert "'cuda:7' cannot be measured: " in message
    assert "uneven diagnose" in message
    assert "\n" not in message
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


@pytest.mark.real_start
def test_the_time_limit_ends_every_process(started) -> None:  # type: ignore[no-untyped-def]
    # No torch is imported this fast: the limit always strikes first, and nothing has to be waited for.
    devices = parse_devices("cpu,cpu")
    with pytest.raises(MachineError, match=r"took longer than 0\.01 s and was ended"):
        measure(devices, assign_cores(devices, range(2)), seconds=0.2, limit_s=0.01)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_ctrl_c_ends_every_process(started, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def interrupt(_self: object, _start: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Child, "expect", interrupt)
    devices = parse_devices("cpu,cpu")
    with pytest.raises(KeyboardInterrupt):
        measure(devices, assign_cores(devices, range(2)), seconds=0.2)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_a_child_without_a_parent_ends_without_an_answer() -> None:
    pytest.importorskip("torch")
    order = json.dumps({"device": "cpu", "cores": [], "threads": 1, "seconds": 0.1})
    command = [sys.executable, "-m", "uneven.hardware.measure", order]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ready"]
