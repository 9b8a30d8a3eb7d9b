"""Everything that can happen to a rank, made to happen: for the tests of launch/."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.forked import ForkedPopen
from uneven import InputError, TensorData, TrainedState, fit
from uneven.errors import RankError
from uneven.step.measure import REPEATS

REHEARSED = 2 * (1 + REPEATS)  # steps in which a rank measures its cost, alone
FAULTY = 6  # the step of rank 1 at which something happens; on CUDA a few more than REHEARSED are run beforehand
MANY_EPOCHS = 500  # with async the other rank may do all of three before this one comes to that step
CPUS = "cpu,cpu"
# What stands before a script that trains on two ranks; a plain one names its devices itself.
STARTS: dict[str, tuple[str | Path, ...]] = {
    "plain": (sys.executable,),
    "uneven run": (sys.executable, "-m", "uneven", "run", "--devices", CPUS),
    "torchrun": (Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2"),
}
Step = Callable[[int, int], None]  # (rank, which step of this rank)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nothing_left(pids: list[int], launcher: int, *, within_s: float = 100.0) -> None:
    """No rank and no folder of this launcher; they may take a moment where nobody waits for them."""
    assert len(pids) == 2, pids
    end = time.monotonic() + within_s
    homes = (Path("/dev/shm"), Path("/tmp"))
    while True:
        running = [pid for pid in pids if alive(pid)]
        folders = [path for home in homes for path in home.glob(f"uneven-*-{launcher}-*")]
        if not running and not folders:
            return
        assert time.monotonic() < end, f"left behind: processes {running}, folders {folders}"
        time.sleep(0.05)


def train(
    folder: Path,
    fault: Step,
    policy: str,
    width: Callable[[int], int] = lambda _: 1,
    devices: str = CPUS,
    on_fault: str = "end",
    epochs: int = 3,
) -> TrainedState:
    """Two ranks in processes of their own; `fault` runs at the start of every step, in the rank."""
    steps = [0]

    def make() -> nn.Module:
        import os
        import sys

        rank = int(sys.argv[2])
        (folder / f"rank-{rank}").write_text(str(os.getpid()))
        return nn.Linear(4, width(rank))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        import sys

        steps[0] += 1
        if steps[0] > REHEARSED:
            fault(int(sys.argv[2]), steps[0] - REHEARSED)
        return model(batch).square().mean()

    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)

    return fit(
        model=make,
        optimizer=make_optimizer,
        step=step,
        dataset=TensorData(torch.randn(64, 4), transform=lambda rows, _: rows[0]),
        batch_size=4,
        epochs=epochs,
        devices=devices,
        policy=policy,
        on_fault=on_fault,
        progress="off",
    )


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("rank-*"))]


def fails(folder: Path, policy: str, fault: Step, error: type[Exception], *words: str, **options: Any) -> float:
    """The run ends with this error and these words, and leaves nothing; returns how long the end took."""
    marker = folder / "fault"
    with pytest.raises(error) as caught:
        train(folder, fault, policy, epochs=MANY_EPOCHS, **options)
    took_s = time.time() - (marker.stat().st_mtime if marker.exists() else time.time())
    for word in words:
        assert word in str(caught.value), str(caught.value)
    nothing_left(pids_in(folder), os.getpid())
    return took_s


def signalled(folder: Path, policy: str, devices: str, number: signal.Signals, word: str) -> float:
    marker = folder / "fault"

    def fault(rank: int, count: int) -> None:
        if (rank, count) == (1, FAULTY):
            marker.touch()
            os.kill(os.getpid(), number)

    return fails(folder, policy, fault, RankError, "rank 1", devices.split(",")[1], word, devices=devices)


def killed(folder: Path, policy: str, devices: str = CPUS) -> float:
    return signalled(folder, policy, devices, signal.SIGKILL, "SIGKILL")


def stopped(folder: Path, policy: str, devices: str = CPUS) -> float:
    return signalled(folder, policy, devices, signal.SIGSTOP, "silent")


def raising(folder: Path, policy: str, devices: str = CPUS) -> float:
    marker = folder / "fault"

    def broken_layer(rank: int, count: int) -> None:
        if (rank, count) == (1, FAULTY):
            marker.touch()
            raise ZeroDivisionError("in the middle of the model")

    words = ("rank 1", devices.split(",")[1], "ZeroDivisionError: in the middle of the model", "in broken_layer")
    return fails(folder, policy, broken_layer, RankError, *words, devices=devices)


def differing(folder: Path, policy: str, devices: str = CPUS) -> float:
    words = ("rank 1", "weight (2, 4) float32", "weight (1, 4) float32", "on every rank")
    began = time.time()
    fails(folder, policy, lambda *_: None, InputError, *words, width=lambda rank: 1 + rank, devices=devices)
    return time.time() - began


def stopped_for_a_while(folder: Path, policy: str, devices: str = CPUS) -> float:
    def fault(rank: int, count: int) -> None:
        if (rank, count) == (1, FAULTY):
            waker = f"sleep 2; kill -CONT {os.getpid()}"
            with subprocess.Popen(["sh", "-c", waker]):
                os.kill(os.getpid(), signal.SIGSTOP)

    began = time.time()
    state = train(folder, fault, policy, devices=devices)
    assert state.finished
    nothing_left(pids_in(folder), os.getpid())
    return time.time() - began


SCRIPT = """
import os, signal, sys, threading, time, torch
from uneven import fit
how, policy, devices, steps = *sys.argv[1:4], [0]  # a rank does not run this again: it gets them with the functions
def make():
    os.write(1, f"rank {sys.argv[2]} {os.getpid()}\\n".encode())  # in one piece: ranks share the pipe
    if how == "starting" and sys.argv[2].isdigit():  # in a rank; the launcher tries the model out for ten seconds
        threading.Event().wait()
    return torch.nn.Linear(4, 1)
