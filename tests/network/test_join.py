"""`uneven run --nodes` and `uneven join` on machines that are network namespaces."""

import json
import time
from pathlib import Path

import torch

from tests.network.joined_runs import SCRIPT, TOKEN, join, lead, listeners
from tests.network.joined_script import BATCH, RANKS, train
from tests.network.namespaces import needs_namespaces, network
from uneven.launch.control.known_runs import ended_runs

pytestmark = needs_namespaces


def read_results(folder: Path) -> list[dict[str, dict[str, object]]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_three_machines_train_as_one(tmp_path: Path) -> None:
    """Names that resolve to loopback or to nothing, 1+2+1 devices, three policies in one script."""
    seen: set[str] = set()
    with network(tmp_path, 3, names=["debian", "debian", "unresolvable"]) as machines:
        first, second, third = machines
        results = tmp_path / "results"
        results.mkdir()
        processes = [
            lead(first, "--devices", "cpu", SCRIPT, str(results), nodes="3", cwd=tmp_path, is_forked=True),
            join(second, first, SCRIPT, "--devices", "cpu,cpu@0.5", cwd=tmp_path, is_forked=True),
            join(third, first, SCRIPT, "--devices", "cpu", cwd=tmp_path, is_forked=True),
        ]
        while any(process.poll() is None for process in processes):
            seen.update(address for machine in machines for address in listeners(machine))
            time.sleep(0.3)
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], outputs
        end = time.monotonic() + 60  # the servers that ranks were forked from end with their launchers
        while any(machine.pids() for machine in machines) and time.monotonic() < end:
            time.sleep(0.05)
        assert [machine.pids() for machine in machines] == [[], [], []]
    known = [run for run in ended_runs() if run["script"] == SCRIPT][:3]
    assert len({run["id"] for run in known}) == 1, "one run, on all machines"
    assert sorted(str(run["leader"]).partition(" ")[0] for run in known) == ["None", "node1", "node1"]
    # Every machine knew where all ranks are (uneven status); the leader tells the others. Ranks are in the order in
    # which machines joined, and either may be first.
    orders = (["cpu", "cpu", "cpu@0.5", "cpu"], ["cpu", "cpu", "cpu", "cpu@0.5"])
    assert known[0]["devices"] in orders
    assert [run["devices"] for run in known[1:]] == [known[0]["devices"]] * 2
    assert TOKEN not in "".join(outputs)
    assert "node2 (10.77.0.2) has joined with cpu,cpu@0.5" in outputs[0]
    found = read_results(results)
    assert len(found) == RANKS
    assert all(other == found[0] for other in found[1:]), "replicas differ in some bit"
    alone = train("balanced", batch_size=BATCH * RANKS)
    for name, value in alone.params.items():
        other = torch.tensor(found[0]["balanced"]["params"][name], dtype=torch.float64)  # type: ignore[index]
        torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-10)
    assert seen, "nothing was seen listening"
    everywhere = [address for address in seen if address.rpartition(":")[0] in ("0.0.0.0", "[::]", "*")]
    assert not everywhere, f"listens on all interfaces: {seen}"
