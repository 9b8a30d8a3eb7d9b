"""What a network costs: `python tools/link_efficiency.py --rates 50,200,1000 --delays 10,20`, as root on Linux.

Two machines (network namespaces, one device each, the second at 0.4 of the speed) train LeNet on random images of
MNIST's shape: each alone but at the same time, then together over a link of a given rate, or with a given delay each
way. A line has the joint speed over the sum of the two, and where the time of the slower rank went. These are whole
runs, some seconds each: an estimate, not a paired measurement. Each machine has a core of its own.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.network.namespaces import Machine, network, slow_cable

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from uneven import fit
from uneven.bench.models.mnist import make_lenet as make_model

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.rand(20000, 1, 28, 28), torch.randint(0, 10, (20000,)))
fit(
    model=make_model, optimizer=lambda p: torch.optim.SGD(p, 0.01), dataset=data, batch_size=64,
    epochs=1, progress="off", step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
)
"""
DEVICES = ("cpu", "cpu@0.4")
TOKEN = {"UNEVEN_TOKEN": "link-efficiency"}


@contextmanager
def link(folder: Path, rate_mbit: float | None, delay_ms: float | None) -> Iterator[tuple[list[Machine], str]]:
    """Two machines and the leader's address on the link between them."""
    with ExitStack() as stack:
        machines = stack.enter_context(network(folder, 2))
        address = machines[0].address
        if rate_mbit is not None:
            for machine in machines:
                machine.limit_rate(rate_mbit)
        if delay_ms is not None:
            address, _ = stack.enter_context(slow_cable(machines[0], machines[1], delay_ms))
        yield machines, address


def start(machine: Machine, cores: str, folder: Path, *args: str) -> Any:
    return machine.start("taskset", "-c", cores, sys.executable, "-m", "uneven", *args, env=TOKEN, cwd=folder)


def finish(process: Any) -> None:
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"a run failed:\n{output}")


def read(folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """A run's samples/s, and per rank the account of its time."""
    accounts: list[dict[str, Any]] = json.loads((folder / "timeline.json").read_text())["accounts"]
    samples = json.loads((folder / "state.json").read_text())["samples"]
    return samples / max(account["training_s"] for account in accounts), accounts


def cores_of(machine: int) -> str:
    """One core: threads of a larger rank would wait for each other whenever anything else runs."""
    own = sorted(os.sched_getaffinity(0))
    return str(own[machine * (len(own) // 2)])


def solo(folder: Path, epochs: int) -> list[float]:
    """Samples/s of each machine, both training alone at the same time."""
    with network(folder, 2) as machines:
        runs = []
        for number, machine in enumerate(machines):
            options = ("--devices", DEVICES[number], "--epochs", str(epochs), "--out", f"solo-{number}", "--overwrite")
            runs.append(start(machine, cores_of(number), folder, "run", "train.py", *options))
        for run in runs:
            finish(run)
    return [read(folder / f"solo-{number}")[0] for number in range(2)]


def joint(folder: Path, policy: str, epochs: int, rate_mbit: float | None, delay_ms: float | None) -> dict[str, Any]:
    with link(folder, rate_mbit, delay_ms) as (machines, address):
        options = ("--nodes", "2", "--bind", address, "--port", "29700", "--devices", DEVICES[0], "--policy", policy)
        run = ("run", "train.py", *options, "--epochs", str(epochs), "--out", "joint", "--overwrite")
        leader = start(machines[0], cores_of(0), folder, *run)
        join = ("join", f"{address}:29700", "--devices", DEVICES[1], "--wait", "60")
        other = start(machines[1], cores_of(1), folder, *join)
        finish(leader)
        finish(other)
    speed, accounts = read(folder / "joint")
    lost = {name: max(account["shares"][name] for account in accounts) for name in ("communication", "wait")}
    return {"speed": speed, **lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="50,200,1000", help="Mbit/s")
    parser.add_argument("--delays", default="10,20", help="ms each way")
    parser.add_argument("--policies", default="balanced,cadence,async")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        alone = solo(folder, args.epochs)
        print(f"alone: {alone[0]:,.0f} and {alone[1]:,.0f} samples/s", flush=True)
        links: list[tuple[str, float | None, float | None]] = [("unlimited", None, None)]
        links += [(f"{rate} Mbit/s", float(rate), None) for rate in args.rates.split(",") if rate]
        links += [(f"{delay} ms each way", None, float(delay)) for delay in args.delays.split(",") if delay]
        print(f"{'link':18} {'policy':9} {'efficiency':>10} {'communication':>14} {'wait':>7}")
        for label, rate, delay in links:
            for policy in args.policies.split(","):
                found = joint(folder, policy, args.epochs, rate, delay)
                parts = f"{100 * found['communication']:12.1f} % {100 * found['wait']:5.1f} %"
                print(f"{label:18} {policy:9} {found['speed'] / sum(alone):10.3f} {parts}", flush=True)


if __name__ == "__main__":
    main()
