"""`uneven run --engine ray` on a real cluster of Ray: two nodes on machines of their own, one rank on each.

Ray is no dependency: without it (`pip install 'uneven[ray]'`) the test is skipped.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.api.starts import assert_close
from tests.network.launcher_runs import POLICIES, finish, plain_run
from tests.network.namespaces import Machine, needs_namespaces, network

pytestmark = [needs_namespaces, pytest.mark.soak, pytest.mark.timeout(300)]
pytest.importorskip("ray")

RAY = str(Path(sys.executable).parent / "ray")
PORT = 6379  # in the machine's own namespace
ALIVE = "import ray; ray.init(log_to_driver=False); print('alive', sum(node['Alive'] for node in ray.nodes()))"


def start_node(machine: Machine, folder: str, *where: str) -> None:
    """A socket's path may have 107 characters, which pytest's own folder leaves no room for."""
    own = ("--node-ip-address", machine.address, "--num-cpus", "1", "--disable-usage-stats", "--block")
    machine.start(RAY, "start", *where, *own, env={"RAY_TMPDIR": folder})


def await_nodes(machine: Machine, count: int, address: dict[str, str]) -> None:
    said = ""
    until = time.monotonic() + 120
    while f"alive {count}" not in said:
        assert time.monotonic() < until, said
        said = finish([machine.python("-c", ALIVE, env=address)], 60)[0]


def assert_trained(out: Path, plain: dict[str, torch.Tensor]) -> None:
    for policy in POLICIES:
        first, other = (torch.load(out / f"{policy}-{rank}") for rank in range(2))
        assert first["samples"] == 300, "each sample was trained once in each epoch"
        assert first["log"] == other["log"]
        assert all(torch.equal(value, other["params"][name]) for name, value in first["params"].items())
    assert_close(torch.load(out / "balanced-0")["params"], plain)


def test_a_script_trains_on_both_nodes(tmp_path: Path) -> None:
    plain = plain_run(tmp_path)
    script = tmp_path / "train.py"
    with TemporaryDirectory(dir="/tmp") as short, network(tmp_path, 2) as (head, other):
        address = {"RAY_ADDRESS": f"{head.address}:{PORT}"}
        start_node(head, short, "--head", "--port", str(PORT), "--include-dashboard=false")
        start_node(other, short, "--address", address["RAY_ADDRESS"])
        await_nodes(head, 2, address)
        words = ("-m", "uneven", "run", "--engine", "ray", str(script), str(tmp_path), "16", ",".join(POLICIES))
        run = head.python(*words, env=address)
        (said,) = finish([run], 200)
        assert run.returncode == 0, said
    assert_trained(tmp_path, plain)
