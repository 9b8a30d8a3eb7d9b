"""Ranks as real processes, and everything that can go wrong with one: the run ends, says why, and leaves nothing.

One of each in the default suite; `pytest -m soak tests/test_processes.py` repeats them against the clock.
"""

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from uneven import InputError, TensorData, TrainedState, fit, supervise
from uneven.errors import RankError

REPEATS = 10
Step = Callable[[int, int], None]  # (rank, which step of this rank)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nothing_left(pids: list[int], launcher: int, *, within_s: float = 60.0) -> None:
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


def train(folder: Path, fault: Step, width: Callable[[int], int] = lambda _: 1, epochs: int = 3) -> TrainedState:
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

        if getattr(model.weight, "grad", None) is not None:  # not while its cost is measured, alone
            steps[0] += 1
            fault(int(sys.argv[2]), steps[0])
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
        devices="cpu,cpu",
        policy="sync",
        progress="off",
    )


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("rank-*"))]


def fails(folder: Path, fault: Step, error: type[Exception], *words: str, **options: Any) -> float:
    """The run ends with this error and these words, and leaves nothing; returns how long the end took."""
    marker = folder / "fault"
    with pytest.raises(error) as caught:
        train(folder, fault, **options)
    took_s = time.time() - (marker.stat().st_mtime if marker.exists() else time.time())
    for word in words:
        assert word in str(caught.value), str(caught.value)
    nothing_left(pids_in(folder), os.getpid())
    return took_s


def killed(folder: Path) -> float:
    marker = folder / "fault"

    def fault(rank: int, count: int) -> None:
        if (rank, count) == (1, 3):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return fails(folder, fault, RankError, "rank 1", "cpu", "SIGKILL")


def stopped(folder: Path) -> float:
    marker = folder / "fault"

    def fault(rank: int, count: int) -> None:
        if (rank, count) == (1, 3):
            marker.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    return fails(folder, fault, RankError, "rank 1", "cpu", "silent")


def raising(folder: Path) -> float:
    marker = folder / "fault"

    def broken_layer(rank: int, count: int) -> None:
        if (rank, count) == (1, 3):
            marker.touch()
            raise ZeroDivisionError("in the middle of the model")

    words = ("rank 1", "cpu", "ZeroDivisionError: in the middle of the model", "in broken_layer")
    return fails(folder, broken_layer, RankError, *words)


def differing(folder: Path) -> float:
    words = ("rank 1", "weight (2, 4) float32", "weight (1, 4) float32", "on every rank")
    began = time.time()
    fails(folder, lambda *_: None, InputError, *words, width=lambda rank: 1 + rank)
    return time.time() - began


def stopped_for_a_while(folder: Path) -> float:
    def fault(rank: int, count: int) -> None:
        if (rank, count) == (1, 3):
            waker = f"sleep 2; kill -CONT {os.getpid()}"
            with subprocess.Popen(["sh", "-c", waker]):
                os.kill(os.getpid(), signal.SIGSTOP)

    began = time.time()
    state = train(folder, fault)
    assert state.finished
    nothing_left(pids_in(folder), os.getpid())
    return time.time() - began


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    killed(tmp_path)


def test_a_stopped_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "SILENT_S", 2.0)  # the true limit is soaked
    stopped(tmp_path)


def test_a_rank_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    stopped_for_a_while(tmp_path)


def test_a_rank_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    raising(tmp_path)


def test_a_rank_with_another_model_is_named_before_training(tmp_path: Path) -> None:
    differing(tmp_path)


SCRIPT = """
import os, signal, sys, threading, time, torch
from uneven import fit
how = sys.argv[1]  # in a rank this script is not run again: it gets `how` with the function
def make():
    print("rank", sys.argv[2], os.getpid(), flush=True)
    if how == "starting":
        threading.Event().wait()
    return torch.nn.Linear(4, 1)
def step(model, batch):
    if model.weight.grad is not None:
        print("step", flush=True)
        if how == "endless":
            threading.Event().wait()
        if how == "stopping" and sys.argv[2] == "1":
            print("stopping", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.01)
    return model(batch).square().mean()
print("go", flush=True)
fit(model=make, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), step=step, dataset=torch.randn(64, 4),
    batch_size=4, epochs=10**6, devices="cpu,cpu", policy="sync")
"""


