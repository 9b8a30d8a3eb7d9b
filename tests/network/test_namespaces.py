"""The machines that the other tests of this folder run on."""

import subprocess
from pathlib import Path

import pytest

from tests.network.namespaces import needs_namespaces, network, slow_cable

pytestmark = needs_namespaces
ASK = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
SERVE = "import socket; s = socket.create_server(('10.77.0.1', 7000)); print('up'); s.accept()[0].sendall(b'hi')"
REACH = "import socket; print(socket.create_connection(('10.77.0.1', 7000), 5).recv(2))"


def test_machines_have_names_and_reach_each_other(tmp_path: Path) -> None:
    with network(tmp_path, 3, names=["plain", "debian", "unresolvable"]) as machines:
        asked = [machine.python("-c", ASK) for machine in machines]
        first, second, third = (process.communicate(timeout=60)[0] for process in asked)
        assert first.split() == ["node1", "10.77.0.1"]
        assert second.split() == ["node2", "127.0.1.1"]
        assert "gaierror" in third
        server = machines[0].python("-c", SERVE)
        assert server.stdout is not None
        server.stdout.readline()
        assert "hi" in machines[2].python("-c", REACH).communicate(timeout=60)[0]
        names = [machine.namespace for machine in machines]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in left]


@pytest.mark.parametrize("cut", ["cable", "one way"])
def test_a_link_can_be_cut(tmp_path: Path, cut: str) -> None:
    with network(tmp_path, 2) as (first, second):
        if cut == "cable":
            second.pull_cable()
        else:
            second.drop_from(first)
            second.add_interface("tailscale0", "100.64.0.2/10")
        reach = second.python("-c", REACH.replace("5)", "0.5)"))
        assert "Error" in reach.communicate(timeout=60)[0]


PING = """
import socket, sys, time
sock = socket.create_connection((sys.argv[1], 7000), 20)
began = time.monotonic(); sock.sendall(b"x"); sock.recv(1); print(time.monotonic() - began)
"""
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000)); print("up", flush=True)
sock, _ = server.accept(); sock.sendall(sock.recv(1))
"""


def test_a_slow_cable_delays_both_ways(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (first, second), slow_cable(first, second, 40.0) as (address, _):
        echo = first.python("-c", ECHO, address)
        assert echo.stdout is not None
        echo.stdout.readline()
        assert float(second.python("-c", PING, address).communicate(timeout=60)[0]) >= 0.08
