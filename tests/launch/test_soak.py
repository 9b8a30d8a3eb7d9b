"""Faults over and over, against the clock: `make soak`. Upper limits are allowed here and nowhere else."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults import (
    Launcher,
    alive,
    differing,
    killed,
    nothing_left,
    raising,
    saved_state,
    stopped,
    stopped_for_a_while,
)
from tests.faults import start as start

REPEATS = {"sync": 10, "cadence": 5, "async": 5}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", REPEATS)
@pytest.mark.parametrize(
    ("happen", "limit_s"),
    [(killed, 10.0), (stopped, 20.0), (raising, 10.0), (differing, 10.0), (stopped_for_a_while, 20.0)],
)
def test_soak_faults(tmp_path: Path, happen: Callable[[Path, str], float], limit_s: float, policy: str) -> None:
    times = []
    for number in range(REPEATS[policy]):
        folder = tmp_path / str(number)
        folder.mkdir()
        times.append(happen(folder, policy))
    print(f"\n{policy} {happen.__name__}: {' '.join(f'{one:.1f}' for one in times)} s")
    assert max(times) <= limit_s


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", REPEATS)
def test_soak_ctrl_c_at_random_moments(start: Callable[..., Launcher], policy: str) -> None:
    moments, times, saved = random.Random(0), [], 0
    for _ in range(2 * REPEATS[policy]):
        launcher = start("training", policy)
        launcher.read_until(lambda lines: lines[-1] == "go")
        time.sleep(moments.uniform(1.0, 9.0))  # a moment of the user's choice, mostly while it trains
        ranks = psutil.Process(launcher.process.pid).children()
        code, took_s = launcher.interrupt(limit_s=20.0)
        times.append(took_s)
        assert code == 130, launcher.said()
        assert not any(alive(rank.pid) for rank in ranks)
        if "stopped after" in launcher.said():
            saved += 1
            saved_state(launcher)
        assert not list(Path("/dev/shm").glob(f"uneven-*-{launcher.process.pid}-*"))
    print(
        f"\n{policy} Ctrl-C: {' '.join(f'{one:.2f}' for one in times)} s; {saved} of {len(times)} had begun and saved"
    )
    assert max(times) <= 2.0 + 0.1
    assert saved > 0


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["stopping", "training"])
def test_soak_launcher_killed(start: Callable[..., Launcher], how: str) -> None:
    times = []
    for _ in range(REPEATS["sync"]):
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
def test_soak_second_ctrl_c(start: Callable[..., Launcher]) -> None:
    times = []
    for _ in range(REPEATS["sync"]):
        launcher = start("endless")
        launcher.read_until(lambda lines: lines.count("step") == 2)
        code, took_s = launcher.interrupt(times=2, limit_s=10.0)
        assert code == 130
        nothing_left(launcher.pids, launcher.process.pid, within_s=2.0)
        times.append(took_s)
    print(f"\nsecond Ctrl-C: {' '.join(f'{one:.2f}' for one in times)} s")
    assert max(times) <= 2.0
