"""Processes of Python forked from a warmed-up server instead of started anew: one server per process of pytest.

`ForkedPopen` is a `subprocess.Popen` that does so for `python -m ...`, `python -c ...`, `python script.py` and for the
commands `uneven` and `torchrun`; what it starts is a child of this process and everything else about it is Popen's.
tests/conftest.py puts `PackagePopen` in the place of `subprocess.Popen`: what the package itself starts (ranks above
all) and torchrun's workers are forked, other commands are not. A
forked process that may start others gets a server of its own, and starts them in the same way. Tests marked
`real_start`, `cuda` and `soak` start every process for real.
"""

import ctypes
import inspect
import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle

from tests.fork_server import PADDING, Order, receive, send, without_path_option

ROOT = Path(__file__).parent.parent
PR_SET_CHILD_SUBREAPER = 36
RealPopen = subprocess.Popen
COMMANDS = tuple(str(Path(sys.executable).parent / name) for name in ("uneven", "torchrun"))
LIGHT = ("uneven.hardware.mps_supervisor",)  # imports no torch: started for real as quickly
# These start nothing: no server of their own.
LEAVES = ("uneven.launch.rank", "uneven.bench.strategies.rank", "tests.rank_process")


class Server:
    """The near end of a fork server; `start()` gives orders to it, from any thread."""

    def __init__(self, sock: socket.socket, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._sock = sock
        self._process = process
        self._lock = threading.Lock()
        self.can_fork = True

    @classmethod
    def launch(cls) -> "Server":
        near, far = socket.socketpair()
        with far:
            command = [sys.executable, "-m", "tests.fork_server", str(far.fileno()), "x" * PADDING]
            # One thread: the libraries' pools must not exist where a process is forked.
            env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            process = RealPopen(command, cwd=ROOT, env=env, pass_fds=[far.fileno()], stdin=subprocess.DEVNULL)
        server = cls(near, process)
        ready = receive(near)
        assert ready is not None, "the fork server did not start"
        # A torch whose import starts threads cannot be forked: processes are then started for real, and
        # tests/test_forked.py fails.
        server.can_fork = ready[0] == b"1"
        return server

    def start(self, order: Order, fds: list[int]) -> int:
        """The new process's number; it is a child of this process."""
        with self._lock:
            _adopt_orphans(True)
            try:
                send(self._sock, pickle.dumps(order), fds)
                answer = receive(self._sock)
            finally:
                _adopt_orphans(False)
        assert answer is not None, "the fork server has ended"
        return int(answer[0])

    def close(self) -> None:
        self._sock.close()
        if self._process is not None:
            self._process.wait()


_server: Server | None = None
_server_lock = threading.Lock()


def the_server() -> Server:
    """This process's server, started when it is first needed."""
    global _server
    with _server_lock:
        if _server is None:
            _server = Server.launch()
        return _server


def use(server: Server) -> None:
    """In a forked process: start what the package starts from this server."""
    global _server
    _server = server
    subprocess.Popen = PackagePopen  # type: ignore[misc]


def close_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _adopt_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


class ForkedPopen(RealPopen):  # type: ignore[type-arg]
    """A Popen whose process is forked from the server where its command is a Python program."""

    def _execute_child(self, *given: Any) -> None:
        options = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        args = options["args"]
        words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        if words and words[0] in COMMANDS:
            words = [sys.executable, *words]  # as their first line says
        is_plain = not options["pass_fds"] and not options["shell"]
        if not is_plain or not self._is_forked(words) or not the_server().can_fork:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        plain = without_path_option(words)
        preexec, cwd, env = options["preexec_fn"], options["cwd"], options["env"]
        order = Order(
            words,
            {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()},
            os.getcwd() if cwd is None else os.path.abspath(cwd),
            os.sched_getaffinity(0),
            bool(options["start_new_session"]),
            not (plain[1] == "-m" and plain[2] in LEAVES),
            None if preexec is None else cloudpickle.dumps(preexec),
        )
        theirs = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = the_server().start(order, [place if fd == -1 else fd for place, fd in enumerate(theirs)])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(options[name] for name in ends))  # type: ignore[attr-defined]

    def _is_forked(self, words: list[str]) -> bool:
        if subprocess.Popen is RealPopen:  # this test starts its processes for real
            return False
        words = without_path_option(words)
        return len(words) > 1 and words[0] == sys.executable and (words[1] in ("-m", "-c", "-u") or words[1][0] != "-")


class PackagePopen(ForkedPopen):
    """Forks `python -m uneven...`, the tests' own ranks and the workers of a forked torchrun alone."""

    def _is_forked(self, words: list[str]) -> bool:
        words = without_path_option(words)
        if not super()._is_forked(words) or words[1] not in ("-m", "-u"):
            return False
        is_ours = words[2].split(".")[0] == "uneven" or words[2] == "tests.rank_process"
        return words[1] == "-u" or (is_ours and words[2] not in LIGHT)


def run_forked(command: list[str | Path], **options: Any) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run` with the output captured as text, forked."""
    limit_s = options.pop("timeout", 200)
    pipe = subprocess.PIPE
    with ForkedPopen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
