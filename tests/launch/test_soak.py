"""Faults over and over, against the clock: `make soak`. Upper limits are allowed here and nowhere else."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults import (
    STARTS,
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
from uneven import TrainedState

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
            saved_state(launcher.folder)
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


RANDOM = """
import os, sys, time, torch
from uneven import Ddp, TensorData, fit
how, policy, out = sys.argv[1:]
data = TensorData(torch.randn(256, 2), torch.zeros(256))
make, sgd = (lambda: torch.nn.Linear(2, 1)), lambda params: torch.optim.SGD(params, lr=0.01)
def loss(model, batch):
    time.sleep(0.002)
    return model(batch[0]).square().mean()
def score(model, batch):
    return {"loss": model(batch[0]).square().sum()}, len(batch[0])
settings = dict(batch_size=4, epochs=10**6, policy=policy, out=out, grace=20.0, save_every=1, keep_last=2)
settings["progress"] = "lines"
os.write(1, b"go\\n")
if how == "fit":
    fit(model=make, optimizer=sgd, step=loss, dataset=data, evaluate=(data, score), **settings)
else:
    ddp = Ddp.setup(model := make(), sgd(model.parameters()), dataset=data, evaluate=(data, score), **settings)
    for epoch in range(ddp.epochs):
        for batch in ddp.batches(epoch):
            ddp.step(loss(ddp, batch))
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STARTS)
def test_soak_sigterm_at_random_moments(tmp_path: Path, name: str) -> None:
    """20 times: a whole state, or the word that nothing was trained, within grace; and nothing is left running."""
    moments, times, whole = random.Random(name), [], 0
    (tmp_path / "train.py").write_text(RANDOM)
    for number in range(20):
        out, policy = tmp_path / f"out-{number}", moments.choice(["sync", "balanced", "cadence", "async"])
        how = moments.choice(["fit", "loop"])
        words = [*STARTS[name], "train.py", how, policy, str(out)]
        with (tmp_path / f"errors-{number}").open("w+") as errors:
            process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "go\n"
            time.sleep(moments.uniform(0.0, 12.0))  # a moment of the scheduler's choice
            children = psutil.Process(process.pid).children(recursive=True)
            began = time.monotonic()
            for one in [process, *(children if moments.random() < 0.5 else [])]:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGTERM)
            try:
                process.stdout.read()
                code = process.wait(60)
            finally:
                process.kill()
            times.append(time.monotonic() - began)
            errors.seek(0)
            said = errors.read()
        assert code in ((1,) if name == "torchrun" else (130, 143, -signal.SIGTERM)), said  # 1 is the agent's own
        assert "RankError" not in said, said
        psutil.wait_procs(children, timeout=20)
        assert not any(alive(child.pid) for child in children)
        if "stopped after" in said:
            whole += 1
            assert not TrainedState.load(out).finished
        else:
            assert "before its first step" in said or code == -signal.SIGTERM or not (out / "state.json").exists(), said
    print(f"\n{name} SIGTERM: {' '.join(f'{one:.1f}' for one in times)} s; {whole} of {len(times)} had begun and saved")
    # Torchrun kills after 30 s: a rank that waits for one that left before its run may be inside a call of the store.
    assert max(times) <= (30.0 if name == "torchrun" else 20.0) + 5.0
    assert whole > 0
