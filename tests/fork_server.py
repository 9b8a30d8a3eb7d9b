"""A warmed-up Python process that forks others: `python -m tests.fork_server SOCKET PADDING`. See tests/forked.py.

Importing torch takes seconds of CPU time; a fork of a process that has imported it takes milliseconds. The server has
one thread and runs no torch operation: a fork from among the threads of an OpenMP or autograd pool may hang. It ends
with the process at the other end of its socket.

A forked process differs from one that `python` starts in this: it has the server's modules (those named in `_warm_up`
and what they import; torch._dynamo is loaded late in all of them, as in ranks), its hash seed and its
/proc/PID/environ; and at the end it leaves its objects to the kernel, which takes a second less: after threads and exit
functions no `__del__` is called. Everything else is made alike: parent, session, standard streams, environment, cores,
arguments (in /proc/PID/cmdline, too), `__main__`, exit code.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from uneven.launch.late_dynamo import load_dynamo_late

PADDING = 8192  # bytes of the server's own command line, which the forked processes overwrite with theirs
HEADER = 8  # bytes of a message's length
WARM = (
    "torch.distributed.optim",
    "cloudpickle",
    "numpy.random",
    "psutil",
    "pytest",  # modules of tests, whose functions ranks run, import it
    "rich.progress",
    "safetensors.torch",
    "typer",
    "uneven",
    "uneven.bench.single.run",
    "uneven.cli.app",
    "uneven.cli.chaos",
    "uneven.cli.main",
    "uneven.launch.launcher",
    "uneven.launch.rank",
    "uneven.launch.script",
    "uneven.train.worker",
    *(("uneven.timeline.charts",) if find_spec("bokeh") else ()),
)


@dataclass
class Order:
    """A process to be forked; its standard streams travel beside it."""

    args: list[str]  # as for Popen: sys.executable first
    env: dict[str, str]
    cwd: str
    cores: set[int]
    new_session: bool
    starts_others: bool  # it gets a server of its own, for the processes that it starts
    preexec: bytes | None  # a pickled function


def send(sock: socket.socket, message: bytes, fds: list[int] | None = None) -> None:
    socket.send_fds(sock, [len(message).to_bytes(HEADER, "big")], fds or [])
    sock.sendall(message)


def receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """A message and the file descriptors that came with it; None when the other end is closed."""
    header, fds, _, _ = socket.recv_fds(sock, HEADER, 3)
    while header and len(header) < HEADER:
        header += sock.recv(HEADER - len(header))
    if not header:
        return None
    left, parts = int.from_bytes(header, "big"), []
    while left:
        parts.append(sock.recv(left))
        if not parts[-1]:
            return None
        left -= len(parts[-1])
    return b"".join(parts), list(fds)


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def serve(sock: socket.socket, base_path: list[str]) -> Callable[[], None]:
    """Fork what is ordered until the other end is closed. Returns in the forked processes alone, with their work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the tests
    while (received := receive(sock)) is not None:
        order, fds = pickle.loads(received[0]), received[1]
        assert count_threads() == 1, "a thread came into the fork server"
        if (pid := _fork_for_grandparent()) == 0:
            sock.close()
            if order.new_session:
                os.setsid()
            # Before its own server is forked, so that what it starts is in the same namespaces and on the same cores.
            os.sched_setaffinity(0, order.cores)
            if order.preexec is not None:
                pickle.loads(order.preexec)()
            if order.starts_others:
                near, far = socket.socketpair()
                if os.fork() == 0:
                    near.close()
                    for fd in fds:
                        os.close(fd)
                    if order.preexec is not None:  # a namespace to be in: its own processes are there, too
                        pickle.loads(order.preexec)()
                    return serve(far, base_path)
                far.close()
                sock = near
            return lambda: _become(order, fds, base_path, sock)
        for fd in fds:
            os.close(fd)
        send(sock, str(pid).encode())
    os._exit(0)


