"""Where the host's time of a step goes on a CPU: what uneven adds to a plain PyTorch loop, part by part.

Usage: python tools/step_overhead.py [ROUNDS] [STEPS] [MODELS]     (default: 40 rounds of 20 steps, lenet,mlp)

Each model trains with batch 64 on one rank, and on the first of two (`balanced` and `async`, cpu,cpu), beside a plain
loop over the same data. The number of calls, of functions in Python and in C, does not depend on what else runs. All
figures are CPU time of the thread that trains, in us a step: waiting is in none of them. Segments of the plain loop, of
uneven, and of uneven with a clock around every part take turns; of each the least over the rounds is shown, since other
programs only add to it. Two ranks wait for each other, which the calls of `balanced` contain. A part's time is without
the parts inside it, and without what reading the clock costs.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uneven.bench import models
from uneven.bench.models.sets import load_set
from uneven.comm.group import SoloGroup
from uneven.comm.shared_memory import SharedMemoryGroup
from uneven.comm.torch_group import ProcessGroupCollectives
from uneven.comm.work import Work
from uneven.config import Task, resolve
from uneven.data.feed import TensorFeed
from uneven.data.tensors import TensorData
from uneven.errors import GroupLostError
from uneven.hardware.device import parse_devices
from uneven.launch.checks.preflight import resolve_auto
from uneven.launch.launcher import run_ranks
from uneven.launch.run_status import RankReport
from uneven.parallel.reducer import Reducer
from uneven.policy.events import Events
from uneven.policy.exact import Balanced, Fixed
from uneven.results.progress import Reporter
from uneven.step.eager import EagerStep
from uneven.timeline.record import Recorder
from uneven.train import gradient_sync
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.state import RunState
from uneven.train.synchronizer import Inbox
from uneven.train.worker import Worker

BATCH = 64
EPOCHS = 10**6
OWN_WORK = ("gather", "zero gradients", "forward", "backward", "optimizer")  # what a plain loop does, too
REST = "loop"  # what is in no part
Owner = Any  # a class or module whose function is timed
PARTS: dict[str, list[tuple[Owner, str]]] = {
    "gather": [(TensorFeed, "open")],
    "backward": [(Tensor, "backward")],
    "recorder": [(Recorder, "enter")],
    "learning rate": [(Engine, "begin_slot")],
    "backup": [(EagerStep, "begin")],
    "zero gradients": [(EagerStep, "_zero_gradients")],
    "loss": [(EagerStep, "weigh")],
    "check": [(EagerStep, "_host_check"), (EagerStep, "_own_gradients"), (EagerStep, "fault_of")],
    "largest gradient": [(Reducer, "largest_gradient")],
    "update": [(EagerStep, "apply"), (EagerStep, "prepare_update"), (EagerStep, "step_optimizer")],
    "hooks": [(Reducer, "_gradient_ready")],
    "rows and flags": [(Reducer, "finalize")],
    "collective": [(SharedMemoryGroup, "all_reduce"), (ProcessGroupCollectives, "all_reduce"), (Work, "wait")],
    "statistics": [(Engine, "was_first_of_its_size"), (Inbox, "read")],
    "wait": [(gradient_sync, "record_wait")],
    "policy": [
        *((kind, name) for kind in (Fixed, Balanced) for name in ("shares", "note", "fingerprint")),
        (GradientSync, "_follow_speeds"),
    ],
    "log": [(RunState, "commit")],
    "events": [(Events, "evaluates"), (Events, "saves")],
}


class Clock:
    """Adds up each part's own time; `cost` is what one timed call adds to its caller, and to itself."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._open: list[int] = []  # for every part that is running: the time of the parts inside it, in ns
        self._inside_ns, self._around_ns = 0, 0
        self._calibrate()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0)
            began = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - began
                self.totals[name] += took - self._open.pop() - self._inside_ns
                if self._open:
                    self._open[-1] += took + self._around_ns

        return call

    @contextmanager
    def around_parts(self) -> Iterator[None]:
        """Inside, all PARTS are timed."""
        found = [(owner, attribute, name) for name, places in PARTS.items() for owner, attribute in places]
        before = [owner.__dict__[attribute] for owner, attribute, _ in found]
        for (owner, attribute, name), function in zip(found, before, strict=True):
            setattr(owner, attribute, self.timed(name, function))
        try:
            yield
        finally:
            for (owner, attribute, _), function in zip(found, before, strict=True):
                setattr(owner, attribute, function)

    def _calibrate(self) -> None:
        """What an empty call seems to take itself, and what it takes on top of that."""
        calls = 20_000
        nothing = self.timed("calibration", lambda: None)
        began = time.thread_time_ns()
        for _ in range(calls):
            nothing()
        whole = (time.thread_time_ns() - began) // calls
        self._inside_ns = self.totals.pop("calibration") // calls
        self._around_ns = whole - self._inside_ns


