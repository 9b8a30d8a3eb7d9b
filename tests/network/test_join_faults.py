"""Runs over machines that go wrong: what each side says, its exit code, and that no process is left on any of them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.network.joined_runs import SCRIPT, assert_empty, end, join, lead, listeners, read_until
from tests.network.namespaces import Machine, ip, needs_namespaces, network

pytestmark = [needs_namespaces, pytest.mark.soak]
FOR_EVER = "100000"


def train(
    machines: list[Machine], tmp_path: Path, on_fault: str = "end"
) -> tuple["subprocess.Popen[str]", "subprocess.Popen[str]"]:
    """A run that does not end by itself, and has begun."""
    first, second = machines
    options = ("--devices", "cpu", "--on-fault", on_fault)
    leader = lead(first, *options, SCRIPT, str(tmp_path), FOR_EVER, cwd=tmp_path)
    node = join(second, first, SCRIPT, "--devices", "cpu", cwd=tmp_path)
    read_until(leader, "epoch 2/")
    return leader, node


def test_a_pulled_cable_ends_the_run_on_both_sides(machines: list[Machine], tmp_path: Path) -> None:
    leader, node = train(machines, tmp_path)
    began_s = time.monotonic()
    machines[1].pull_cable()
    code, output = end(leader)
    node_code, node_output = end(node)
    assert time.monotonic() - began_s < 20.0
    assert (code, node_code) == (1, 1)
    assert "node2 (10.77.0.2) is lost" in output
    assert "is lost" in node_output
    assert "10.77.0.1" in node_output
    assert_empty(machines)


@pytest.mark.parametrize("how", ["cable", "launcher", "rank"])
def test_the_leader_goes_on_without_a_machine_or_rank_that_is_lost(
    machines: list[Machine], tmp_path: Path, how: str
) -> None:
    leader, node = train(machines, tmp_path, "go-on")
    if how == "cable":
        machines[1].pull_cable()
    else:
        os.kill(node.pid if how == "launcher" else machines[1].pids()[-1], signal.SIGKILL)
    read_until(leader, "1 rank goes on")
    read_until(leader, "epoch")
    os.kill(leader.pid, signal.SIGINT)
    code, output = end(leader, 60.0)
    assert code == 130
    assert "stopped after" in output
    end(node)
    assert_empty(machines)


@pytest.mark.parametrize("who", ["leader", "node"])
def test_a_launcher_that_is_killed_ends_the_run(machines: list[Machine], tmp_path: Path, who: str) -> None:
    leader, node = train(machines, tmp_path)
    killed, left = (leader, node) if who == "leader" else (node, leader)
    killed.kill()
    began_s = time.monotonic()
    code, output = end(left)
    assert time.monotonic() - began_s < 10.0
    assert code == 1
    assert "is lost" in output
    assert ("node2" if who == "node" else "10.77.0.1") in output
    assert_empty(machines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("who", ["leader", "node"])
def test_a_signal_on_either_side_stops_and_saves(
    machines: list[Machine], tmp_path: Path, who: str, number: int, code: int
) -> None:
    leader, node = train(machines, tmp_path)
    os.kill((leader if who == "leader" else node).pid, number)
    ended, output = end(leader, 60.0)
    node_ended, node_output = end(node)
    assert (ended, node_ended) == (code, code), (output, node_output)
    assert "stopped after" in output
    assert_empty(machines)


def test_a_rank_that_is_killed_is_named_with_its_host(machines: list[Machine], tmp_path: Path) -> None:
    leader, node = train(machines, tmp_path)
    ranks = [pid for pid in machines[1].pids() if pid != node.pid]
    os.kill(ranks[-1], signal.SIGKILL)
    code, output = end(leader)
    node_code, node_output = end(node)
    assert (code, node_code) == (1, 1)
    assert "rank 1 (cpu on node2) was ended by SIGKILL" in output
    assert "rank 1 (cpu on node2) was ended by SIGKILL" in node_output
    assert_empty(machines)


def test_a_firewall_between_two_others_is_found_before_the_start(tmp_path: Path) -> None:
    with network(tmp_path, 3) as machines:
        first, second, third = machines
        second.drop_from(third)
        processes = [
            lead(first, "--devices", "cpu", SCRIPT, str(tmp_path), nodes="3", cwd=tmp_path),
            join(second, first, SCRIPT, "--devices", "cpu", cwd=tmp_path),
            join(third, first, SCRIPT, "--devices", "cpu", cwd=tmp_path),
        ]
        for code, output in [end(process, 60.0) for process in processes]:
            assert code == 1
            assert "node2: the way from node3 (10.77.0.3) is closed" in output
            assert "sudo ufw allow from 10.77.0.3" in output
        assert_empty(machines)


def test_a_way_between_two_others_that_carries_nothing_more_ends_the_run(tmp_path: Path) -> None:
    """All ranks live and reach the leader, and wait for each other: TCP alone tries again for a quarter of an hour."""
    with network(tmp_path, 3) as machines:
        first, second, third = machines
        leader = lead(first, "--devices", "cpu", SCRIPT, str(tmp_path), FOR_EVER, nodes="3", cwd=tmp_path)
        nodes = [join(one, first, SCRIPT, "--devices", "cpu", cwd=tmp_path) for one in (second, third)]
        read_until(leader, "epoch 2/")
        second.drop_from(third)
        for code, output in [end(process, 240.0) for process in (leader, *nodes)]:
            assert code == 1
            assert "lost each other 6 times" in output
            assert "'uneven preflight' tests the ways between the machines" in output
        assert_empty(machines)


def test_a_machine_with_the_second_family_alone_trains_with_one_that_has_both(tmp_path: Path) -> None:
    """The leader's interface has an IPv4 address too, and Gloo would take that one."""
    with network(tmp_path, 2, names="unresolvable", family="dual") as machines:
        first, second = machines
        ip("-n", second.namespace, "addr", "del", f"{second.address}/24", "dev", second.interface)
        leader = lead(first, "--bind", first.address6, "--devices", "cpu", SCRIPT, str(tmp_path), cwd=tmp_path)
        first.address = ""
        node = join(second, first, SCRIPT, "--devices", "cpu", cwd=tmp_path)
        (code, output), (node_code, node_output) = end(leader, 90.0), end(node)
        assert (code, node_code) == (0, 0), (output, node_output)


def test_ports_stay_in_their_range(tmp_path: Path) -> None:
    """Of everything that we listen with ourselves; Gloo takes ports of the system's range."""
    with network(tmp_path, 2) as machines:
        first, second = machines
        leader = lead(first, "--ports", "29401-29410", "--devices", "cpu", SCRIPT, str(tmp_path), cwd=tmp_path)
        node = join(second, first, SCRIPT, "--devices", "cpu", cwd=tmp_path)
        seen: set[int] = set()
        read_until(leader, "2 machines with 2 ranks")
        seen = {int(address.rpartition(":")[2]) for machine in machines for address in listeners(machine)}
        assert end(leader, 90.0)[0] == end(node)[0] == 0
        assert 29400 in seen
        assert all(29400 <= port <= 29410 for port in seen), seen
