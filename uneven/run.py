"""THE STORY: check -> resolve the devices -> launch -> wait -> result.

`launch` checks everything that can fail before the first step, prints the resolved configuration once and
returns a Run at once; the training goes on beside the caller. `Run.join` waits for it.
"""

import atexit
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from uneven import __version__
from uneven.config import RunConfig, Task, check_task
from uneven.errors import InputError
from uneven.files import make_out_folder
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.gpus import read_gpus
from uneven.hardware.inventory import read_visible, usable_devices
from uneven.hardware.precision import choose_precision
from uneven.hardware.preflight import check_device, refuse_unsupported
from uneven.hardware.system import read_system
from uneven.hardware.torchbuild import read_torch
from uneven.progress import Reporter
from uneven.state import TrainedState
from uneven.timeline.record import TRAINING, Account


class Run:
    """A run in progress. Ctrl-C during `join` stops it after the current step and saves its state."""

    def __init__(self, task: Task, config: RunConfig, device: Device, reporter: Reporter) -> None:
        self._task = task
        self._config = config
        self._device = device
        self._reporter = reporter
        self._stop = threading.Event()
        # Python < 3.13 takes a thread for ended when Ctrl-C hits Thread.join(), so we wait on our own event.
        self._done = threading.Event()
        self._state: TrainedState | None = None
        self._error: BaseException | None = None
        # A daemon: a caller that ends without joining must not leave the process training for nobody.
        self._thread = threading.Thread(target=self._work, name="uneven-rank-0", daemon=True)
        atexit.register(self._end_with_the_process)
        self._thread.start()

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def devices(self) -> tuple[str, ...]:
        return (str(self._device),)

    def stop(self) -> None:
        """Ask the run to stop after its current step; `join` then returns the state reached."""
        self._stop.set()

    def join(self) -> TrainedState:
        """Wait for the end; returns the trained state, or raises what went wrong."""
        try:
            self._done.wait()
        except KeyboardInterrupt:
            self._interrupted()
            raise
        self._ended()
        if self._error is not None:
            raise self._error
        assert self._state is not None, "a rank that neither failed nor returned a state"
        return self._state

    def _interrupted(self) -> None:
        """First Ctrl-C: stop after this step and save. A second one ends the process at once."""
        self.stop()
        try:
            self._done.wait()
        except KeyboardInterrupt:
            os._exit(130)
        self._ended()
        if self._error is not None:
            raise self._error
        state = self._state
        if state is None:
            return
        folder = state.folder or state.save(Path("runs") / time.strftime("interrupted-%Y%m%d-%H%M%S"))
        self._reporter.say([f"stopped after {state.slot} steps; the state is in {folder}"])

    def _ended(self) -> None:
        # The interpreter must not shut down under a thread that is still freeing tensors: torch's destructors
        # would then be unwound in the middle, which aborts the process ("terminate called ...").
        self._thread.join()
        atexit.unregister(self._end_with_the_process)

    def _end_with_the_process(self) -> None:
        """The caller leaves without joining: end after the current step, for the same reason."""
        self.stop()
        self._thread.join()

    def _work(self) -> None:
        from uneven.worker import Worker

        try:
            worker = Worker(self._task, self._config, self._device, self._stop, self._reporter)
            self._state = self._keep(worker.train())
        except BaseException as error:  # handed to join(), which raises it in the caller's thread
            self._error = error
        finally:
            self._reporter.close()
            self._done.set()

    def _keep(self, state: TrainedState) -> TrainedState:
        assert state.timeline is not None, "a finished rank has a timeline"
        self._reporter.close()
        self._reporter.say([last_line(state.timeline.accounts[0], state)])
        if self._config.out is None:
            return state
        state.save(self._config.out)
        state.timeline.save(self._config.out)
        self._reporter.say([f"state and timeline are in {self._config.out}"])
        return replace(state, folder=self._config.out)


def launch(task: Task, config: RunConfig, *, title: str = "train") -> Run:
    """Check, print the configuration, start; returns at once."""
    refuse_unsupported()
    check_task(task)
    device = _one_device(config.devices)
    check_device(device)
    config = _resolve_precision(config, device)
    _check_together(config, device)
    if config.out is not None:
        make_out_folder(config.out)
    reporter = Reporter(config.progress, title)
    reporter.say(describe(task, config, device))
    return Run(task, config, device, reporter)


def describe(task: Task, config: RunConfig, device: Device) -> Sequence[str]:
    """The resolved configuration as it is printed at the start."""
    slot_size = config.batch_size * config.accumulate
    steps = -(-len(task.dataset) // slot_size)
    batch = f"{config.batch_size}" + (f" x {config.accumulate} accumulated" if config.accumulate > 1 else "")
    precision = config.precision
    if precision == "fp32" and device.kind == "cuda":
        precision += " (matrix products in TF32)"
    lines = [
        f"uneven {__version__}: {len(task.dataset):,} samples, {config.epochs} epochs of {steps:,} steps",
        f"  device {device}   batch {batch}   precision {precision}   compile {config.compile}   "
        f"seed {config.seed}",
    ]
    if device.speed < 1:
        lines.append(f"  {device} is simulated: it sleeps after each step, so its speed is not exact")
    return lines


def last_line(account: Account, state: TrainedState) -> str:
    shares = "  ".join(
        f"{name} {100 * account.shares[name]:.1f} %" for name in TRAINING if account.shares[name]
    )
    apart = account.wall_s - account.training_s
    done = "trained" if state.finished else "stopped: trained"
    speed = state.samples / account.training_s
    return (
        f"{done} {state.samples:,} samples in {account.training_s:.1f} s ({speed:,.0f} samples/s): {shares}; "
        f"outside it (setup, compile, evaluation) {apart:.1f} s"
    )


def _one_device(devices: str) -> Device:
    """The device to train on; this version trains on one, and says so rather than leave the others idle."""
    if devices == "auto":
        return usable_devices()[0]
    parsed = parse_devices(devices)
    if len(parsed) != 1:
        raise InputError(
            f"devices={devices!r} names {len(parsed)} devices; this version trains on one at a time: "
            f"pass devices={str(parsed[0])!r}"
        )
    if parsed[0].percent is not None:
        raise InputError(
            f"devices={devices!r}: slices of a GPU are not trained on in this version; "
            f"pass devices={parsed[0].torch_name!r}"
        )
    return parsed[0]


def _resolve_precision(config: RunConfig, device: Device) -> RunConfig:
    if config.precision != "auto":
        return config
    gpus = read_visible(read_torch(), read_gpus()).gpus if device.kind == "cuda" else ()
    gpu = next((gpu for gpu in gpus if gpu.index == device.index), None)
    return replace(config, precision=choose_precision(device, read_system(), gpu)[0])


def _check_together(config: RunConfig, device: Device) -> None:
    if config.compile == "graph" and device.kind != "cuda":
        raise InputError(
            f"compile='graph' captures a CUDA graph, which {device} has not; use compile='off' or 'default'"
        )
