"""Measure how fast each device trains while all train at the same time, for `uneven devices --measure`.

Each device has its own process (`python -m uneven.hardware.measure ORDER`), pinned as in a run. A child warms up,
prints "ready", waits for "go" on stdin, trains timed segments and prints one JSON line. Invariant: when measure()
returns or raises, every child has ended. A child whose parent has died reads end-of-file and ends too.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from uneven.errors import MachineError
from uneven.hardware.cores import CorePlan, pin
from uneven.hardware.device import Device, parse_device
from uneven.hardware.mps import check_slices, sliced
from uneven.hardware.throttle import Throttle

BATCH_SIZE = 64
SEGMENTS = 5
WARM_UP_S = 1.0
# In addition to the measured seconds: importing torch and initialising CUDA take up to a minute on a cold disk.
START_LIMIT_S = 90.0


@dataclass(frozen=True)
class DeviceSpeed:
    """The speed of a device in samples/s, with its slowest and fastest segment."""

    device: Device
    speed: float
    slowest: float
    fastest: float


class _Child:
    """A measuring process. Life cycle: started by the constructor, expect(), go(), expect(), stop() in any state."""

    def __init__(
        self, device: Device, cores: tuple[int, ...], threads: int, seconds: float, variables: Mapping[str, str]
    ) -> None:
        self.device = device
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        order = {"device": str(device), "cores": cores, "threads": threads, "seconds": seconds}
        command = [sys.executable, "-m", "uneven.hardware.measure", json.dumps(order)]
        # Set before torch is imported: OpenMP reads the variable once.
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **variables}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=env,
        )

    def expect(self, start: str) -> str:
        """The next line that begins with `start` (libraries may print others); MachineError if the child ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines() or ["it ended without a message"]
        raise MachineError(
            f"device {str(self.device)!r} cannot be measured: {lines[-1].strip()}; run 'uneven diagnose'"
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died; expect() reports why
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        # Not communicate(): stdin may hold an unwritten line for a dead child.
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.process.wait()


def measure(
    devices: Sequence[Device],
    plan: CorePlan,
    seconds: float = 5.0,
    limit_s: float | None = None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> list[DeviceSpeed]:
    """The speed of every device while all train at the same time on the plan's cores.

    `on_phase` is called with a description of each phase. MachineError if a device fails or `limit_s` passes.
    """
    check_slices(devices)
    limit_s = seconds + START_LIMIT_S if limit_s is None else limit_s
    with sliced(devices) as variables:
        return _measure_all(devices, plan, seconds, limit_s, on_phase, variables)


def _measure_all(
    devices: Sequence[Device],
    plan: CorePlan,
    seconds: float,
    limit_s: float,
    on_phase: Callable[[str], None],
    variables: Sequence[Mapping[str, str]],
) -> list[DeviceSpeed]:
    children: list[_Child] = []
    is_late = threading.Event()

    def kill_all() -> None:
        is_late.set()
        for child in children:
            child.process.kill()

    # A blocked readline returns when its child is killed, so this timer bounds every wait below.
    watchdog = threading.Timer(limit_s, kill_all)
    watchdog.daemon = True
    try:
        on_phase("starting one process per device")
        for device, cores, threads, environment in zip(devices, plan.cores, plan.threads, variables, strict=True):
            children.append(_Child(device, cores, threads, seconds, environment))
        watchdog.start()
        for child in children:
            child.expect("ready")
        on_phase(f"training side by side for {seconds:g} s")
        for child in children:
            child.go()
        answers = [json.loads(child.expect("{")) for child in children]
    except MachineError as error:
        if is_late.is_set():
            raise MachineError(
                f"measuring took longer than {limit_s:g} s and was ended; run it again on an idle machine"
            ) from error
        raise
    finally:
        watchdog.cancel()
        for child in children:
            child.stop()
    return [DeviceSpeed(device, **answer) for device, answer in zip(devices, answers, strict=True)]


def _make_step(name: str) -> Callable[[], None]:
    """A function that runs one training step of a LeNet with BatchNorm on random images."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    device = torch.device(name)
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(BATCH_SIZE, 1, 28, 28, device=device)
    labels = torch.randint(10, (BATCH_SIZE,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def _train(step: Callable[[], None], synchronize: Callable[[], None], seconds: float, throttle: Throttle) -> float:
    """Samples/s over at least `seconds`, including the throttle's sleeps."""
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        step_start = time.perf_counter()
        step()
        if throttle.speed != 1.0:
            # The sleep is a multiple of the device's time, not of the host's time to enqueue the step.
            synchronize()
            throttle.pause(time.perf_counter() - step_start)
        steps += 1
    synchronize()
    return steps * BATCH_SIZE / (time.perf_counter() - start)


def _child_main(order: dict[str, Any]) -> dict[str, Any] | None:
    device, seconds = parse_device(order["device"]), float(order["seconds"])
    pin(order["cores"])

    import torch

    torch.set_num_threads(max(1, order["threads"]))
    if device.kind == "cuda":
        torch.cuda.set_device(device.index or 0)
    synchronize = torch.cuda.synchronize if device.kind == "cuda" else lambda: None
    step = _make_step(device.torch_name)
    _train(step, synchronize, min(WARM_UP_S, seconds), Throttle(1.0))
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        return None
    throttle = Throttle(device.speed)
    speeds = [_train(step, synchronize, seconds / SEGMENTS, throttle) for _ in range(SEGMENTS)]
    # Segments have equal length, so the mean of their speeds is the overall speed.
    return {"speed": sum(speeds) / SEGMENTS, "slowest": min(speeds), "fastest": max(speeds)}


if __name__ == "__main__":
    answer = _child_main(json.loads(sys.argv[1]))
    if answer is not None:
        print(json.dumps(answer), flush=True)
