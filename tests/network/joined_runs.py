"""Runs of several machines in network namespaces."""

import subprocess
import time
from pathlib import Path

from tests.network.namespaces import ROOT, Machine

SCRIPT = str(ROOT / "tests" / "network" / "joined_script.py")


TOKEN = "a-token-of-the-tests"


UNEVEN = ("-m", "uneven")


def lead(machine: Machine, *args: str, nodes: str = "2", cwd: Path, is_forked: bool = False) -> "subprocess.Popen[str]":
    env = {"UNEVEN_TOKEN": TOKEN}
    start = machine.forked_python if is_forked else machine.python
    return start(*UNEVEN, "run", "--nodes", nodes, "--port", "29400", *args, env=env, cwd=cwd)


def join(
    machine: Machine, leader: Machine, *args: str, token: str = TOKEN, cwd: Path, is_forked: bool = False
) -> "subprocess.Popen[str]":
    place = f"{leader.address or f'[{leader.address6}]'}:29400"
    start = machine.forked_python if is_forked else machine.python
    return start(*UNEVEN, "join", place, "--wait", "60", *args, env={"UNEVEN_TOKEN": token}, cwd=cwd)


def listeners(machine: Machine) -> list[str]:
    """The local addresses that something in the namespace listens on."""
    lines = machine.output("ss", "-ltnH").splitlines()
    return [line.split()[3] for line in lines]


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """What it has printed up to the line with this text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            break
    assert text in "".join(lines), "".join(lines)
    return "".join(lines)


def end(process: "subprocess.Popen[str]", limit_s: float = 30.0) -> tuple[int, str]:
    output = process.communicate(timeout=limit_s)[0]
    return process.returncode, output


def assert_empty(machines: list[Machine]) -> None:
    end_s = time.monotonic() + 5.0
    while time.monotonic() < end_s and any(machine.pids() for machine in machines):
        time.sleep(0.1)
    assert [machine.pids() for machine in machines] == [[] for _ in machines]


ENDLESS = """
import os, sys, time
from pathlib import Path
import torch
from uneven import Callback, fit

class StopWhenJoined(Callback):
    def on_step(self, info):
        if info.is_lead and Path("stop").exists():
            info.stop("enough")
        if not info.is_lead:
            Path("stepped").touch()  # in this machine's own folder

def step(model, batch):
    time.sleep(0.005)
    return model(batch).square().mean()

state = fit(
    model=lambda: torch.nn.Linear(4, 1).double(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1), step=step,
    dataset=torch.ones(32, 4).double(), batch_size=4, epochs=100000, policy=sys.argv[1], callbacks=[StopWhenJoined()],
    out="run", save_every="1 s", keep_last=2,
)
print("trained", state.samples == sum(state.rank_samples), len(state.rank_samples), flush=True)
"""


def await_step(folder: Path) -> None:
    """Until the machine with this folder has trained with the others: before, it could be told of the end of the run
    instead."""
    (folder / "stepped").unlink(missing_ok=True)
    end_s = time.monotonic() + 60.0
    while not (folder / "stepped").exists():
        assert time.monotonic() < end_s, "it does not train"
        time.sleep(0.05)
