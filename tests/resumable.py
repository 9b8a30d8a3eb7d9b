"""A small run in processes of its own that can be killed, stopped and resumed, and what must be true of its folder.

For launch/test_resume_kills.py and launch/test_resume_signals.py. The script has dropout, Adam and a schedule, so that
random states, optimizer state and learning rates all show in the params.
"""

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.faults import alive
from tests.forked import ForkedPopen
from uneven import TrainedState
from uneven.data.sample_order import prove_exactly_once
from uneven.policy.axis import Axis
from uneven.results.checkpoint import read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints

SAMPLES, EPOCHS = 56, 9
SCRIPT = """
import json, os, sys, threading, time, torch
from torch.optim.lr_scheduler import OneCycleLR
from uneven import Ddp, TensorData, fit
folder, options = sys.argv[1], json.loads(sys.argv[2])
pause, hold, crawl, how, counts = *(options.pop(name) for name in ("pause", "hold", "crawl", "how")), {}
torch.manual_seed(1)
data = TensorData(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1))
def make():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(16, 1))
def adam(params):
    return torch.optim.Adam(params, lr=0.01)
def schedule(optimizer, steps):
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=steps + 1)
def step(model, batch):
    pid = os.getpid()  # a process that tries this function out before it starts ranks counts for itself
    counts[pid] = counts.get(pid, 0) + 1
    with open(os.path.join(folder, f"steps-{pid}"), "ab") as file:
        file.write(b".")
    if counts[pid] == hold:
        open(os.path.join(folder, f"held-{pid}"), "w").close()
        threading.Event().wait()
    time.sleep(0.2 if counts[pid] > crawl else pause)
    return (model(batch[0]) - batch[1]).square().mean()
if how == "fit":
    fit(model=make, optimizer=adam, step=step, scheduler=schedule, dataset=data, **options)
else:
    model = make()
    ddp = Ddp.setup(model, optimizer := adam(model.parameters()), scheduler=schedule, dataset=data, **options)
    for epoch in range(ddp.epochs):
        for batch in ddp.batches(epoch):
            ddp.step(step(ddp, batch))
    ddp.finish()
""".replace("SAMPLES", str(SAMPLES))
EXACT = {"batch_size": 4, "global_batch_size": 8}  # 7 slots an epoch
LOCAL = {"batch_size": 8, "anchor": 2, "lr_scale": 1.0}
BIT_EQUAL = {
    "sync": {**EXACT, "policy": "sync"},
    "balanced": {**EXACT, "policy": "balanced", "shares": [3, 1]},
    "cadence": {**LOCAL, "policy": "cadence", "shares": [3, 1]},
}
MEASURED = {
    "balanced by speed": {**EXACT, "policy": "balanced"},
    "cadence by speed": {**LOCAL, "policy": "cadence"},
    "async": {**LOCAL, "policy": "async"},
}
POLICIES = {**BIT_EQUAL, **MEASURED}


class Session:
    """One start of the run in `folder`/run; it ends by itself, by a signal or killed.

    `pause`: seconds that a step takes. `hold`: the step of a rank at which it waits to be killed. `crawl`: after so
    many steps of a rank they take much longer, so that the run is not over before a signal comes. `how`: fit or loop.
    """

    def __init__(self, folder: Path, command: Sequence[str | Path] = (sys.executable,), **options: Any) -> None:
        self.folder, self.out = folder, folder / "run"
        for old in (*folder.glob("steps-*"), *folder.glob("held-*")):
            old.unlink()
        (folder / "train.py").write_text(SCRIPT)
        settings = {"out": str(self.out), "epochs": EPOCHS, "seed": 3, "resume": "auto", "progress": "lines"}
        settings |= {"pause": 0.0, "hold": 0, "crawl": 10**9, "how": "fit"}
        words = [*command, "train.py", str(folder), json.dumps({**settings, **options})]
        self._errors = (folder / "errors").open("w+")
        self.process = ForkedPopen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=self._errors, text=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        return (self.folder / "errors").read_text()

    def steps(self) -> int:
        """Of all ranks, those that measure included."""
        return sum(path.stat().st_size for path in self.folder.glob("steps-*"))

    def wait_for(self, is_there: Callable[[], bool]) -> bool:
        """Return when it is there, or a rank waits to be killed; whether the run still runs."""
        limit_s = time.monotonic() + 150
        while not is_there() and not any(self.folder.glob("held-*")):
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < limit_s, f"it hangs: {self.said()}"
            time.sleep(0.002)
        return True

    def family(self) -> list[psutil.Process]:
        """The process and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []

    def kill(self, order: random.Random) -> None:
        """SIGKILL to every process of the run, in any order."""
        self.process.send_signal(signal.SIGSTOP)  # it starts no rank that would be missed
        family = self.family()
        order.shuffle(family)
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()
        self.close(family)

    def close(self, family: Sequence[psutil.Process]) -> None:
        """Nothing is left running."""
        self._errors.close()
        psutil.wait_procs(family, timeout=100)
        assert not [one for one in family if alive(one.pid)]

    def signal(self, number: int, to_all: bool = False) -> int:
        """Send it to the process, or to all that it has started, too; returns the exit code."""
        family = self.family()
        for one in family if to_all else family[:1]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        code = self.process.wait(150)
        self.close(family)
        return code

    def finish(self) -> None:
        family = self.family()
        assert self.process.wait(200) == 0, self.said()
        self.close(family)

    def resumed_at(self) -> int | None:
        """The slot from which this session went on, 0 where it began anew; None where it had not got so far."""
        if found := re.search(r"resumes from \S+/(?:step|epoch)-\d+: ([\d,]+) steps are trained", self.said()):
            return int(found[1].replace(",", ""))
        return 0 if "no checkpoint in" in self.said() else None


def newest_slot(out: Path) -> int:
    """The slot of the newest checkpoint, or 0; whatever happened to the run, all that have a name are whole."""
    found = [read_checkpoint(folder) for folder in find_checkpoints(out)]
    return int(found[0].record["ledger"]["trained"]) if found else 0


def finished_once(out: Path, slot_size: int = 8, epochs: int = EPOCHS) -> TrainedState:
    """The state of a finished run, whose joined log proves that every sample was trained once."""
    state = TrainedState.load(out)
    axis = Axis(SAMPLES, slot_size, epochs)
    assert (state.finished, state.slot, state.samples) == (True, axis.total, SAMPLES * epochs)
    log = json.loads((out / "log.json").read_text())
    assert prove_exactly_once(axis, log["ranks"], axis.total) == axis.total
    newest_slot(out)
    left = [path.name for path in out.iterdir() if path.name.startswith(".") and path.name != ".uneven"]
    assert not left, left
    return state


def assert_equal(found: TrainedState, wanted: TrainedState) -> None:
    assert found.params.keys() == wanted.params.keys()
    for name, value in wanted.params.items():
        assert torch.equal(found.params[name], value), name
    for name, value in wanted.optimizer.items():
        assert name.startswith("random") or torch.equal(found.optimizer[name], value), name


def shared_folders(pids: Sequence[int]) -> list[Path]:
    """What launchers have left in the folders for ranks."""
    homes = (Path("/dev/shm"), Path("/tmp"))
    return [path for pid in pids for home in homes for path in home.glob(f"uneven-*-{pid}-*")]
