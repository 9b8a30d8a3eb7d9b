"""`uneven join` in the middle of a run, on machines that are network namespaces."""

import time
from pathlib import Path

import pytest

from tests.network.namespaces import needs_namespaces, network
from tests.network.test_join import join, lead
from tests.network.test_join_faults import assert_empty, end, read_until

pytestmark = [needs_namespaces, pytest.mark.soak]
SCRIPT = """
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


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_machine_joins_in_the_middle_leaves_by_its_cable_and_comes_back(policy: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
    (folders[2] / "train.py").write_text(SCRIPT.replace("lr=0.1", "lr=0.2"))
    with network(tmp_path, 2, names="debian") as machines:
        first, second = machines
        options = ("--wait", "0.5", "--devices", "cpu")
        leader = lead(first, *options, "train.py", policy, nodes="1-2", cwd=folders[0])
        read_until(leader, "epoch 2/")
        code, output = end(join(second, first, "--devices", "cpu", cwd=folders[2]), 60.0)
        assert code == 1
        assert "train.py differs" in output
        node = join(second, first, "--devices", "cpu", cwd=folders[1])
        read_until(leader, "rank 1 (cpu on node2) joins: 2 ranks go on")
        await_step(folders[1])
        node.kill()
        node.wait()
        read_until(leader, "node2 (10.77.0.2) is lost")
        again = join(second, first, "--devices", "cpu", cwd=folders[1])
        read_until(leader, "joins: 2 ranks go on")
        await_step(folders[1])
        (folders[0] / "stop").touch()
        code, output = end(leader, 60.0)
        node_code, node_output = end(again)
        assert (code, node_code) == (0, 0), (output, node_output)
        assert "trained True 3" in output
        assert_empty(machines)
