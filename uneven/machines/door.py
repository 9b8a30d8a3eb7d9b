"""The leader's door: a socket on one address, behind which only those get who know the token.

Roles are 'node' for a machine that joins (launch/nodes/lead.py), and 'files' for a rank that sends files. The listeners
of the reach test (machines/links.py) stand behind the same guard.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from uneven.errors import InputError
from uneven.machines.addresses import host_label
from uneven.machines.wire import Connection, WireError, admit, greet, is_mac, make_mac

MOST_STRANGERS = 64
MOST_REMEMBERED = 64  # addresses that came with a wrong token, or hear no answer
MOST_DATAGRAM, COPIES = 256, 3  # bytes; one may be lost
UDP_S, PAUSE_S = 0.25, 0.05
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


class TokenServer:
    """One port of one address, TCP and UDP, behind which only those get who know the token. From `open` to `close`.

    Each stranger has a thread with a few hundred bytes and a few seconds to prove it. There is room for
    `MOST_STRANGERS` at a time, and the one that has waited longest makes room for the next: whoever opens thousands of
    connections, sends garbage or nothing at all costs a bounded amount of memory and keeps nobody out who answers at
    once. Whoever comes before it is open waits.
    """

    def __init__(self, tcp: socket.socket, udp: socket.socket, token: str) -> None:
        self.address, self.port = str(tcp.getsockname()[0]), int(tcp.getsockname()[1])
        self.wrong_tokens: dict[str, int] = {}  # how often, by address
        self._token = token
        self._tcp, self._udp = tcp, udp
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._is_closed = False
        udp.settimeout(UDP_S)

    def serve(self, connection: Connection) -> None:
        """An admitted connection, which is this one's to close; on a thread of its own."""
        raise NotImplementedError

    def hear(self, text: str, address: str) -> None:
        """A datagram, which anybody may have sent; on one thread."""
        raise NotImplementedError

    def listen(self) -> None:
        for target in (self._accept, self._receive):
            threading.Thread(target=target, name="uneven-door", daemon=True).start()

    def close(self) -> None:
        """Connections that were admitted stay open."""
        self._is_closed = True
        with suppress(OSError):
            self._tcp.shutdown(socket.SHUT_RDWR)  # ends the accept
        self._tcp.close()
        self._udp.close()
        while self._strangers:
            self._cut_oldest()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._tcp.accept()
                with self._lock:
                    self._strangers[sock] = None
                threading.Thread(target=self._admit, args=(sock, str(address[0])), daemon=True).start()
            except (OSError, RuntimeError):  # it is closed, or no descriptor or thread is left
                self._cut_oldest()
                time.sleep(PAUSE_S)
            while len(self._strangers) > MOST_STRANGERS:
                self._cut_oldest()

    def _cut_oldest(self) -> None:
        with self._lock, suppress(StopIteration, OSError):
            sock = next(iter(self._strangers))
            del self._strangers[sock]
            sock.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            connection = admit(sock, self._token, lambda: self._remember(address))
            sock.settimeout(None)
        except OSError:  # a WireError, too
            sock.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
        self.serve(connection)

    def _remember(self, address: str) -> None:
        with self._lock:
            if address in self.wrong_tokens or len(self.wrong_tokens) < MOST_REMEMBERED:
                self.wrong_tokens[address] = self.wrong_tokens.get(address, 0) + 1

    def _receive(self) -> None:
        while not self._is_closed:
            with suppress(OSError):  # nothing has come, or it is closed
                data, source = self._udp.recvfrom(MOST_DATAGRAM)
                self.hear(data.decode(errors="replace"), str(source[0]))


class Door(TokenServer):
    """The first message of an admitted connection names its role, and there is a function for each.

    A machine that knocks and hears no answer says so by a datagram: a firewall that drops what comes from the leader
    lets the knock out, but TCP needs both directions, so the leader would wait for a machine that has given up. It is
    signed with the token, for this door and this sender alone; a stranger's is dropped unread.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        udp = socket.socket(listener.family, socket.SOCK_DGRAM)
        super().__init__(listener, udp, token)
        self.unheard: dict[str, str] = {}  # machines that gave up because no answer reached them: names, by address
        self._handlers: Mapping[str, Handler] = {}  # by role
        with suppress(OSError):  # taken by another program: then nobody is heard in this way
            udp.bind((self.address, self.port))

    @property
    def place(self) -> str:
        """ADDRESS:PORT, as `uneven join` takes it."""
        return join_place(self.address, self.port)

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """`handlers`: what is called for a connection by its role."""
        self._handlers = handlers
        self.listen()

    def serve(self, connection: Connection) -> None:
        with suppress(WireError):
            first = connection.read(ROLE_S)
            handler = self._handlers.get(str(first.get("role")))
            if handler is not None:
                handler(connection, first)
                return
            refused = f"no role {str(first.get('role'))[:40]!r} here; install the same uneven on both"
            connection.send(refused=refused)
        connection.close()

    def hear(self, text: str, address: str) -> None:
        host, _, mac = text.partition(" ")
        is_known = is_mac(mac, self._token, "unheard", f"{self.address} {self.port}", address, host)
        if is_known and len(self.unheard) < MOST_REMEMBERED:
            self.unheard[address] = host


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
