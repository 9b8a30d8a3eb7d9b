"""Does a disturbed run grow? `python -m tests.faults.endurance --minutes 120 --policy async`. Exit code 0 if not.

One run of three CPU ranks with `restarts`: every few seconds one of them, never the first, is killed, stopped for good
or stopped for a moment; it is started again, joins, and is hit again. Meanwhile memory, threads and file descriptors of
the launcher and of rank 0, the only ones that live as long as the run, and the run's files in /dev/shm are sampled.
What a run keeps of every step that it trained (its log) grows with the steps, so a step is made to take its time.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from statistics import mean
from typing import Any

import psutil
import torch
from torch import nn

from tests.faults.cases import POLICIES
from uneven import Callback, TensorData, TrainedState, fit
from uneven.bench.chaos.inject import Injector, rank_processes
from uneven.launch.watch import lost

ROOT = Path(__file__).parents[2]
START = "from tests.faults.endurance import train; train()"
RANKS, WIDTH, SAMPLES, BATCH = 3, 64, 3000, 4
STEP_MS = 100.0
SILENT_S = 12.0  # longer than in the storm: on a busy machine rank 0, which must live, was silent for 2 s
PAUSE_S = 1.0  # the longest stop; nobody is lost by it
END_S = 120.0  # for the run to end after its time
LEAST = 8  # samples that a verdict needs: a quarter is two of them
# What the mean of the last quarter may lie above that of the first. Memory: beside what the log itself takes.
LIMITS = {"rss": 24.0, "uss": 12.0, "threads": 3.0, "fds": 8.0, "shm_files": 8.0, "shm": 2.0}
LOG_BYTES = 300.0  # that a process may keep of each trained slot: in its log, its rounds and the records of them
MB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One look at the run; memory in MB."""

    minute: float
    process: str  # launcher or rank 0
    rss: float
    uss: float
    threads: int
    fds: int
    shm: float
    shm_files: int
    slots: int  # that rank 0 knows to be trained


class StopInTime(Callback):
    """Ends the run when its minutes are over, and tells how far it is."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.end_s, self.told_s = folder, time.time() + 60.0 * minutes, 0.0

    def on_step(self, info: Any) -> None:
        if not info.is_lead:
            return
        now = time.time()
        if now > self.end_s:
            info.stop("its time is over")
        if now - self.told_s > 1.0:
            self.told_s = now
            (self.folder / "slots.new").write_text(str(info.step))
            (self.folder / "slots.new").rename(self.folder / "slots")


class Net(nn.Module):
    """Slow on purpose, and without a random number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def train() -> None:
    """In the launcher's process."""
    folder, policy, minutes = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    lost.SILENT_S = SILENT_S

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(STEP_MS / 1e3)
        return model(batch[0]).square().mean()

    fit(
        model=Net,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        step=step,
        dataset=TensorData(torch.randn(SAMPLES, WIDTH), torch.zeros(SAMPLES)),
        callbacks=[StopInTime(folder, minutes)],
        batch_size=BATCH,
        epochs=10**6,
        devices=",".join(["cpu"] * RANKS),
        policy=policy,
        restarts=10**6,
        save_every="1 min",
        keep_last=2,
        out=folder / "run",
        progress="lines",
        **({} if policy in ("sync", "balanced") else {"lr_scale": 1.0}),
    )


class Tree:
    """The launcher and its ranks. Faults are done to processes that are its children, and to no others."""

    def __init__(self, launcher: "subprocess.Popen[bytes]", folder: Path, seed: int) -> None:
        self.launcher, self._folder = psutil.Process(launcher.pid), folder
        self._chance = random.Random(seed)
        self._injector = Injector()
        self.done = {"kill": 0, "stop": 0, "wake": 0}

    def ranks(self) -> dict[int, psutil.Process]:
        """Those that run, by the numbers of their processes."""
        return {number: process for number, (process, _) in rank_processes(self.launcher.pid).items()}

    def disturb(self) -> None:
        others = [process for number, process in sorted(self.ranks().items()) if number]
        if not others:
            return
        # Those that are only starting are hit less often: others must get to join.
        ages_s = [max(0.1, min(30.0, time.time() - process.create_time())) for process in others]
        victim = self._chance.choices(others, ages_s)[0]
        kind = self._chance.choices(["kill", "stop", "wake"], [6, 2, 2])[0]
        pause_s = self._chance.uniform(0.05, PAUSE_S)
        self.done[kind] += self._injector.do("pause" if kind == "wake" else kind, victim, pause_s)

    def wake(self) -> None:
        self._injector.wake()

    def sample(self, minute: float) -> Iterator[Sample]:
        homes = (Path("/dev/shm"), Path(tempfile.gettempdir()))
        paths = [
            file for home in homes for at in home.glob(f"uneven-*-{self.launcher.pid}-*") for file in at.rglob("*")
        ]
        sizes = []
        for path in paths:
            with suppress(OSError):
                sizes.append(path.stat().st_size if path.is_file() else 0)
        try:
            slots = int((self._folder / "slots").read_text())
        except OSError:
            slots = 0
        first = self.ranks().get(0)
        if first is None:
            return  # the run has ended
        for name, process in (("launcher", self.launcher), ("rank 0", first)):
            if process.is_running():
                memory = process.memory_full_info()
                looked = (memory.rss / MB, memory.uss / MB, process.num_threads(), process.num_fds())
                yield Sample(minute, name, *looked, sum(sizes) / MB, len(sizes), slots)