class Launcher:
    """A script that trains on two ranks, as a process of its own; its ranks print to the same pipe."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder = folder
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, how], cwd=folder, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
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
        while (line := self._seen.get(timeout=60)) is not None:
            if line.startswith("rank "):
                self.pids.append(int(line.split()[2]))
            seen.append(line)
            if is_there(seen):
                return
        raise AssertionError(f"it ended early: {seen}, {self.said()}")

    def interrupt(self, *, times: int = 1, limit_s: float = 60.0) -> tuple[int, float]:
        """Ctrl-C; returns the exit code and the seconds until the process was gone."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        # Signals of one kind merge while pending: a second one is sent until one has been heard.
        while times > 1 and self.process.poll() is None and time.monotonic() - began < limit_s:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait(limit_s)
        return (130 if code == -signal.SIGINT else code), time.monotonic() - began

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
def start(tmp_path: Path) -> Iterator[Callable[[str], Launcher]]:
    made: list[Launcher] = []

    def make(how: str) -> Launcher:
        folder = tmp_path / f"launcher-{len(made)}"
        folder.mkdir()
        made.append(Launcher(folder, how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def saved_state(launcher: Launcher) -> TrainedState:
    (folder,) = (launcher.folder / "runs").glob("interrupted-*")
    state = TrainedState.load(folder)
    assert not state.finished
    assert state.slot >= 1
    assert state.params["weight"].isfinite().all()
    return state


def test_ctrl_c_stops_all_ranks_after_the_same_step_and_the_state_loads(start: Callable[[str], Launcher]) -> None:
    launcher = start("training")
    launcher.read_until(lambda lines: lines.count("step") >= 6)
    code, _ = launcher.interrupt()
    assert code == 130, launcher.said()
    assert "stopped after" in launcher.said()
    saved_state(launcher)
    nothing_left(launcher.pids, launcher.process.pid)


def test_ctrl_c_during_start_up_ends_a_run_that_never_began(start: Callable[[str], Launcher]) -> None:
    launcher = start("starting")
    launcher.read_until(lambda _: len(launcher.pids) == 2)
    code, _ = launcher.interrupt()
    assert code == 130, launcher.said()
    assert "before its first step" in launcher.said()
    assert not (launcher.folder / "runs").exists()
    nothing_left(launcher.pids, launcher.process.pid)


def test_a_second_ctrl_c_ends_at_once(start: Callable[[str], Launcher]) -> None:
    launcher = start("endless")
    launcher.read_until(lambda lines: lines.count("step") == 2)
    code, _ = launcher.interrupt(times=2)
    assert code == 130, launcher.said()
    nothing_left(launcher.pids, launcher.process.pid)


def test_ranks_notice_that_their_launcher_was_killed_and_end_a_stopped_one_too(
    start: Callable[[str], Launcher],
) -> None:
    launcher = start("stopping")
    launcher.read_until(lambda lines: lines[-1] == "stopping")
    launcher.process.kill()
    launcher.process.wait()
    nothing_left(launcher.pids, launcher.process.pid)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("happen", "limit_s"),
    [(killed, 10.0), (stopped, 20.0), (raising, 10.0), (differing, 10.0), (stopped_for_a_while, 20.0)],
)
def test_soak_faults(tmp_path: Path, happen: Callable[[Path], float], limit_s: float) -> None:
    times = []
    for number in range(REPEATS):
        folder = tmp_path / str(number)
        folder.mkdir()
        times.append(happen(folder))
    print(f"\n{happen.__name__}: {' '.join(f'{one:.1f}' for one in times)} s")
    assert max(times) <= limit_s


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_soak_ctrl_c_at_random_moments(start: Callable[[str], Launcher]) -> None:
    moments, times, saved = random.Random(0), [], 0
    for _ in range(2 * REPEATS):
        launcher = start("training")
        launcher.read_until(lambda lines: lines[-1] == "go")
        time.sleep(moments.uniform(0.0, 6.0))
        ranks = psutil.Process(launcher.process.pid).children()
        code, took_s = launcher.interrupt(limit_s=20.0)
        times.append(took_s)
        assert code == 130, launcher.said()
        assert not any(alive(rank.pid) for rank in ranks)
        if "stopped after" in launcher.said():
            saved += 1
            saved_state(launcher)
        assert not list(Path("/dev/shm").glob(f"uneven-*-{launcher.process.pid}-*"))
    print(f"\nCtrl-C: {' '.join(f'{one:.2f}' for one in times)} s; {saved} of {len(times)} had begun and saved")
    assert max(times) <= 2.0 + 0.1
    assert saved > 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["stopping", "training"])
def test_soak_launcher_killed(start: Callable[[str], Launcher], how: str) -> None:
    times = []
    for _ in range(REPEATS):
        launcher = start(how)
        launcher.read_until(lambda lines: lines[-1] == "stopping" if how == "stopping" else lines.count("step") >= 20)
        began = time.monotonic()
        launcher.process.kill()
        launcher.process.wait()
        nothing_left(launcher.pids, launcher.process.pid, within_s=5.0)
        times.append(time.monotonic() - began)
    print(f"\nlauncher killed: {' '.join(f'{one:.2f}' for one in times)} s")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_soak_second_ctrl_c(start: Callable[[str], Launcher]) -> None:
    times = []
    for _ in range(REPEATS):
        launcher = start("endless")
        launcher.read_until(lambda lines: lines.count("step") == 2)
        code, took_s = launcher.interrupt(times=2, limit_s=10.0)
        assert code == 130
        nothing_left(launcher.pids, launcher.process.pid, within_s=2.0)
        times.append(took_s)
    print(f"\nsecond Ctrl-C: {' '.join(f'{one:.2f}' for one in times)} s")
    assert max(times) <= 2.0
