"""All machines refuse together, each with the host and the fix; on machines that are network namespaces."""

import subprocess
from pathlib import Path

from tests.network.namespaces import Machine, needs_namespaces, network
from tests.network.refusals import SCRIPT, TOKEN

pytestmark = needs_namespaces


def start(machines: list[Machine], folder: Path, *verb: str) -> list["subprocess.Popen[str]"]:
    """The leader on the first machine and the others, each in a folder of its own with the script."""
    processes = []
    for machine in machines:
        place = folder / machine.hostname
        place.mkdir()
        (place / "train.py").write_text(SCRIPT)
        (place / "data.txt").write_text("1 2 3 4 5 6 7 8")
        leader = machines[0].address or f"[{machines[0].address6}]"
        nodes = ("--nodes", str(len(machines)), "--port", "29400", "--devices", "cpu")
        args = (*verb, *nodes) if machine is machines[0] else ("join", f"{leader}:29400", "--wait", "60")
        env = {"UNEVEN_TOKEN": TOKEN, "UNEVEN_DATA": str(place / "cache")}
        processes.append(machine.forked_python("-m", "uneven", *args, env=env, cwd=place))
    return processes


def outputs(processes: list["subprocess.Popen[str]"]) -> list[str]:
    return [process.communicate(timeout=100)[0] for process in processes]


def test_the_preflight_prints_one_table_and_trains_nothing(tmp_path: Path) -> None:
    with network(tmp_path, 2) as machines:
        processes = start(machines, tmp_path, "preflight", "train.py")
        first, second = outputs(processes)
        assert [process.returncode for process in processes] == [0, 0], (first, second)
    rows = {line.split()[0]: line.split() for line in first.splitlines() if line.startswith("  ")}
    assert rows["machine"] == ["machine", "node1", "node2"]
    assert rows["reach"] == ["reach", "all", "all"]
    assert {"torch", "dtype", "code", "disk", "round", "jitter", "bandwidth", "clock"} <= set(rows)
    assert "all checks are passed; nothing was trained" in second
    assert {path.name for path in (tmp_path / "node1").iterdir()} <= {"train.py", "data.txt", "cache", "__pycache__"}


def test_a_firewall_that_drops_one_direction_is_named_on_all_machines(tmp_path: Path) -> None:
    with network(tmp_path, 3, names="debian") as machines:
        machines[2].drop_from(machines[1])
        processes = start(machines, tmp_path, "preflight", "train.py")
        found = outputs(processes)
        assert [process.returncode for process in processes] == [1, 1, 1], found
    line = (
        "node3: the way from node2 (10.77.0.2) is closed (no answer in time, while packets of node3 arrive at node2); "
        "let 10.77.0.2 in by the firewall of node3, as in: sudo ufw allow from 10.77.0.2"
    )
    assert all(line in one for one in found), found
