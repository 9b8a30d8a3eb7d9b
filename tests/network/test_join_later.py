"""`uneven join` in the middle of a run, on machines that are network namespaces."""

from pathlib import Path

import pytest

from tests.network.joined_runs import ENDLESS, assert_empty, await_step, end, join, lead, read_until
from tests.network.namespaces import needs_namespaces, network

pytestmark = [needs_namespaces, pytest.mark.soak]


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_machine_joins_in_the_middle_leaves_by_its_cable_and_comes_back(policy: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(ENDLESS)
    (folders[2] / "train.py").write_text(ENDLESS.replace("lr=0.1", "lr=0.2"))
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
