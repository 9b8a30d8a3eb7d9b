"""A process is cut off from outside: its TCP connections end, at both ends; what listens and its pipes stay."""

import socket
import subprocess
import sys

from uneven.bench.chaos.connections import check_cut, cut

CHILD = """
import socket, sys
own = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
assert own.recv(1) == b"", "the connection is over"
other, _ = server.accept()
print("accepted", flush=True)
"""


def test_connections_end_and_listeners_stay() -> None:
    check_cut()
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = [sys.executable, "-c", CHILD, str(server.getsockname()[1])]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as child:
            peer, _ = server.accept()
            assert child.stdout is not None
            port = int(child.stdout.readline())
            with peer:
                assert cut(child.pid) == 1
                assert peer.recv(1) == b""
            with socket.create_connection(("127.0.0.1", port)):
                assert child.stdout.readline() == "accepted\n"
    assert child.returncode == 0
