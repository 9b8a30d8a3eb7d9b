"""Machines for tests: network namespaces on one bridge, each with its own hostname and /etc/hosts.

Nothing outside is touched: the bridge lives in a namespace of its own, names carry this process's pid, and leaving
`network` ends what still runs inside and removes everything. `why_impossible` says where the system does not permit it.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Literal

import pytest

from tests.forked import ForkedPopen
from tests.network import relay

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
Names = Literal["plain", "debian", "unresolvable"]
Family = Literal["v4", "v6", "dual"]
# As on a machine: its own name, its own file of names.
INSIDE = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


@cache
def why_impossible() -> str | None:
    """Why this system cannot make network namespaces, or None where it can."""
    name = f"uneven-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
        if made.returncode:
            return f"network namespaces are not permitted here: {made.stderr.strip()}"
        command = ["ip", "netns", "exec", name, "unshare", "-u", "-m", "true"]
        entered = subprocess.run(command, capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    except FileNotFoundError as error:
        return f"no program {error.filename}"
    return f"namespaces cannot be entered: {entered.stderr.strip()}" if entered.returncode else None


needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or why_impossible() is not None, reason=str(why_impossible())
)


def _enter(namespace: str, hostname: str, hosts: str) -> None:
    """What `ip netns exec` and INSIDE do, in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    private, bind = 0x4000 | 0x40000, 0x1000  # MS_REC | MS_PRIVATE, MS_BIND
    steps = (
        lambda: libc.setns(descriptor, 0x40000000),  # CLONE_NEWNET
        lambda: libc.unshare(0x04000000 | 0x00020000),  # CLONE_NEWUTS | CLONE_NEWNS
        lambda: libc.mount(b"none", b"/", None, private, None),
        lambda: libc.mount(hosts.encode(), b"/etc/hosts", None, bind, None),
    )
    for number, step in enumerate(steps):
        if step() != 0:
            raise OSError(ctypes.get_errno(), f"step {number} into {namespace}")
    os.close(descriptor)
    socket.sethostname(hostname)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@dataclass