def step(model, batch):
    steps[0] += 1
    if steps[0] > REHEARSED:
        os.write(1, b"step\\n")
        if how == "endless":
            threading.Event().wait()
        if how == "stopping" and sys.argv[2] == "1":
            os.write(1, b"stopping\\n")
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.01)
    return model(batch).square().mean()
print("go", flush=True)
fit(model=make, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), step=step, dataset=torch.randn(64, 4),
    batch_size=4, epochs=10**6, devices=devices, policy=policy)
""".replace("REHEARSED", str(REHEARSED))


class Launcher:
    """A script that trains on two ranks, as a process of its own; its ranks print to the same pipe."""

    def __init__(self, folder: Path, how: str, policy: str, devices: str) -> None:
        self.folder = folder
        self.errors = (folder / "errors").open("w+")
        (folder / "script.py").write_text(SCRIPT)  # some Pythons end `-c` by Ctrl-C with an exit code of their own
        command = [sys.executable, "script.py", how, policy, devices]
        self.process = ForkedPopen(command, cwd=folder, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.pids: list[int] = []
        self._seen: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        """All the time: a full pipe would hold the ranks up."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._seen.put(line.strip())
        self._seen.put(None)

    def read_until(self, is_there: Callable[[list[str]], bool]) -> None:
        seen: list[str] = []
        with suppress(queue.Empty):
            while (line := self._seen.get(timeout=100)) is not None:
                if line.startswith("rank "):
                    self.pids.append(int(line.split()[2]))
                seen.append(line)
                if is_there(seen):
                    return
        code = self.process.poll()
        ranks = [] if code is not None else psutil.Process(self.process.pid).children()
        raise AssertionError(f"it ended ({code}) or hangs: {seen}, {self.said()}, {ranks}")

    def interrupt(
        self, *, times: int = 1, limit_s: float = 150.0, number: int = signal.SIGINT, pids: Sequence[int] = ()
    ) -> tuple[int, float]:
        """Ctrl-C, or another signal, also to `pids`; returns the exit code and the seconds until it was gone."""
        began = time.monotonic()
        for pid in pids or (self.process.pid,):
            os.kill(pid, number)
        # Signals of one kind merge while pending: a second one is sent until one has been heard.
        while times > 1 and self.process.poll() is None and time.monotonic() - began < limit_s:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
            self.process.send_signal(number)
        code = self.process.wait(limit_s)
        return (128 - code if code < 0 else code), time.monotonic() - began

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()  # ends when the last rank has closed the pipe
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    made: list[Launcher] = []

    def make(how: str, policy: str = "sync", devices: str = CPUS) -> Launcher:
        folder = tmp_path / f"launcher-{len(made)}"
        folder.mkdir()
        made.append(Launcher(folder, how, policy, devices))
        return made[-1]

    yield make
    for one in made:
        one.close()


def trains(lines: list[str]) -> bool:
    return lines.count("step") >= 6


def ended_by_signal(
    launcher: Launcher,
    is_there: Callable[[list[str]], bool],
    number: int = signal.SIGINT,
    *,
    times: int = 1,
    whom: Callable[[Launcher], Sequence[int]] = lambda launcher: (launcher.process.pid,),
) -> str:
    """Signal it when that is there: its exit code names the signal, and nothing is left. Returns what it said."""
    launcher.read_until(is_there)
    code, _ = launcher.interrupt(times=times, number=number, pids=whom(launcher))
    assert code == 128 + number, launcher.said()
    nothing_left(launcher.pids, launcher.process.pid)
    return launcher.said()


def saved_state(folder: Path) -> TrainedState:
    """What an interrupted run that was started in this folder has saved."""
    (found,) = (folder / "runs").glob("interrupted-*")
    state = TrainedState.load(found)
    assert not state.finished
    assert state.slot >= 1
    assert all(value.isfinite().all() for value in state.params.values())
    return state
