"""What can happen to a process: it sleeps and goes on, is killed, or is cut off, which ends connections alone."""

import os
import socket
import subprocess
import sys

import psutil

from uneven.bench.chaos.inject import Injector, check_cut, cut, rank_processes

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


def test_a_process_sleeps_until_its_time_is_over_and_what_has_ended_is_not_hit() -> None:
    injector = Injector()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert injector.do("pause", process, 1e6)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert injector.is_paused(process)
        assert injector.wake() == []
        assert injector.wake(all_of_them=True) == [process]
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert not injector.is_paused(process)
        assert injector.do("kill", process)
        child.wait()
        assert not injector.do("kill", process)
        assert not injector.do("cut", process)
    assert rank_processes(os.getpid()) == {}