def run(policy: str, minutes: float, every_s: float, sample_s: float, seed: int, folder: Path) -> dict[str, Any]:
    """Start the run, disturb and sample it until it has ended; what was seen."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", START, str(folder), policy, str(minutes)]
    samples: list[Sample] = []
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, env=env, start_new_session=True)
    tree, chance = Tree(process, folder, seed), random.Random(seed + 1)
    began_s = time.monotonic()
    fault_s = sample_at_s = began_s
    try:
        while process.poll() is None and time.monotonic() < began_s + 60.0 * minutes + END_S:
            now, is_on = time.monotonic(), (folder / "slots").exists()
            tree.wake()
            if not is_on:
                fault_s, sample_at_s = now + every_s, now
            elif now >= fault_s:
                fault_s = now + chance.expovariate(1.0 / every_s)
                tree.disturb()
            if is_on and now >= sample_at_s:
                sample_at_s = now + sample_s
                with suppress(psutil.Error, OSError):  # what it looks at may end meanwhile
                    samples += (new := list(tree.sample((now - began_s) / 60.0)))
                    print(" | ".join(_row(one) for one in new), file=sys.stderr, flush=True)
            time.sleep(0.05)
        code = process.poll()
    except KeyboardInterrupt:  # tell what was seen so far
        code = 130
    finally:
        left = _end(process, tree)
    finished = code == 0 and TrainedState.load(folder / "run")
    stopped = finished.stopped if finished else None
    words = (folder / "said").read_text()
    counts = {
        "losses": words.count("samples since the last"),
        "joins": words.count(" joins: ") + words.count(" join: "),
        **tree.done,
    }
    return {"code": code, "stopped": stopped, "left": left, "samples": samples, "said": words, "counts": counts}


def _end(process: "subprocess.Popen[bytes]", tree: Tree) -> int:
    """Nothing of the run is left; returns how many ranks had outlived their launcher."""
    ranks = [] if process.poll() is not None else list(tree.ranks().values())
    left = 0
    for path in Path("/dev/shm").glob(f"uneven-*-{process.pid}-*"):
        left += process.poll() is not None and path.is_dir()
    if process.poll() is None:
        process.kill()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()
    return left


def _row(one: Sample) -> str:
    shm = f"{one.shm_files} files {one.shm:.1f} MB in /dev/shm"
    memory = f"rss {one.rss:.1f} uss {one.uss:.1f} MB, {one.threads} threads, {one.fds} fds"
    return f"{one.minute:6.1f} min {one.process}: {memory}, {shm}, {one.slots} slots"


@dataclass(frozen=True)
class Trend:
    """One figure of one process over the run: means of its first and last quarter, and the slope of a straight line."""

    process: str
    figure: str
    first: float
    last: float
    per_hour: float
    allowed: float

    @property
    def grows(self) -> bool:
        return self.last - self.first > self.allowed


def find_trends(samples: Sequence[Sample]) -> list[Trend]:
    """The first tenth is left out: there the run warms up."""
    found = []
    for process in dict.fromkeys(one.process for one in samples):
        own = [one for one in samples if one.process == process]
        own = own[len(own) // 10 :]
        quarter = max(1, len(own) // 4)
        slots = mean(one.slots for one in own[-quarter:]) - mean(one.slots for one in own[:quarter])
        for figure, limit in LIMITS.items():
            values = [float(getattr(one, figure)) for one in own]
            allowed = limit + (slots * LOG_BYTES / MB if figure in ("rss", "uss") else 0.0)
            slope = 60.0 * _slope([one.minute for one in own], values)
            found.append(Trend(process, figure, mean(values[:quarter]), mean(values[-quarter:]), slope, allowed))
    return found


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    x, y = mean(xs), mean(ys)
    spread = sum((one - x) ** 2 for one in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else 0.0


def _table(trends: Sequence[Trend]) -> str:
    rows = [("process", "figure", "first quarter", "last quarter", "per hour", "may grow by", "")]
    for one in trends:
        numbers = [f"{value:,.1f}" for value in (one.first, one.last, one.per_hour, one.allowed)]
        rows.append((one.process, one.figure, *numbers, "GROWS" if one.grows else ""))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def judge(seen: dict[str, Any], trends: Sequence[Trend]) -> list[str]:
    """What is wrong, in words."""
    found = [f"{one.figure} of {one.process} grows by {one.last - one.first:,.1f}" for one in trends if one.grows]
    if seen["code"] != 0 or not seen["stopped"]:
        last = [line for line in seen["said"].splitlines() if line.strip()][-1:]
        found.append(f"the run ended with {seen['code']}: {last}")
    if seen["left"]:
        found.append(f"{seen['left']} folders are left in /dev/shm")
    if len(seen["samples"]) < 2 * LEAST:
        found.append(f"{len(seen['samples']) // 2} samples are too few for a verdict")
    return found


def main(words: Sequence[str] | None = None, show: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--policy", choices=POLICIES, default="async")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two faults, on average")
    parser.add_argument("--sample", type=float, default=30.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder for the run, its output and samples.json")
    given = parser.parse_args(words)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="endurance-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    seen = run(given.policy, given.minutes, given.every, given.sample, given.seed, folder)
    (folder / "samples.json").write_text(json.dumps([asdict(one) for one in seen["samples"]]))
    trends = find_trends(seen["samples"])
    show(_table(trends))
    show(", ".join(f"{many} {name}" for name, many in seen["counts"].items()))
    faults = judge(seen, trends)
    show("\n".join(faults) or "nothing grows")
    if faults:
        show(f"what it said is in {folder / 'said'}")
    elif given.keep is None:
        rmtree(folder, ignore_errors=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
