"""Machines that leave a run on purpose and come back, on network namespaces."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.network.joined_runs import ENDLESS, UNEVEN, assert_empty, await_step, end, join, lead, read_until
from tests.network.namespaces import Machine, needs_namespaces, network

pytestmark = [needs_namespaces, pytest.mark.soak]


def leave(machine: Machine, process: "subprocess.Popen[str]", cwd: Path) -> tuple[int, str]:
    return end(machine.python(*UNEVEN, "leave", str(process.pid), env={}, cwd=cwd), 60.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["balanced", "cadence"])
def test_a_machine_leaves_by_command_and_by_signal_and_comes_back(policy: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(ENDLESS)
    with network(tmp_path, 2, names="debian") as machines:
        first, second = machines
        leader = lead(first, "--wait", "0.5", "--devices", "cpu", "train.py", policy, nodes="1-2", cwd=folders[0])
        read_until(leader, "epoch 2/")
        node = join(second, first, "--devices", "cpu", cwd=folders[1])
        read_until(leader, "rank 1 (cpu on node2) joins: 2 ranks go on")
        await_step(folders[1])
        code, output = leave(first, leader, folders[0])
        assert code == 1, output
        assert "no rank is left on node1, which leads the run" in output
        code, output = leave(second, node, folders[1])
        assert code == 0, output
        assert "rank 1 (cpu on node2) has handed in" in output
        node_code, node_output = end(node)
        assert (node_code, "has handed in" in node_output) == (0, True), node_output
        read_until(leader, "rank 1 (cpu on node2) leaves: 1 rank goes on")
        for number in (signal.SIGTERM, signal.SIGINT):
            node = join(second, first, "--devices", "cpu", cwd=folders[1])
            read_until(leader, "joins: 2 ranks go on")
            await_step(folders[1])
            node.send_signal(number)
            read_until(leader, "rank 1 (cpu on node2) leaves: 1 rank goes on")
            node_code, node_output = end(node)
            assert (node_code, "has handed in" in node_output) == (0, True), node_output
        (folders[0] / "stop").touch()
        code, output = end(leader, 60.0)
        assert code == 0, output
        assert "trained True 4" in output
        assert_empty(machines)
