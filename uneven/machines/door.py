"""The leader's door: a socket on one address, behind which only those get who know the token.

One thread talks to all strangers. Each of them has a few hundred bytes and a few seconds to prove the token, there is
room for `MOST_STRANGERS` at a time, and the one that has waited longest makes room for the next: whoever opens
thousands of connections, sends garbage or nothing at all costs a bounded amount of memory and keeps nobody out who
answers at once. The first message of an admitted connection names its role, and there is a function for each:
'node' for a machine that joins (launch/nodes/lead.py), 'files' for a rank that sends files.
"""

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from uneven.errors import InputError
from uneven.machines.addresses import host_label
from uneven.machines.wire import (
    HANDSHAKE_S,
    MAX_GREETING,
    Challenge,
    Connection,
    WireError,
    greet,
    is_mac,
    make_mac,
    parse_line,
)

MOST_STRANGERS = 64
MOST_REMEMBERED = 64  # addresses that came with a wrong token, or hear no answer
MOST_DATAGRAM, COPIES = 256, 3  # bytes; one may be lost
POLL_S = 0.25
RETRY_S = 0.2
ROLE_S = 10.0  # for the first message of an admitted connection

Ports = tuple[int, int]  # first and last
Handler = Callable[[Connection, dict[str, Any]], None]  # it closes the connection when it is done; on its own thread


def listen(address: str, ports: Ports | None = None, option: str = "--ports") -> socket.socket:
    """A listening socket on one address, on the first free port of a range or on any; InputError without one.

    `option` is the one that the ports came from.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = ports or (0, 0)
    error: OSError | None = None
    for port in range(first, last + 1):
        try:
            return socket.create_server((address, port), family=family, backlog=128)
        except OSError as found:  # noqa: PERF203  ports are tried one after the other
            error = found
    tried = f", port {first}" if first == last else f", ports {first}-{last}"
    fix = f"{'another' if option == '--port' else 'other'} {option}"
    raise InputError(
        f"cannot listen on {address}{tried if ports else ''} ({error}); choose {fix}, or another address by --bind"
    )


@dataclass
class _Stranger:
    sock: socket.socket
    address: str
    challenge: Challenge
    end_s: float
    received: bytearray = field(default_factory=bytearray)


class UnheardBox:
    """A datagram socket at the door's address and port, for machines that knock and hear no answer.

    A firewall that drops what comes from the leader lets the knock out, but TCP needs both directions, so the leader
    would wait for a machine that has given up. A datagram needs one. It is signed with the token, for this door and
    this sender alone, and ends a run that has not begun; a stranger's is dropped unread.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self.hosts: dict[str, str] = {}  # that heard no answer, by their addresses
        self._place = f"{address} {port}"
        self._token = token
        self.sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.setblocking(False)
        with suppress(OSError):  # taken by another program: then nobody is heard in this way
            self.sock.bind((address, port))

    def read(self) -> None:
        """Take one datagram."""
        try:
            data, source = self.sock.recvfrom(MOST_DATAGRAM)
        except OSError:
            return
        host, _, mac = data.decode(errors="replace").partition(" ")
        address = str(source[0])
        is_known = is_mac(mac, self._token, "unheard", self._place, address, host)
        if is_known and len(self.hosts) < MOST_REMEMBERED:
            self.hosts[address] = host


