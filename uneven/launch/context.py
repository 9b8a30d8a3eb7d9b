"""This process as one rank among others that `uneven run` or torchrun started. At most one member per process.

Training inside it needs no further processes: `joiner` forms a group through the starter's store, anew for every run
of the script. The starter's stop request reaches the run that is on, or interrupts the script where none is.
"""

import json
import signal
import threading
import zlib
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import nn

from uneven.comm.fingerprint import agree, describe_tensors
from uneven.comm.gather import gather_bytes
from uneven.comm.group import Group, form_group
from uneven.comm.store import get_text
from uneven.config import RunConfig
from uneven.errors import InputError
from uneven.hardware.backend import is_crowded
from uneven.hardware.cores import assign_cores, available_cores, pin
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.inventory import usable_devices
from uneven.launch.environment import Started, read_torchrun
from uneven.launch.heartbeat import Heartbeat
from uneven.policy.axis import Axis
from uneven.results.state import TrainedState, proved
from uneven.timeline.timeline import Timeline
from uneven.train.rank_info import RankResult
from uneven.train.worker import Worker

_contexts: list["ProcessContext"] = []
_solo_settings: dict[str, Any] = {}  # for a script that `uneven run` executes in its own process


def process_context() -> "ProcessContext | None":
    """Who this process is among the ranks somebody started; None in a process started plainly."""
    if not _contexts:
        started = read_torchrun()
        if started is None:
            return None
        _contexts.append(ProcessContext(started))
        _contexts[0].listen_to_signals()
    return _contexts[0]


def set_process_context(context: "ProcessContext") -> None:
    """From now on this process is that member: called once, before the user's script runs."""
    assert not _contexts, "a process is one rank"
    _contexts.append(context)


def set_solo_settings(settings: Mapping[str, Any]) -> None:
    """The command line of a single-device `uneven run`, which executes the script in this process.

    They hold to the end of the process: a thread of the script may still train after its last line.
    """
    _solo_settings.update(settings)


def command_line_settings() -> Mapping[str, Any]:
    """The settings `uneven run` was given, which take precedence over the script's; empty in any other process."""
    context = process_context()
    return _solo_settings if context is None else {**context.settings, **_solo_settings}