class PlainLoop:
    """The loop that a user would write, on tensors in memory."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        self._model = task.make_model()
        self._optimizer = task.make_optimizer(self._model.parameters())
        self._train_step, self._data = task.train_step, task.dataset
        self._order = torch.randperm(len(task.dataset))
        self._next = 0

    def run(self, steps: int) -> float:
        """CPU time of a step in us."""
        began = time.thread_time_ns()
        for _ in range(steps):
            indices = self._order[self._next : self._next + BATCH]
            self._next = (self._next + BATCH) % (len(self._order) - BATCH)
            batch = self._data.take(indices, None)
            self._optimizer.zero_grad(set_to_none=True)
            self._train_step(self._model, batch).backward()
            self._optimizer.step()
        return (time.thread_time_ns() - began) / steps / 1e3


class UnevenLoop:
    """The worker's own loop, in segments."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._synchronizer = worker.prepare()
        self._stream = worker.engine.feed.stream(self._synchronizer.parts())
        self._synchronizer.reset_timer()
        self._clock = Clock()

    def run(self, steps: int) -> float:
        """CPU time of a step in us."""
        began = time.thread_time_ns()
        for _ in range(steps):
            self._step()
        return (time.thread_time_ns() - began) / steps / 1e3

    def run_timed(self, steps: int) -> dict[str, float]:
        """The parts of a step in us."""
        clock, eager = self._clock, self._worker.engine.step
        clock.totals.clear()
        stream, optimizer, train_step = self._stream, eager.optimizer, eager.train_step
        update = optimizer.step
        with clock.around_parts():
            self._stream = iter(_Timed(clock, "feed", stream))
            eager.train_step = clock.timed("forward", train_step)
            optimizer.step = clock.timed("optimizer", update)  # type: ignore[method-assign]
            step = clock.timed(REST, self._step)
            for _ in range(steps):
                step()
        self._stream, eager.train_step = stream, train_step
        optimizer.step = update  # type: ignore[method-assign]
        return {name: ns / steps / 1e3 for name, ns in clock.totals.items()}

    def _step(self) -> None:
        part, micros = next(self._stream)
        self._worker.train_part(self._synchronizer, part, micros)
        self._worker.recorder.enter("data")


class _Timed:
    """An iterator whose every item is timed."""

    def __init__(self, clock: Clock, name: str, inner: Iterator[Any]) -> None:
        self._next = clock.timed(name, inner.__next__)

    def __iter__(self) -> "_Timed":
        return self

    def __next__(self) -> Any:
        return self._next()


class Silent(Reporter):
    """Shows nothing: the ranks report no epochs."""

    def ranks(self, statuses: Sequence[dict[str, Any]], **_: Any) -> None:
        del statuses


COUNTED_STEPS = 400  # two windows and more of `async`


def count_calls(run: Callable[[int], float]) -> float:
    """Calls of a step, of functions in Python and in C."""
    calls = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        del frame, argument
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        run(COUNTED_STEPS)
    finally:
        sys.setprofile(None)
    return calls / COUNTED_STEPS


