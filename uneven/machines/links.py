"""The links between the machines of a run: does every one reach every other, how fast, and how far apart are clocks.

Every machine opens a `Listener` at the address that the others will use, and calls `reach` when all of them are there;
the leader gathers the reports (plain JSON), `judge`s them and prints `describe`. A probe proves the token first, as at
the leader's door. One datagram each way says which direction is cut where TCP, which needs both, finds nothing.
"""

import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from uneven.errors import InputError, MachineError
from uneven.machines.door import Ports, TokenServer
from uneven.machines.parity import CLOCK_S, Difference, clock_difference
from uneven.machines.wire import Connection, WireError, greet, is_mac, make_mac

CONNECT_S = 3.0  # for a first answer: a firewall that drops packets gives none
PROBES_S = 15.0  # the longest a probe's connection is served
PINGS, PINGS_S = 10, 0.5
BURST_S, BURSTS_S = 0.25, 2.0  # one burst, and those to all others together
BURST_BYTES = 32 << 20
CHUNK = 1 << 16
MOST_PROBES = 64  # served at once
AT_ONCE = MOST_PROBES // 2  # sent at once: every machine begins with its neighbours, and some are a little ahead
PING, BURST = b"p", b"b"
CLOCK, RATE = struct.Struct("!d"), struct.Struct("!dq")


@dataclass(frozen=True)
class Peer:
    """A machine of the run as the others reach it."""

    host: str
    address: str
    port: int


class Listener(TokenServer):
    """Answers the probes of the other machines, on one address. Life cycle: from its construction to `close`."""

    def __init__(self, address: str, token: str, ports: Ports | None = None) -> None:
        """`ports` are the first and the last allowed one. MachineError where none is free."""
        super().__init__(*_bind(address, ports), token)
        self._heard: set[int] = set()
        self._places = threading.BoundedSemaphore(MOST_PROBES)
        self.listen()

    @property
    def heard(self) -> list[int]:
        """The machines whose datagrams have arrived."""
        return sorted(self._heard)

    def send_datagram(self, me: int, peer: Peer) -> None:
        with suppress(OSError):  # no route, or a firewall that says so: then TCP fails too, with its reason
            self._udp.sendto(f"{me} {make_mac(self._token, 'datagram', str(me))}".encode(), (peer.address, peer.port))

    def hear(self, text: str, address: str) -> None:
        del address
        number, _, mac = text.partition(" ")
        if number.isdecimal() and len(number) < 6 and is_mac(mac, self._token, "datagram", number):
            self._heard.add(int(number))

    def serve(self, connection: Connection) -> None:
        has_place = self._places.acquire(blocking=False)
        with connection.sock as sock, suppress(OSError, WireError):
            end_s = time.monotonic() + PROBES_S
            while has_place and (left_s := end_s - time.monotonic()) > 0:
                sock.settimeout(left_s)
                word = sock.recv(1)
                if word == BURST:
                    _receive_burst(sock)
                if word != PING:
                    break
                sock.sendall(CLOCK.pack(time.time()))
        if has_place:
            self._places.release()


def reach(me: int, peers: Sequence[Peer], listener: Listener, token: str) -> dict[str, Any]:
    """Probe every other machine: all at once for round trips, one after the other for bandwidth. Plain JSON.

    `peers` are all machines of the run in their order, this one (number `me`) included. Called on all of them at
    about the same time; takes CONNECT_S where one cannot be reached, and about two seconds where all can.
    """
    others = [(me + step) % len(peers) for step in range(1, len(peers))]  # each begins with another one
    for number in others:
        listener.send_datagram(me, peers[number])
    links: dict[int, dict[str, Any]] = {number: {"to": number, "error": "no answer in time"} for number in others}
    sockets: dict[int, socket.socket] = {}

    def probe(number: int) -> None:
        try:
            sockets[number], links[number] = _probe(peers[number], peers[me].address, token)
            links[number]["to"] = number
        except (OSError, WireError, InputError) as error:
            links[number] = {"to": number, "error": _reason(error)}

    for first in range(0, len(others), AT_ONCE):
        batch = others[first : first + AT_ONCE]
        threads = [threading.Thread(target=probe, args=(number,), daemon=True) for number in batch]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CONNECT_S + PINGS_S + 1.0)
        for number in batch:
            listener.send_datagram(me, peers[number])  # again: one may be lost, or have come before its listener
            if number in sockets:
                with sockets[number] as sock:
                    links[number]["bytes_per_s"] = _send_burst(sock, min(BURST_S, BURSTS_S / len(others)))
    return {"machine": me, "links": [links[number] for number in sorted(links)], "heard": listener.heard}