class ProcessContext:
    """Life cycle: one per process, to its end. One run at a time: `attend`, train, `attend(None)`."""

    def __init__(
        self,
        started: Started,
        devices: tuple[Device, ...] | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.settings = settings  # those of the command line of `uneven run`; empty under torchrun
        self.rank, self.world_size, self.by = started.rank, started.world_size, started.by
        self.asked = threading.Event()  # the starter wants us to stop
        self.note: str | None = None
        self._started = started
        self._devices = devices
        self._is_placed = devices is not None  # by the launcher
        self._stop: threading.Event | None = None
        self._worker: Worker | None = None
        self._runs = 0
        self._group: Group | None = None
        self._poster: Heartbeat | None = None

    def devices(self, setting: str) -> tuple[Device, ...]:
        """One device per rank, in rank order. Under torchrun 'auto' is a CUDA device each, where there are enough."""
        if self._devices is not None:
            return self._devices
        if setting == "auto":
            found = [device for device in usable_devices() if device.kind == "cuda"]
            local = self._started.local_size
            has_enough = len(found) >= local
            devices = tuple(found[rank % local] if has_enough else Device("cpu") for rank in range(self.world_size))
        else:
            devices = parse_devices(setting)
        if any(device.percent is not None for device in devices):
            names = ",".join(device.torch_name for device in devices)
            raise InputError(
                f"devices={setting!r}: {self.by} has started this process already, which is too late for a slice; set "
                "CUDA_MPS_PIPE_DIRECTORY and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE for each process yourself and pass "
                f"{names!r}, or start the script by: uneven run --devices {setting}"
            )
        if len(devices) != self.world_size:
            raise InputError(
                f"devices={setting!r} names {len(devices)} for the {self.world_size} processes that {self.by} started; "
                f"name {self.world_size}, leave devices='auto', or start with --nproc-per-node {len(devices)}"
            )
        self._place(devices)
        return devices

    def joiner(self, config: RunConfig, devices: tuple[Device, ...], samples: int) -> Callable[[nn.Module], Group]:
        """What forms this run's group, once all ranks are found to train the same model by the same settings."""
        settings = {name: value for name, value in config.to_json().items() if name not in ("out", "progress")}
        lines = [f"samples = {samples}", *(f"{name} = {value}" for name, value in settings.items())]
        local = self.of_this_machine(devices)
        device = torch.device(devices[self.rank].torch_name)
        return lambda model: self._join(model, lines, device, config.backend, is_crowded(local))

    def join(self, model: nn.Module) -> Group:
        """A group for a model trained by hand."""
        return self._join(model, [])

    def _join(
        self,
        model: nn.Module,
        settings: list[str],
        device: torch.device = torch.device("cpu"),  # noqa: B008, it is a constant
        backend: str = "cpu",
        is_crowded: bool = False,
    ) -> Group:
        if self._group is not None:
            raise InputError(
                "another group of this process is still open: call finish() on the loop, or close() on what Ddp.wrap "
                "gave, before the next one starts"
            )
        self._runs += 1
        store = self._started.reach(f"run/{self._runs}")
        agree(store, self.rank, self.world_size, settings, what="was given other settings", where="settings")
        agree(store, self.rank, self.world_size, describe_tensors([*model.named_parameters(), *model.named_buffers()]))
        self._group = form_group(store, self.rank, self.world_size, device, backend, is_crowded)
        return self._group

    def leave(self) -> None:
        """Close the open group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def attend(self, worker: Worker | None, stop: threading.Event | None = None) -> None:
        """This worker trains now; a stop request sets `stop`. None: the script is by itself again."""
        self._worker, self._stop = worker, stop
        if stop is not None and self.asked.is_set():
            stop.set()

    def post(self, deserted: Callable[[], None]) -> None:
        """Tell the launcher a few times a second that this rank is alive, and hear from it."""
        self._poster = Heartbeat(self._started.port, self.rank, self._show, _Request(self), deserted)

    def stop_posting(self) -> None:
        if self._poster is not None:
            self._poster.close()

    def was_asked(self) -> bool:
        """Has the launcher asked to stop, even if the request has not arrived here yet?"""
        return self.asked.is_set() or get_text(self._started.reach(""), "stop") is not None

    def request_stop(self) -> None:
        """Once: the run that is on ends after its step; without one the script is interrupted."""
        self.asked.set()
        if self._stop is not None:
            self._stop.set()
        else:
            # A signal, not a flag: it also ends a sleep or a read.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def listen_to_signals(self) -> None:
        """Under torchrun Ctrl-C and SIGTERM are the stop request; a second Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            return

        def asked(number: int, frame: FrameType | None) -> None:
            is_second = self.asked.is_set()
            self.asked.set()
            if self._stop is None or (is_second and number == signal.SIGINT):
                signal.default_int_handler(number, frame)
            self._stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, asked)

    def _show(self) -> dict[str, Any]:
        worker = self._worker
        if worker is None:  # the user's own code: it may take its time
            return {"slot": 0, "phase": "setup", "total": 0}
        return {**worker.show(), "total": worker.axis.samples}

    def of_this_machine(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        first = self.rank - self._started.local_rank
        return devices[first : first + self._started.local_size]

    def _place(self, devices: tuple[Device, ...]) -> None:
        """torchrun gives every rank all cores and one thread: take this rank's own cores instead."""
        if self._is_placed:
            return
        self._is_placed = True
        plan = assign_cores(self.of_this_machine(devices), available_cores())
        self.note = plan.note
        pin(plan.cores[self._started.local_rank])
        torch.set_num_threads(plan.threads[self._started.local_rank])


class _Request(threading.Event):
    """What the poster sets, over and over, while the launcher asks to stop."""

    def __init__(self, context: ProcessContext) -> None:
        super().__init__()
        self._context = context

    def set(self) -> None:
        is_first = not self.is_set()
        super().set()
        if is_first:
            self._context.request_stop()


def collect(group: Group, result: RankResult, axis: Axis) -> TrainedState:
    """The run's state with everybody's timeline and log, the same on every rank, and proved exactly once."""
    if group.world_size == 1:
        return proved(result.state, axis, [result.log], [result.rounds], [result.timeline])
    own = {"timeline": result.timeline.to_json(), "log": result.log, "rounds": result.rounds}
    everyone = [
        json.loads(zlib.decompress(data))
        for data in gather_bytes(group, zlib.compress(json.dumps(own).encode(), level=1))
    ]
    logs = [[(slot, first, samples) for slot, first, samples in one["log"]] for one in everyone]
    rounds = [[(due, entered, merged, scale) for due, entered, merged, scale in one["rounds"]] for one in everyone]
    return proved(result.state, axis, logs, rounds, [Timeline.from_json(one["timeline"]) for one in everyone])
