"""Slices of a GPU: CUDA MPS lets several processes train on one side by side, each on a percentage of it.

`sliced` is all a launcher needs: while it lasts a daemon of our own runs, with folders of its own, and every process
that is to train on a slice is started with the variables it yields. They count only if they are there before CUDA is
initialised. The daemon belongs to a keeper (mpskeeper.py), so that it ends with the run even if the launcher is killed.
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
from uneven.hardware.gpus import read_gpus
from uneven.hardware.inventory import read_visible
from uneven.hardware.mpskeeper import CONTROL, END_S, end_daemon, last_words, variables
from uneven.hardware.torchbuild import read_torch


def check_slices(devices: Sequence[Device]) -> None:
    """InputError where a rank would train beside slices of its GPU without being one: MPS could not hold it back."""
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


def oversubscribed(devices: Sequence[Device]) -> str | None:
    """What to say of slices that add up to more than their GPU; MPS allows it."""
    sums: dict[str, int] = {}
    for device in devices:
        sums[device.torch_name] = sums.get(device.torch_name, 0) + (device.percent or 0)
    over = [f"{name} add up to {percent} %" for name, percent in sums.items() if percent > 100]
    if not over:
        return None
    return f"slices of {', of '.join(over)}: they take each other's multiprocessors, so their speeds are not their own"


def require_mps(device: Device) -> None:
    """MachineError where the driver's MPS programs are not installed."""
    if shutil.which(CONTROL) is None:
        raise MachineError(
            f"device {str(device)!r}: CUDA MPS is not installed ({CONTROL} is not on PATH; it comes with the driver, "
            f"in Ubuntu as nvidia-compute-utils); {_without(device)}"
        )


@contextmanager
def sliced(devices: Sequence[Device]) -> Iterator[list[dict[str, str]]]:
    """The variables of each device's process, in order; until the end a daemon runs, where a device is a slice.

    The processes must have ended before: the daemon waits a while for those that have not.
    """
    first = next((device for device in devices if device.percent is not None), None)
    if first is None:
        yield [{} for _ in devices]
        return
    daemon = _Daemon(first)
    try:
        yield [daemon.variables(device) for device in devices]
    except (RankError, MachineError) as error:
        if "MPS" not in str(error):
            raise
        # CUDA says no more than that it could not connect; the reason is in a log that is about to go.
        apart = "\n" if "\n" in str(error) else "; "
        raise type(error)(f"{error}{apart}CUDA MPS said: {daemon.last_words()}") from error
    finally:
        daemon.end()


class _Daemon:
    """An MPS daemon and its keeper. Life cycle: made, `end()`; the keeper ends it too when this process dies."""

    def __init__(self, device: Device) -> None:
        require_mps(device)
        self._home: Path | None = None
        self._named = _named_devices()
        # The keeper must find this package where we found it; "" stands for the current folder.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "uneven.hardware.mpskeeper", str(os.getpid())],
            env=os.environ | self._named | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )
        assert self._keeper.stdout is not None
        try:
            answer = json.loads(self._keeper.stdout.readline() or '{"error": "its keeper ended without a word"}')
            if answer["error"] is not None:
                raise MachineError(
                    f"device {str(device)!r}: CUDA MPS does not start: {answer['error']}; {_without(device)}"
                )
        except BaseException:
            self.end()
            raise
        self._home = Path(answer["home"])

    def variables(self, device: Device) -> dict[str, str]:
        """What a process that trains on this device needs in its environment: nothing, if it is no slice."""
        if device.percent is None or self._home is None:
            return {}
        return {**self._named, **variables(self._home), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(device.percent)}

    def last_words(self) -> str:
        return (self._home and last_words(self._home, "server.log", "control.log")) or "nothing"

    def end(self) -> None:
        """No process of the daemon and no folder is left, in whatever state the keeper is."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        if self._home is not None and self._home.exists():
            end_daemon(self._home)


def _named_devices() -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by UUID, for the daemon and its clients alike.

    Numbers would be counted twice: the daemon's server counts what they leave it from 0, and its clients count that.
    """
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return {}
    names = [gpu.uuid for gpu in read_visible(read_torch(), read_gpus()).gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, names))} if names and all(names) else {}


def _without(device: Device) -> str:
    return f"'{device.torch_name}@0.4' simulates a slower device without it"
