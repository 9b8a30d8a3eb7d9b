"""One script on machines of 1, 2 and 1 ranks, started as another launcher would, and what must be true after it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.api.starts import HEAD, assert_close
from tests.forked import run_forked
from tests.network.namespaces import Machine

SIZES = (1, 2, 1)
POLICIES = ("balanced", "cadence", "async")
SCRIPT = (
    HEAD
    + """
import os
from uneven.launch.context import process_context

out, batch = Path(sys.argv[1]), int(sys.argv[2])
for policy in sys.argv[3].split(","):
    settings = {} if policy == "plain" else {"policy": policy}
    state = fit(model=net, optimizer=sgd, step=loss_of, dataset=TensorData(X, Y), batch_size=batch, epochs=2, seed=3,
                progress="lines", **settings)
    context = process_context()
    torch.save({"params": state.params, "log": state.log, "samples": state.samples}, out / f"{policy}-{context.rank}")
if policy != "plain":
    roster = context.roster_of(context.devices("auto"))
    told = {"machines": roster.machines, "hosts": roster.hosts, "devices": [str(one) for one in roster.devices],
            "interface": os.environ.get("GLOO_SOCKET_IFNAME"), "cores": len(os.sched_getaffinity(0))}
    (out / f"roster-{context.rank}.json").write_text(json.dumps(told))
"""
)


def write_script(folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


def plain_run(folder: Path) -> dict[str, torch.Tensor]:
    """One process with the batch of all four."""
    out = folder / "plain"
    out.mkdir()
    done = run_forked([sys.executable, write_script(folder), out, "32", "plain"], cwd=folder)
    assert done.returncode == 0, done.stderr
    params: dict[str, torch.Tensor] = torch.load(out / "plain-0")["params"]
    return params


def slurm_variables(rank: int, node: int, local: int, machines: Sequence[Machine]) -> dict[str, str]:
    """As srun sets them for the tasks of `--ntasks-per-node` 1, 2 and 1."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(sum(SIZES)),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(size) for size in SIZES),
        "SLURM_STEP_NODELIST": f"node[1-{len(machines)}]",
        "SLURMD_NODENAME": machines[node].hostname,
    }


def pod_variables(rank: int, address: str) -> dict[str, str]:
    """As Kubernetes' PyTorchJob does: nothing about the machine."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(sum(SIZES)), "MASTER_ADDR": address, "MASTER_PORT": "23456"}
    return {**own, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": str(sum(SIZES)), "PET_NPROC_PER_NODE": "1"}


def places(machines: Sequence[Machine]) -> list[tuple[Machine, int, int, int]]:
    """(machine, rank, node, local rank) of every rank."""
    found = [(machine, node, local) for node, machine in enumerate(machines) for local in range(SIZES[node])]
    return [(machine, rank, node, local) for rank, (machine, node, local) in enumerate(found)]


def finish(processes: Sequence["subprocess.Popen[str]"], seconds: float = 150) -> list[str]:
    return [process.communicate(timeout=seconds)[0] for process in processes]


def assert_ended(processes: Sequence["subprocess.Popen[str]"], said: Sequence[str]) -> None:
    assert [process.returncode for process in processes] == [0] * len(processes), "\n---\n".join(said)


def assert_trained(out: Path, plain: Mapping[str, torch.Tensor], interface: str = "lan0") -> None:
    """The roster is right on all ranks, every sample trained once, replicas are equal, balanced equals one process."""
    ranks = range(sum(SIZES))
    for rank in ranks:
        told = json.loads((out / f"roster-{rank}.json").read_text())
        assert told["machines"] == [0, 1, 1, 2]
        assert told["hosts"] == ["node1", "node2", "node3"]
        assert told["devices"] == ["cpu"] * 4
        assert told["interface"] == interface
    for policy in POLICIES:
        states = [torch.load(out / f"{policy}-{rank}") for rank in ranks]
        for state in states:
            assert state["samples"] == 300  # collect() has proven that each was trained once
            assert state["log"] == states[0]["log"]
            assert all(torch.equal(value, states[0]["params"][name]) for name, value in state["params"].items())
    assert_close(torch.load(out / "balanced-0")["params"], dict(plain))


def listeners_on_all_interfaces(machine: Machine) -> list[str]:
    """`ss -ltn`, by programs that were not there before: none of ours may be reached from anywhere else."""
    lines = machine.output("ss", "-ltnH").splitlines()
    return [line.split()[3] for line in lines if line.split()[3].rpartition(":")[0] in ("*", "0.0.0.0", "[::]")]