def _fork_for_grandparent() -> int:
    """Fork a process whose parent is whoever gave the order, as if that one had forked it: 0 in the new process.

    The kernel hands an orphan to its nearest ancestor that takes orphans (a "child subreaper"); whoever gives an order
    is one while it waits for the answer. The new process goes on when it has its parent: ranks watch theirs.
    """
    pid_there, pid_here = os.pipe()
    adopted, is_adopted = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid > 0:
            os.write(pid_here, str(pid).encode())
            os._exit(0)
        for fd in (pid_there, pid_here, is_adopted):
            os.close(fd)
        os.read(adopted, 1)  # the server closes its end
        os.close(adopted)
        return 0
    os.close(pid_here)
    os.close(adopted)
    pid = int(os.read(pid_there, 32))
    os.waitpid(middle, 0)
    os.close(pid_there)
    os.close(is_adopted)
    return pid


def _become(order: Order, fds: list[int], base_path: list[str], sock: socket.socket) -> None:
    """Turn this fork into the process that was ordered, and run it."""
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115, for the life of the process
    if order.args[1] == "-u":
        sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)  # noqa: SIM115
    else:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.__stdout__ = sys.stdout
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _show_args(order.args)
    if order.starts_others:
        from tests import forked

        forked.use(forked.Server(sock))
    import numpy
    import torch

    numpy.random.seed()
    # OpenMP has read its variable in the server.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(order.cores))))
    args = without_path_option(order.args)
    _run(args[2 if args[1] == "-u" else 1 :], base_path, has_first=args == order.args)


def without_path_option(args: list[str]) -> list[str]:
    """A command of Python without its first option where that is -P."""
    return [args[0], *args[2:]] if args[1:2] == ["-P"] else args


def _run(words: list[str], base_path: list[str], has_first: bool) -> None:
    """As `python` does with these arguments: -m MODULE, -c CODE or a script; without `has_first` as with -P."""
    kind, rest = (words[0], words[2:]) if words[0] in ("-m", "-c") else ("script", words[1:])
    paths = os.environ.get("PYTHONPATH")
    first = {"-m": os.getcwd(), "-c": ""}.get(kind) if kind != "script" else str(Path(words[0]).resolve().parent)
    sys.path[:] = [*([first or ""] if has_first else []), *(paths.split(os.pathsep) if paths else []), *base_path]
    sys.argv[:] = [words[0] if kind != "-m" else words[1], *rest]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.modules.pop(words[1], None)  # imported to warm up; it runs as `__main__` now
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    name = "<string>" if kind == "-c" else words[0]
    code = words[1] if kind == "-c" else Path(name).read_text()
    if kind == "script":
        main.__file__ = name
    exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)


def _run_to_the_end(work: Callable[[], None]) -> NoReturn:
    """Run it and end as the interpreter ends, without taking apart what is shared with the server."""
    code: object = 0
    try:
        work()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # closed by the program, or nobody reads it any more
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _show_args(args: list[str]) -> None:
    """Where /proc/PID/cmdline reads them: in the memory of the server's own arguments, cut to fit."""
    facts = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(facts[45]), int(facts[46])  # arg_start and arg_end: fields 48 and 49, of which 2 are before ")"
    text = b"\0".join(arg.encode(errors="surrogateescape") for arg in args)
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text[: end - start - 1], min(len(text), end - start - 1))


def _warm_up() -> None:
    load_dynamo_late()  # a second more for each process that only makes an optimizer
    for name in WARM:
        import_module(name)
    gc.collect()
    gc.freeze()  # what is there now is never collected: the forked processes share its pages


def main() -> None:
    paths = os.environ.get("PYTHONPATH")
    own = 1 + (len(paths.split(os.pathsep)) if paths else 0)  # this folder, and those of the variable
    base_path = sys.path[own:]
    _warm_up()
    sock = socket.socket(fileno=int(sys.argv[1]))
    send(sock, str(count_threads()).encode())
    work = serve(sock, base_path)
    _run_to_the_end(work)  # at the bottom of the stack: nothing of the server is unwound


if __name__ == "__main__":
    main()
