"""THE STORY: check -> resolve the devices -> launch -> wait -> result.

`launch` checks everything that can fail before the first step, prints the resolved configuration once and
returns a Run at once; the training goes on beside the caller. `Run.join` waits for it.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from uneven import __version__
from uneven.comm.group import SoloGroup
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
from uneven.supervise import train_on_ranks
from uneven.timeline.export import Timeline
from uneven.timeline.record import TRAINING

Body = Callable[[threading.Event, Reporter], TrainedState]


class Run:
    """A run in progress. Ctrl-C during `join` stops it after the current step and saves its state."""

    def __init__(self, body: Body, config: RunConfig, devices: tuple[Device, ...], reporter: Reporter) -> None:
        self._body = body
        self._config = config
        self._devices = devices
        self._reporter = reporter
        self._stop = threading.Event()
        # Python < 3.13 takes a thread for ended when Ctrl-C hits Thread.join(), so we wait on our own event.
        self._done = threading.Event()
        self._state: TrainedState | None = None
        self._error: BaseException | None = None
        # A daemon: a caller that ends without joining must not leave the process training for nobody.
        self._thread = threading.Thread(target=self._work, name="uneven-run", daemon=True)
        atexit.register(self._end_with_the_process)
        self._thread.start()

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(str(device) for device in self._devices)

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
        try:
            self._state = self._keep(self._body(self._stop, self._reporter))
        except BaseException as error:  # handed to join(), which raises it in the caller's thread
            self._error = error
        finally:
            self._reporter.close()
            self._done.set()

    def _keep(self, state: TrainedState) -> TrainedState:
        assert state.timeline is not None, "a finished rank has a timeline"
        self._reporter.close()
        self._reporter.say(last_lines(state, state.timeline))
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
    devices = tuple(usable_devices()) if config.devices == "auto" else parse_devices(config.devices)
    for device in devices:
        check_device(device)
    config = _resolve_precision(config, devices[0])
    _check_together(config, devices)
    if config.out is not None:
        make_out_folder(config.out)
    reporter = Reporter(config.progress, title)
    reporter.say(describe(task, config, devices))
    body = _solo if len(devices) == 1 else train_on_ranks
    return Run(lambda stop, reporter: body(task, config, devices, stop, reporter), config, devices, reporter)


def _solo(
    task: Task, config: RunConfig, devices: tuple[Device, ...], stop: threading.Event, reporter: Reporter
) -> TrainedState:
    """One device needs no process of its own: it trains on the run's thread, in the caller's process."""
    from uneven.worker import Seat, Worker

    worker = Worker(task, config, Seat(0, devices), lambda _: SoloGroup(), stop, reporter)
    result = worker.train()
    return replace(result.state, timeline=Timeline.together([result.timeline]), log=[result.log])


def describe(task: Task, config: RunConfig, devices: tuple[Device, ...]) -> Sequence[str]:
    """The resolved configuration as it is printed at the start."""
    steps = -(-len(task.dataset) // config.slot_size(len(devices)))
    batch = f"{config.batch_size}" + (f" x {config.accumulate} accumulated" if config.accumulate > 1 else "")
    precision = config.precision
    if precision == "fp32" and any(device.kind == "cuda" for device in devices):
        precision += " (matrix products in TF32)"
    names = ",".join(str(device) for device in devices)
    lines = [
        f"uneven {__version__}: {len(task.dataset):,} samples, {config.epochs} epochs of {steps:,} steps",
        f"  device{'s' * (len(devices) > 1)} {names}   batch {batch}   precision {precision}   "
        f"compile {config.compile}   seed {config.seed}",
    ]
    if len(devices) > 1:
        lines.append(f"  policy {config.policy}   {config.slot_size(len(devices))} samples a step over all devices")
    if any(device.speed < 1 for device in devices):
        lines.append("  a device with @ is simulated: it sleeps after each step, so its speed is not exact")
    return lines


def last_lines(state: TrainedState, timeline: Timeline) -> list[str]:
    """How the run went: totals, and where each rank's time was spent."""
    longest = max(account.training_s for account in timeline.accounts)
    done = "trained" if state.finished else "stopped: trained"
    speed = state.samples / longest if longest else 0.0
    lines = [f"{done} {state.samples:,} samples in {longest:.1f} s ({speed:,.0f} samples/s)"]
    for lane, account in zip(timeline.lanes, timeline.accounts, strict=True):
        spent = "  ".join(f"{name} {100 * account.shares[name]:.1f} %" for name in TRAINING if account.shares[name])
        apart = account.wall_s - account.training_s
        own = sum(samples for _, _, samples in state.log[lane.rank])
        share = f"{100 * own / max(1, state.samples):.0f} % of the samples; " if len(timeline.lanes) > 1 else ""
        lines.append(f"  {lane.device}: {share}{spent}; outside it (setup, compile, evaluation) {apart:.1f} s")
    return lines


def _resolve_precision(config: RunConfig, device: Device) -> RunConfig:
    if config.precision != "auto":
        return config
    gpus = read_visible(read_torch(), read_gpus()).gpus if device.kind == "cuda" else ()
    gpu = next((gpu for gpu in gpus if gpu.index == device.index), None)
    return replace(config, precision=choose_precision(device, read_system(), gpu)[0])


def _check_together(config: RunConfig, devices: tuple[Device, ...]) -> None:
    """Refuse settings that are right by themselves but not with each other or these devices."""
    names = ",".join(str(device) for device in devices)
    for device in devices:
        if device.percent is not None:
            raise InputError(
                f"devices={names!r}: slices of a GPU are not trained on in this version; pass {device.torch_name!r}"
            )
    if config.compile == "graph" and devices[0].kind != "cuda":
        raise InputError(
            f"compile='graph' captures a CUDA graph, which {names} has not; use compile='off' or 'default'"
        )
    if len(devices) == 1:
        return
    if any(device.kind != "cpu" for device in devices):
        raise InputError(
            f"devices={names!r}: several devices with a CUDA one among them are not trained in this version; "
            "pass CPU devices, as in 'cpu,cpu@0.4', or one CUDA device"
        )
    if config.policy not in ("sync", "balanced"):
        raise InputError(
            f"policy={config.policy!r} on several devices is not in this version; pass policy='balanced' or 'sync'"
        )
    if config.shares is not None and len(config.shares) != len(devices):
        raise InputError(
            f"shares={config.shares!r} has {len(config.shares)} entries for {len(devices)} devices: {names}"
        )
    if config.shares is not None and config.policy == "sync":
        raise InputError("shares=... with policy='sync' contradict each other: sync shares equally; use 'balanced'")
    if config.backend == "nccl":
        raise InputError(f"backend='nccl' needs CUDA devices, got {names!r}; use backend='auto'")