class Door:
    """Open from `open()` to `close()`. Whoever knocks before it is open waits."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self.address, self.port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        self._handlers: Mapping[str, Handler] = {}  # by role
        self.wrong_tokens: dict[str, int] = {}  # how often, by address
        self._listener = listener
        self._token = token
        self._strangers: dict[int, _Stranger] = {}  # by file descriptor, in the order in which they came
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._is_closed = False
        listener.setblocking(False)
        self._unheard = UnheardBox(self.address, self.port, token)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._unheard.sock, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="uneven-door", daemon=True)

    @property
    def unheard(self) -> dict[str, str]:
        """Machines with the right token that gave up because no answer reached them: their names, by address."""
        return self._unheard.hosts

    @property
    def place(self) -> str:
        """ADDRESS:PORT, as `uneven join` takes it."""
        return join_place(self.address, self.port)

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """`handlers`: what is called for a connection by its role."""
        self._handlers = handlers
        self._thread.start()

    def close(self) -> None:
        """Connections that were admitted stay open."""
        self._is_closed = True
        with suppress(OSError):
            self._waker.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(POLL_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._unheard.sock:
                        self._unheard.read()
                    elif (stranger := self._strangers.get(key.fd)) is not None:
                        self._hear(stranger)
                self._cut_slow()
        finally:
            for stranger in list(self._strangers.values()):
                self._cut(stranger)
            self._selector.close()
            for sock in (self._listener, self._unheard.sock, self._wake, self._waker):
                sock.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor left, or the stranger is gone already
            self._cut_oldest()
            return
        while len(self._strangers) >= MOST_STRANGERS:
            self._cut_oldest()
        sock.setblocking(False)
        stranger = _Stranger(sock, str(address[0]), Challenge(self._token), time.monotonic() + HANDSHAKE_S)
        self._strangers[sock.fileno()] = stranger
        self._selector.register(sock, selectors.EVENT_READ)
        self._answer(stranger, stranger.challenge.line)

    def _hear(self, stranger: _Stranger) -> None:
        try:
            chunk = stranger.sock.recv(MAX_GREETING + 1 - len(stranger.received))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        stranger.received += chunk
        if not chunk or (b"\n" not in stranger.received and len(stranger.received) > MAX_GREETING):
            self._cut(stranger)
        elif b"\n" in stranger.received:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        line, _, more = bytes(stranger.received).partition(b"\n")
        try:
            is_known, answer = stranger.challenge.judge(parse_line(line))
        except WireError:
            self._cut(stranger)
            return
        is_welcome = is_known and not more  # whoever knows the token waits for the answer before it says more
        if not is_welcome:
            self._remember(stranger.address)  # before it is told, and may look
        if not self._answer(stranger, answer):
            return
        if not is_welcome:
            self._cut(stranger)
            return
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock.fileno()]
        stranger.sock.setblocking(True)
        connection = Connection(stranger.sock)
        threading.Thread(target=self._serve, args=(connection,), name="uneven-guest", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            first = connection.read(ROLE_S)
            handler = self._handlers.get(str(first.get("role")))
            if handler is None:
                connection.send(
                    refused=f"no role {str(first.get('role'))[:40]!r} here; install the same uneven on both"
                )
                connection.close()
                return
            handler(connection, first)
        except WireError:
            connection.close()

    def _answer(self, stranger: _Stranger, line: bytes) -> bool:
        try:
            stranger.sock.send(line)  # fits into the empty buffer of a new connection
            return True
        except OSError:
            self._cut(stranger)
            return False

    def _remember(self, address: str) -> None:
        if address in self.wrong_tokens or len(self.wrong_tokens) < MOST_REMEMBERED:
            self.wrong_tokens[address] = self.wrong_tokens.get(address, 0) + 1

    def _cut_slow(self) -> None:
        now_s = time.monotonic()
        for stranger in list(self._strangers.values()):
            if stranger.end_s > now_s:
                return  # those behind it came later
            self._cut(stranger)

    def _cut_oldest(self) -> None:
        if self._strangers:
            self._cut(next(iter(self._strangers.values())))

    def _cut(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock.fileno()]
        stranger.sock.close()


def knock(address: str, port: int, token: str, wait_s: float) -> Connection:
    """The joining side: an admitted connection to the door; tries again for `wait_s` where nobody answers.

    InputError where nobody does, or where one side does not know the token.
    """
    place, end_s = join_place(address, port), time.monotonic() + wait_s
    while True:
        left_s = max(end_s - time.monotonic(), 0.5)
        is_silent = False
        try:
            sock = socket.create_connection((address, port), timeout=left_s)
        except OSError as error:
            is_silent = isinstance(error, TimeoutError)
            why = f"no leader at {place} ({error}); {_advice(error, address)}"
        else:
            try:
                return greet(sock, token)
            except InputError as error:
                sock.close()
                raise InputError(f"{place}: {error}") from error
            except (WireError, OSError) as error:  # a door full of strangers may cut us off too
                sock.close()
                why = f"no leader at {place}: {error}"
            except BaseException:
                sock.close()
                raise
        if time.monotonic() + RETRY_S >= end_s:
            if is_silent:
                tell_unheard(address, port, token, host_label())
            raise InputError(why)
        time.sleep(RETRY_S)


def tell_unheard(address: str, port: int, token: str, host: str) -> None:
    """The joining side, when it gives up."""
    host = "".join(host.split())[:64]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        own = str(sock.getsockname()[0])
        for _ in range(COPIES):
            sock.send(f"{host} {make_mac(token, 'unheard', f'{address} {port}', own, host)}".encode())


def _advice(error: OSError, address: str) -> str:
    if error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        own, other = ("IPv6", "IPv4") if ":" in address else ("IPv4", "IPv6")
        return (
            f"{host_label()} has no way to an {own} address: give it one, or start the leader with --bind and an "
            f"{other} address that both have"
        )
    start = "start 'uneven run SCRIPT --nodes N' there first, and see that its firewall lets the port in"
    if isinstance(error, TimeoutError):
        return f"{start}, and that of {host_label()} the answers, as in: sudo ufw allow from {address}"
    return start


def join_place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split_place(place: str) -> tuple[str, int]:
    """'192.0.2.10:7000' or '[fd00::1]:7000' -> its address and port."""
    address, _, port = place.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{place!r} is no ADDRESS:PORT of a leader, as in 192.0.2.10:29400; copy the line it printed")
    return address, int(port)