def measure(rounds: int, steps: int, worker: Worker, folder: Path | None = None) -> dict[str, Any]:
    """The program of a rank: segments in turn. A rank process leaves the figures in its folder."""
    torch.set_num_threads(1)
    with worker.recording():
        plain_loop, loop = PlainLoop(worker.task), UnevenLoop(worker)
        while worker.config.is_local and worker.rank_info.rank > 0:  # until rank 0 is done, and the group gone
            loop.run(steps)
        found: dict[str, list[Any]] = {"plain": [], "uneven": [], "parts": []}
        for turn in range(rounds + 1):
            results = plain_loop.run(steps), loop.run(steps), loop.run_timed(steps)
            if turn:  # the first is warm-up
                for name, result in zip(found, results, strict=True):
                    found[name].append(result)
        plain_calls, uneven_calls = count_calls(plain_loop.run), count_calls(loop.run)
    names = sorted({name for parts in found["parts"] for name in parts})
    least = {name: min(parts.get(name, 0.0) for parts in found["parts"]) for name in names}
    plain_us, uneven_us = min(found["plain"]), min(found["uneven"])
    added = {"added": uneven_us - plain_us, "calls": uneven_calls - plain_calls}
    result = {"plain": plain_us, "uneven": uneven_us, **added, "parts": least}
    if folder is not None:
        (folder / "overhead.json").write_text(json.dumps(result))
    return result


def program(rounds: int, steps: int, worker: Worker, folder: Path) -> None:
    with suppress(GroupLostError):
        measure(rounds, steps, worker, folder)


def measure_model(name: str, policy: str, rounds: int, steps: int) -> dict[str, Any]:
    recipe = models.get(name)
    devices = "cpu" if policy == "sync" else "cpu,cpu"
    rows: TensorData = load_set("mnist-mini").train
    task = Task(recipe.make_model, recipe.make_optimizer, recipe.train_step, rows, None, None)
    config = resolve({"batch_size": BATCH, "epochs": EPOCHS, "policy": policy, "devices": devices, "progress": "off"})
    parsed = parse_devices(devices)
    if len(parsed) == 1:
        info = RankInfo(0, parsed)
        return measure(
            rounds,
            steps,
            Worker(task, config, info, lambda _: SoloGroup(), Requests(), RankReport("cpu", Reporter("off"))),
        )
    config, _ = resolve_auto(config, parsed)
    content = (task, config, partial(program, rounds, steps))
    return run_ranks(content, parsed, Requests(), Silent("off"), _read)


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result-0" / "overhead.json").read_text())
    return found


def print_table(titles: Sequence[str], columns: Sequence[dict[str, Any]]) -> None:
    """A Markdown table: one row per part, the largest sum first."""
    names = {name for column in columns for name in column["parts"]}
    by_size = sorted(names, key=lambda name: -sum(column["parts"].get(name, 0.0) for column in columns))
    own, added = [n for n in OWN_WORK if n in names], [n for n in by_size if n not in OWN_WORK]
    print(f"| us of CPU time a step | {' | '.join(titles)} |")
    print(f"|---|{'---|' * len(titles)}")
    for label, key in (
        ("plain loop", "plain"),
        ("uneven", "uneven"),
        ("**added by uneven**", "added"),
        ("calls added", "calls"),
    ):
        print(f"| {label} | {' | '.join(f'{column[key]:.0f}' for column in columns)} |")
    for name in (*own, *added):
        cells = [f"{column['parts'][name]:.1f}" if name in column["parts"] else "-" for column in columns]
        print(f"| {name} | {' | '.join(cells)} |")


def main(rounds: int, steps: int, chosen: Sequence[str]) -> None:
    titles, columns = [], []
    for name in chosen:
        for policy in ("sync", "balanced", "async"):
            titles.append(f"{name}, {'one rank' if policy == 'sync' else policy}")
            columns.append(measure_model(name, policy, rounds, steps))
    print_table(titles, columns)


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = sys.argv[1:4]
    main(
        int(arguments[0]) if arguments else 40,
        int(arguments[1]) if arguments[1:] else 20,
        arguments[2].split(",") if arguments[2:] else ("lenet", "mlp"),
    )
