"""The launcher's side of a run on several ranks: start, watch, collect. There is no coordinator: it only watches.

The ranks agree among themselves; the launcher holds the store, shows their posts, passes a stop request on, and ends
everything when one fails, falls silent or hangs. When `train_on_ranks` returns or raises, no process and no file of
the run is left, the daemon that serves slices of a GPU included.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from uneven.comm.store import get_text, open_store
from uneven.config import RunConfig, Task
from uneven.errors import InputError, RankError, StoppedError
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import Device
from uneven.hardware.mps import check_slices, oversubscribed, sliced
from uneven.launch.cleanup import make_private_folder, remove
from uneven.launch.payload import drop_tensors, write_payload
from uneven.launch.processes import INTERRUPTED, RankProcesses, describe_exit
from uneven.policy.axis import Axis
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState, proved
from uneven.timeline.timeline import Timeline

T = TypeVar("T")
Program = Callable[[Any, Path], None]  # (worker, folder for its results), run in place of training

LOOK_EVERY_S = 0.1
SILENT_S = 15.0  # without a post a rank is lost
STUCK_S = 30.0  # at least, and ten times its longest step, without a new slot
GRACE_S = 1.5  # for the other ranks' own accounts, once one has failed
NEWS_S = 0.5  # until a rank's latest post has surely been heard
STOP_S = 10.0  # at least, for all ranks to stop after the same step
START_S = 120.0  # for a rank's first post: loading torch from a cold disk takes its time
PATIENT = ("setup", "compile", "evaluation", "checkpoint")  # phases that may last
PASSIVE = ("wait", "communication")  # in these a rank waits for others


@dataclass
class _Seen:
    """What the launcher knows of a rank, from its posts."""

    post: dict[str, Any]
    heard_s: float
    moved_s: float
    longest_step_s: float = 0.0

    def hear(self, post: dict[str, Any], now_s: float) -> None:
        if post["count"] == self.post.get("count"):
            return
        self.heard_s = now_s
        if post["slot"] != self.post.get("slot") or post["phase"] in PATIENT:
            steps = max(1, post["slot"] - self.post.get("slot", 0))
            if post["phase"] not in PATIENT and self.post.get("phase") not in PATIENT:
                self.longest_step_s = max(self.longest_step_s, (now_s - self.moved_s) / steps)
            self.moved_s = now_s
        self.post = post


def train_on_ranks(
    task: Task,
    config: RunConfig,
    devices: tuple[Device, ...],
    stop: threading.Event,
    reporter: Reporter,
    program: Program | None = None,
) -> TrainedState:
    """Train on one process per device; returns rank 0's state with everybody's timeline."""
    return run_ranks(
        (task, config, program), devices, stop, reporter, lambda folder: _collect(folder, task, config, len(devices))
    )


def run_ranks(
    content: tuple[Task, RunConfig, Program | None] | None,
    devices: tuple[Device, ...],
    stop: threading.Event,
    reporter: Reporter,
    collect: Callable[[Path], T],
    script: dict[str, Any] | None = None,
) -> T:
    """Run a program on one process per device (None: train), then `collect` from the folder they wrote to.

    In place of any content it may be a user's script: its path, args and the settings that stand above its own.
    """
    check_slices(devices)
    folder = make_private_folder()
    store, port = open_store()
    try:
        plan = assign_cores(devices, available_cores())
        reporter.say([f"  {note}" for note in (plan.note, oversubscribed(devices)) if note])
        record = {
            "port": port,
            "launcher": os.getpid(),
            "devices": [str(device) for device in devices],
            "cores": plan.cores,
            "threads": plan.threads,
            "script": script,
        }
        (folder / "plan.json").write_text(json.dumps(record))
        if content is not None:
            _write(content, folder)
        with sliced(devices) as variables:
            ranks = RankProcesses(folder, list(plan.threads), variables)
            try:
                _watch(ranks, store, folder, devices, stop, reporter)
                return collect(folder)
            finally:
                ranks.end()
    finally:
        remove(folder)
        del store


def _write(content: Any, folder: Path) -> None:
    try:
        write_payload(content, folder)
    except Exception as error:
        raise InputError(
            f"the model, optimizer, step or data set cannot be sent to the rank processes ({error}); "
            "use functions and data that can be pickled, or one device"
        ) from error


def _watch(
    ranks: RankProcesses,
    store: Any,
    folder: Path,
    devices: tuple[Device, ...],
    stop: threading.Event,
    reporter: Reporter,
) -> None:
    """Until all ranks have ended well; raises when one does not."""
    now = time.monotonic()
    seen = [_Seen({}, now, now) for _ in devices]
    stopped_s: float | None = None
    loaded = False
    while True:
        codes = ranks.exit_codes()  # before the posts, so that the last ones are heard
        now = time.monotonic()
        for rank, one in enumerate(seen):
            text = get_text(store, f"post/{rank}")
            if text is not None:
                one.hear(json.loads(text), now)
        reporter.ranks([one.post for one in seen])
        well = (0,) if stopped_s is None else (0, INTERRUPTED)
        if all(code in well for code in codes):
            return
        if any(code not in (None, *well) for code in codes):
            raise _failure(ranks, folder, devices)
        _check_deadlines(seen, codes, devices, now)
        if not loaded and all(get_text(store, f"loaded/{rank}") for rank in range(len(devices))):
            loaded = True
            drop_tensors(folder)
        if stop.is_set() and stopped_s is None:
            store.set("stop", "1")
            stopped_s = now
        if stopped_s is not None and now - stopped_s > NEWS_S and not any("total" in one.post for one in seen):
            raise StoppedError("the run was stopped before its first step: nothing was trained, nothing was saved")
        if stopped_s is not None and any(one.post.get("phase") in ("evaluation", "checkpoint") for one in seen):
            stopped_s = now
        if stopped_s is not None and now - stopped_s > max(STOP_S, 3 * max(one.longest_step_s for one in seen)):
            raise RankError("the ranks did not stop when asked and were ended; nothing was saved")
        time.sleep(LOOK_EVERY_S)


def _check_deadlines(seen: list[_Seen], codes: list[int | None], devices: tuple[Device, ...], now: float) -> None:
    alive = [rank for rank, code in enumerate(codes) if code is None]
    for rank in alive:
        silent_s = now - seen[rank].heard_s
        if silent_s > (SILENT_S if seen[rank].post else START_S):
            raise RankError(f"{_name(rank, devices)} fell silent {silent_s:.0f} s ago (stopped or swapped out?)")
    limits = {rank: max(STUCK_S, 10 * seen[rank].longest_step_s) for rank in alive}
    if any(now - seen[rank].moved_s <= limits[rank] for rank in alive):
        return  # someone moves: the others are waiting for it, not stuck
    for rank in alive:
        if seen[rank].post and seen[rank].post["phase"] not in (*PASSIVE, *PATIENT):
            phase, slot = seen[rank].post["phase"], seen[rank].post["slot"]
            raise RankError(f"{_name(rank, devices)} is stuck in {phase} at slot {slot} for {limits[rank]:.0f} s")


def _failure(ranks: RankProcesses, folder: Path, devices: tuple[Device, ...]) -> Exception:
    """The cause of a failed run: a rank that was killed, else the first one that failed by itself."""
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and any(code is None for code in ranks.exit_codes()):
        time.sleep(0.02)
    errors = {}
    for rank, code in enumerate(ranks.exit_codes()):
        path = folder / f"error-{rank}.json"
        if path.exists():
            errors[rank] = json.loads(path.read_text())
        elif code not in (None, 0):
            assert code is not None
            return RankError(f"{_name(rank, devices)} {describe_exit(code)}")
    # A rank whose peer is gone fails too, a moment later and with words about the connection.
    own = [error for error in errors.values() if "peer" not in error["what"]] or list(errors.values())
    first = min(own, key=lambda error: error["time"])
    name = _name(first["rank"], devices)
    if first["kind"] == "input":
        return InputError(f"{name}: {first['message']}")
    return RankError(f"{name} failed: {first['what']}\n\nIts own traceback:\n{first['traceback']}")


def _name(rank: int, devices: tuple[Device, ...]) -> str:
    return f"rank {rank} ({devices[rank]} on {socket.gethostname()})"


def _collect(folder: Path, task: Task, config: RunConfig, size: int) -> TrainedState:
    homes = [folder / f"result-{rank}" for rank in range(size)]
    state = TrainedState.load(homes[0])
    records = [json.loads((home / "log.json").read_text()) for home in homes]
    timelines = [Timeline.from_json(json.loads((home / "timeline.json").read_text())) for home in homes]
    axis = Axis(len(task.dataset), config.slot_size(size), config.epochs)
    logs, rounds = [one["parts"] for one in records], [one["rounds"] for one in records]
    return proved(replace(state, folder=None), axis, logs, rounds, timelines)
