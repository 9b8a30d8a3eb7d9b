"""Slices of a GPU: with CUDA MPS several processes train on one GPU at the same time, each on a percentage of it.

A launcher enters `sliced`: inside the block an MPS daemon of our own runs, with its own folders, and every process for
a slice is started with the variables that `sliced` yields. They take effect only if they are set before CUDA is
initialised. The daemon has a supervisor process (mps_supervisor.py), which ends it even if the launcher is killed.

Runs on one GPU at the same time need one daemon for all of them, since two would take turns on the GPU: whoever starts
such runs enters `shared_daemon` and passes on its variable.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from uneven.errors import InputError, MachineError, RankError
from uneven.hardware.device import Device
from uneven.hardware.gpus import read_gpus, read_visible
from uneven.hardware.mps_supervisor import CONTROL, END_S, daemon_variables, end_daemon, last_log_line
from uneven.hardware.torchbuild import read_torch

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
SHARED = "UNEVEN_MPS_HOME"  # the folder of a daemon that this launcher uses and does not end


def check_slices(devices: Sequence[Device]) -> None:
    """InputError if a GPU has both slices and a rank without a slice, whose use of the GPU MPS could not limit."""
    slices = [device for device in devices if device.percent is not None]
    for index in dict.fromkeys(device.index for device in slices):
        whole = [device for device in devices if device.index == index and device.percent is None]
        if not whole:
            continue
        taken = sum(device.percent or 0 for device in slices if device.index == index)
        rest = max(1, (100 - taken) // len(whole))
        fix = ",".join(f"{device.torch_name}%{rest}" if device in whole else str(device) for device in devices)
        raise InputError(
            f"devices={','.join(map(str, devices))!r}: {whole[0]} has no slice while another rank of cuda:{index} has "
            f"one; all ranks of a GPU are slices or none is: pass {fix!r}, or no % at all"
        )


def name_slice(device: Device) -> str | None:
    """The slice that this process computes on: the launcher's, or one of the user's own daemon; None for a whole GPU.

    A slice of 100 % is one, too: it goes through MPS.
    """
    if device.percent is not None:
        return str(device)
    percentage = os.environ.get(PERCENTAGE) if device.kind == "cuda" else None
    return f"{device} ({PERCENTAGE}={percentage})" if percentage else None


def oversubscribed(devices: Sequence[Device]) -> str | None:
    """A warning if the slices of a GPU add up to more than 100 %, which MPS allows; else None."""
    sums: dict[str, int] = {}
    for device in devices:
        sums[device.torch_name] = sums.get(device.torch_name, 0) + (device.percent or 0)
    over = [f"{name} add up to {percent} %" for name, percent in sums.items() if percent > 100]
    if not over:
        return None
    return f"slices of {', of '.join(over)}: they compete for multiprocessors, so a slice is slower than its percentage"


def require_mps(device: Device) -> None:
    """MachineError if the driver's MPS control program is not installed."""
    if shutil.which(CONTROL) is None:
        raise MachineError(
            f"device {str(device)!r}: CUDA MPS is not installed ({CONTROL} is not on PATH; it comes with the driver, "
            f"in Ubuntu as nvidia-compute-utils); {_fallback_hint(device)}"
        )


@contextmanager
def sliced(devices: Sequence[Device]) -> Iterator[list[dict[str, str]]]:
    """Yield the environment variables for each device's process; runs an MPS daemon inside if a device is a slice.

    The processes must have ended before the block does: shutdown of the daemon waits for its clients.
    """
    first = next((device for device in devices if device.percent is not None), None)
    if first is None:
        yield [{} for _ in devices]
        return
    daemon = _Daemon(first, os.environ.get(SHARED))
    try:
        yield [daemon.variables(device) for device in devices]
    except (RankError, MachineError) as error:
        if "MPS" not in str(error):
            raise
        # CUDA reports only that it could not connect. The reason is in a log that is deleted with the daemon.
        separator = "\n" if "\n" in str(error) else "; "
        raise type(error)(f"{error}{separator}last line of the CUDA MPS log: {daemon.last_log_line()}") from error
    finally:
        daemon.end()


@contextmanager
def shared_daemon(devices: Sequence[Device]) -> Iterator[dict[str, str]]:
    """Yield the variable by which all launchers inside the block use one daemon; empty if no device is a slice."""
    first = next((device for device in devices if device.percent is not None), None)
    if first is None or SHARED in os.environ:
        yield {}
        return
    daemon = _Daemon(first)
    try:
        yield {SHARED: str(daemon.home)}
    finally:
        daemon.end()


class _Daemon:
    """An MPS daemon and its supervisor, from construction to `end()`; if this process dies the supervisor ends it.

    With `home` it is somebody else's daemon, which is only used.
    """

    def __init__(self, device: Device, home: str | None = None) -> None:
        require_mps(device)
        self._home = None if home is None else Path(home)
        self._visible = _visible_by_uuid()
        self._supervisor: subprocess.Popen[bytes] | None = None
        if self._home is not None:
            return
        # The supervisor must import the same package; "" in sys.path is the current folder.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "uneven.hardware.mps_supervisor", str(os.getpid())],
            env=os.environ | self._visible | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        assert self._supervisor.stdout is not None
        try:
            answer = json.loads(self._supervisor.stdout.readline() or '{"error": "its supervisor ended silently"}')
            if answer["error"] is not None:
                raise MachineError(
                    f"device {str(device)!r}: CUDA MPS does not start: {answer['error']}; {_fallback_hint(device)}"
                )
        except BaseException:
            self.end()
            raise
        self._home = Path(answer["home"])

    @property
    def home(self) -> Path:
        assert self._home is not None, "it listens"
        return self._home

    def variables(self, device: Device) -> dict[str, str]:
        """The environment variables of a process that trains on this device; empty if it is not a slice."""
        if device.percent is None or self._home is None:
            return {}
        return {
            **self._visible,
            **daemon_variables(self._home),
            PERCENTAGE: str(device.percent),
        }

    def last_log_line(self) -> str:
        return (self._home and last_log_line(self._home, "server.log", "control.log")) or "(empty)"

    def end(self) -> None:
        """End the daemon and delete its folder, even if the supervisor hangs or was killed."""
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        with suppress(OSError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(END_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._supervisor.stdout.close()
        if self._home is not None and self._home.exists():
            end_daemon(self._home)


def _visible_by_uuid() -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES with UUIDs, for both the daemon and its clients.

    Indices would be applied twice: the server renumbers its visible GPUs from 0, and its clients index into those.
    """
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return {}
    uuids = [gpu.uuid for gpu in read_visible(read_torch(), read_gpus()).gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, uuids))} if uuids and all(uuids) else {}


def _fallback_hint(device: Device) -> str:
    return f"'{device.torch_name}@0.4' simulates a slower device without it"