class Machine:
    """A namespace with one interface on the bridge. `start` runs a program in it."""

    namespace: str
    number: int
    hostname: str
    interface: str
    address: str  # IPv4; empty where it has none
    address6: str
    hosts: Path
    switch: str
    port: str  # the bridge's end of the cable
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.Popen[str]":
        """A program in a session of its own; its output is to be read by `communicate`."""
        inside = ["unshare", "-u", "-m", "bash", "-c", INSIDE, "_", self.hostname, str(self.hosts)]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *inside, *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            text=True, cwd=cwd, start_new_session=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1", **(env or {})},
        )  # fmt: skip
        self.started.append(process)
        return process

    def python(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.Popen[str]":
        return self.start(sys.executable, *args, env=env, cwd=cwd)

    def forked_python(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.Popen[str]":
        """As `python`, from a warmed-up process: torch is loaded already, in it and in the ranks that it starts."""
        process = ForkedPopen(
            [sys.executable, *args],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            cwd=cwd, start_new_session=True, preexec_fn=partial(_enter, self.namespace, self.hostname, str(self.hosts)),
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1", **(env or {})},
        )  # fmt: skip
        self.started.append(process)
        return process

    def output(self, *command: str) -> str:
        """What a short command prints in this namespace."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command], check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def pids(self) -> list[int]:
        """The processes that are inside."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def pull_cable(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "up")

    def drop_from(self, other: "Machine") -> None:
        """A firewall that drops what comes from the other machine, in that direction only."""
        # Kernels without the action "drop" have "mirred": into a cable that leads nowhere.
        ip("-n", self.namespace, "link", "add", "hole0", "type", "veth", "peer", "name", "hole1")
        ip("-n", self.namespace, "link", "set", "hole0", "up")
        self._tc("qdisc", "add", "dev", self.interface, "clsact")
        match = ("u32", "match", "ip", "src", f"{other.address}/32")
        drop = ("action", "mirred", "egress", "redirect", "dev", "hole0")
        self._tc("filter", "add", "dev", self.interface, "ingress", "protocol", "ip", *match, *drop)

    def limit_rate(self, mbit: float) -> None:
        """What this machine sends leaves at this rate at most."""
        rate = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms")
        self._tc("qdisc", "replace", "dev", self.interface, "root", "tbf", *rate)

    def add_interface(self, name: str, address: str) -> None:
        """One more interface that is up, but does not lead to the others, as a VPN's or a container's."""
        other = f"{name}-x"  # a tunnel that no program holds has no carrier and counts as down
        ip("-n", self.namespace, "link", "add", name, "type", "veth", "peer", "name", other)
        ip("-n", self.namespace, "link", "set", other, "up")
        ip("-n", self.namespace, "addr", "add", address, "dev", name)
        ip("-n", self.namespace, "link", "set", name, "up")

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for pid in self.pids():  # the namespace is ours, so everything in it is
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.communicate()

    def _tc(self, *args: str) -> None:
        subprocess.run(["tc", "-n", self.namespace, *args], check=True, capture_output=True, text=True)


@contextmanager
def network(
    folder: Path, count: int, *, names: Names | Sequence[Names] = "plain", family: Family = "v4"
) -> Iterator[list[Machine]]:
    """`count` machines node1, node2, ... that reach each other; `names` is what /etc/hosts says, for all or for each.

    'plain': every name has its address. 'debian': the own name is 127.0.1.1. 'unresolvable': no names at all.
    """
    kinds: Sequence[Names] = [names] * count if isinstance(names, str) else names
    tag = uuid.uuid4().hex[:6]
    switch = f"uneven-{tag}-sw"
    with ExitStack() as stack:
        _add_namespace(stack, switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        machines = []
        for number in range(1, count + 1):
            machine = _make_machine(folder, tag, number, family, switch)
            _add_namespace(stack, machine.namespace)
            stack.callback(machine.end)
            _connect(machine)
            machines.append(machine)
        for machine, kind in zip(machines, kinds, strict=True):
            machine.hosts.write_text(_hosts_file(machine, machines, kind))
        yield machines


def _make_machine(folder: Path, tag: str, number: int, family: Family, switch: str) -> Machine:
    return Machine(
        namespace=f"uneven-{tag}-{number}",
        number=number,
        hostname=f"node{number}",
        interface="lan0",
        address="" if family == "v6" else f"10.77.0.{number}",
        address6="" if family == "v4" else f"fd77::{number}",
        hosts=folder / f"hosts-{tag}-{number}",
        switch=switch,
        port=f"p{number}",
    )


def _add_namespace(stack: ExitStack, name: str) -> None:
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)
    ip("-n", name, "link", "set", "lo", "up")


def _connect(machine: Machine) -> None:
    own, port = machine.interface, machine.port
    ip("-n", machine.namespace, "link", "add", own, "type", "veth", "peer", "name", port, "netns", machine.switch)
    ip("-n", machine.switch, "link", "set", port, "master", "br0", "up")
    if machine.address:
        ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", own)
    if machine.address6:
        ip("-n", machine.namespace, "addr", "add", f"{machine.address6}/64", "dev", own, "nodad")
    ip("-n", machine.namespace, "link", "set", own, "up")


def _hosts_file(machine: Machine, machines: Sequence[Machine], kind: Names) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for other in machines:
        if kind == "plain" or (kind == "debian" and other is not machine):
            lines += [f"{address} {other.hostname}" for address in (other.address, other.address6) if address]
        elif kind == "debian":
            lines.append(f"127.0.1.1 {other.hostname}")
    return "\n".join(lines) + "\n"


@contextmanager
def slow_cable(first: Machine, second: Machine, delay_ms: float) -> Iterator[tuple[str, str]]:
    """One more cable between two machines, with a delay each way; yields the addresses on it."""
    command = [sys.executable, str(Path(relay.__file__)), first.namespace, second.namespace, str(delay_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n", "the relay has ended"
        yield relay.ADDRESSES
    finally:
        process.kill()
        process.communicate()