def judge(peers: Sequence[Peer], reports: Sequence[Mapping[str, Any]], skip: Collection[str] = ()) -> list[Difference]:
    """What stops a run on these links: another address family, a way that is closed, a clock that is far off."""
    found: list[Difference] = []
    for peer in peers[1:]:
        if (":" in peer.address) != (":" in peers[0].address):
            theirs, ours = ("IPv6" if ":" in one.address else "IPv4" for one in (peer, peers[0]))
            fix = f"join by an {ours} address of the leader"
            found.append(Difference(peer.host, f"the family of {peer.address}", theirs, ours, fix, "links"))
    links = {(report["machine"], link["to"]): link for report in reports for link in report["links"]}
    heard = {(number, report["machine"]) for report in reports for number in report["heard"]}
    for first in range(len(peers)):
        for second in range(first + 1, len(peers)):
            found += _judge_pair(peers, links, heard, first, second)
    for number in range(1, len(peers)):
        link = links.get((0, number), {})
        if abs(link.get("clock_s", 0.0)) > CLOCK_S + link.get("clock_error_s", 0.0):
            found.append(clock_difference(peers[number].host, link["clock_s"]))
    return [difference for difference in found if difference.check not in skip]


def describe_rate(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"


def _judge_pair(
    peers: Sequence[Peer],
    links: Mapping[tuple[int, int], Mapping[str, Any]],
    heard: Collection[tuple[int, int]],
    first: int,
    second: int,
) -> list[Difference]:
    """At most one difference: the direction that is cut, as far as it is known."""
    closed = [way for way in ((first, second), (second, first)) if links.get(way, {"error": "no report"}).get("error")]
    if not closed:
        return []
    silent = [way for way in closed if way not in heard and way[::-1] in heard]
    source, target = silent[0] if silent else closed[0]
    error = links.get((source, target), {}).get("error") or links.get((target, source), {}).get("error", "no report")
    theirs, ours = peers[source], peers[target]
    is_one_way = len(closed) == 1 or bool(silent)
    other_way = ""
    if len(closed) == 1:
        other_way = f", while {ours.host} reaches {theirs.host}"
    elif silent:
        other_way = f", while packets of {ours.host} arrive at {theirs.host}"
    what = f"the way from {theirs.host} ({theirs.address})"
    fix = f"let {theirs.address} in by the firewall of {ours.host}, as in: sudo ufw allow from {theirs.address}"
    if not is_one_way:
        fix = f"check cable, Wi-Fi isolation and the firewalls of {ours.host} and {theirs.host}"
    return [Difference(ours.host, what, f"closed ({error}{other_way})", "", fix, "links")]


def _bind(address: str, ports: Ports | None) -> tuple[socket.socket, socket.socket]:
    """A TCP and a UDP socket on one port of one address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    why: OSError | None = None
    for port in (0,) * 8 if ports is None else range(ports[0], ports[1] + 1):
        tcp, udp = socket.socket(family, socket.SOCK_STREAM), socket.socket(family, socket.SOCK_DGRAM)
        try:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((address, port))
            udp.bind((address, tcp.getsockname()[1]))
            tcp.listen(MOST_PROBES)
            return tcp, udp
        except OSError as error:  # taken by another program: the next one
            why = error
            tcp.close()
            udp.close()
    raise MachineError(f"no port for the reach test at {address}: {why}; name free ones with --ports")


def _probe(peer: Peer, own_address: str, token: str) -> tuple[socket.socket, dict[str, Any]]:
    """A connection that is open for a burst, and what its round trips say."""
    end_s = time.monotonic() + CONNECT_S
    # From the address that the others use for this machine: the answer must find that one.
    sock = socket.create_connection((peer.address, peer.port), CONNECT_S, source_address=(own_address, 0))
    try:
        sock.settimeout(max(end_s - time.monotonic(), 0.1))
        greet(sock, token)
        return sock, _measure(sock)
    except BaseException:
        sock.close()
        raise


def _measure(sock: socket.socket) -> dict[str, Any]:
    round_trips: list[float] = []
    offset_s, end_s = 0.0, time.monotonic() + PINGS_S
    sock.settimeout(CONNECT_S)
    while not round_trips or (len(round_trips) < PINGS and time.monotonic() < end_s):
        sent, began = time.time(), time.perf_counter()
        sock.sendall(PING)
        (clock,) = CLOCK.unpack(_read_exactly(sock, CLOCK.size))
        round_trip = time.perf_counter() - began
        if not round_trips or round_trip < min(round_trips):
            offset_s = clock - (sent + round_trip / 2)  # the shortest round trip has the smallest error
        round_trips.append(round_trip)
    steps = [abs(after - before) for before, after in pairwise(round_trips)]
    return {
        "round_trip_s": statistics.median(round_trips),
        "jitter_s": statistics.fmean(steps) if steps else 0.0,
        "clock_s": offset_s,
        "clock_error_s": min(round_trips) / 2,
    }


def _send_burst(sock: socket.socket, seconds: float) -> float | None:
    """Bytes per second that arrive; None where the other side does not say. What is still queued is dropped."""
    chunk, sent = bytes(CHUNK), 0
    end_s = time.monotonic() + seconds + CONNECT_S
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        sock.sendall(BURST + CLOCK.pack(seconds))
        sock.setblocking(False)
        while (left_s := end_s - time.monotonic()) > 0:
            wants = [sock] if sent < BURST_BYTES else []
            readable, writable, _ = select.select([sock], wants, [], left_s)
            if readable:
                sock.settimeout(CONNECT_S)
                rate, _ = RATE.unpack(_read_exactly(sock, RATE.size))
                return float(rate)
            if writable:
                sent += sock.send(chunk)
    except (OSError, WireError):
        return None
    return None


def _receive_burst(sock: socket.socket) -> None:
    """Take what comes for as long as the sender said, tell it the rate, and wait for it to hang up."""
    (seconds,) = CLOCK.unpack(_read_exactly(sock, CLOCK.size))
    began, total = time.perf_counter(), 0
    seconds = min(max(seconds, 0.0), BURST_S)
    marks: list[tuple[float, int]] = []
    while (left_s := began + seconds - time.perf_counter()) > 0 and total < BURST_BYTES:
        sock.settimeout(left_s)
        try:
            chunk = sock.recv(CHUNK * 4)
        except TimeoutError:
            break
        if not chunk:
            return
        total += len(chunk)
        marks.append((time.perf_counter() - began, total))
    sock.sendall(RATE.pack(_late_rate(marks), total))
    sock.settimeout(1.0)
    for _ in range(4096):  # closing with bytes unread would take the answer back
        if not sock.recv(CHUNK * 4):
            return


def _late_rate(marks: Sequence[tuple[float, int]]) -> float:
    """Bytes per second of the second half: the first one has the slow start of TCP and full buckets of a limiter."""
    if not marks:
        return 0.0
    end_s, total = marks[-1]
    half = next(mark for mark in marks if mark[0] >= end_s / 2)
    if half == marks[-1]:
        return total / max(end_s, 1e-9)
    return (total - half[1]) / (end_s - half[0])


def _read_exactly(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        chunk = sock.recv(size - len(found))
        if not chunk:
            raise WireError("the other side has closed the connection")
        found += chunk
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()
