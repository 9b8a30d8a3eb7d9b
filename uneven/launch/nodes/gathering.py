"""The leader at its door: wait until enough machines are there whose facts fit; later, take in those that join.

A machine that joins says who it is, gets the order (script, arguments, settings), answers with its facts, and is
compared before either side has loaded torch. The first one that does not fit ends the run on all machines with the
same line: half a cluster that waits for somebody who will not come helps nobody. Once the run is on, a machine that
does not fit is refused alone. Who comes between the two, or too much for --nodes, is neither left in silence nor sent
away for good: it joins once the run is on, or is refused at once where the run is full.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from uneven.errors import RefusedError
from uneven.launch.nodes.remote import RemoteNode
from uneven.machines.addresses import host_label
from uneven.machines.door import Door
from uneven.machines.facts import stamped
from uneven.machines.hosts import StartedHosts
from uneven.machines.messages import FROM_NODE, HELLO, checked
from uneven.machines.options import LeadOptions
from uneven.machines.parity import compare, notes
from uneven.machines.session import Session
from uneven.machines.wire import Connection, WireError
from uneven.version import __version__

FACTS_S = 120.0
POLL_S = 0.2
OVER = "the run is over; start another with --nodes"


class _Misfit(NamedTuple):
    """A machine that does not fit, and why."""

    session: Session
    host: str
    error: RefusedError


class Gathering:
    """Life cycle: from its construction machines may join; `wait` once; who is late waits for `open_again`."""

    def __init__(
        self,
        door: Door,
        options: LeadOptions,
        order: Mapping[str, Any],
        facts: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """`order` is what machines are told; its 'script' is relative to the current folder of each machine."""
        self.nodes: list[RemoteNode] = []
        self._door = door
        self._options = options
        self._order = order
        self._facts = facts
        self._say = say
        self._arrived: queue.SimpleQueue[RemoteNode | _Misfit] = queue.SimpleQueue()
        self.sessions: list[Session] = []  # of all machines that have come, and are told about the end
        self._starting = threading.Lock()  # a machine is either seen by `wait`, or comes later
        self._has_started = False
        self._is_open_again = threading.Event()  # or the run is over
        self._check_late: Callable[[RemoteNode], None] | None = None
        self._late: queue.SimpleQueue[RemoteNode] = queue.SimpleQueue()
        self._seen_strangers: set[str] = set()

    def wait(self, started: StartedHosts | None = None) -> list[RemoteNode]:
        """The machines that take part beside this one; RefusedError where too few come, or one does not fit."""
        options = self._options
        began_s, enough_s = time.monotonic(), None
        while True:
            with suppress(queue.Empty):
                self._take(self._arrived.get(timeout=POLL_S))
            self._drop_lost()
            self._show_strangers()
            self._refuse_unheard()
            now_s, count = time.monotonic(), len(self.nodes) + 1
            if started is not None and count < options.fewest and (failure := started.failure()) is not None:
                raise RefusedError(failure)
            enough_s = None if count < options.fewest else enough_s or now_s
            if count == options.most or (enough_s is not None and now_s - enough_s > options.more_s):
                self._begin()
                return self.nodes
            if enough_s is None and now_s - began_s > options.wait_s:
                raise RefusedError(self._too_few(count))

    def _begin(self) -> None:
        """The run starts with those who are there. Whoever else has come is not forgotten."""
        with self._starting:
            self._has_started = True
            late: list[RemoteNode | _Misfit] = []
            with suppress(queue.Empty):
                while True:
                    late.append(self._arrived.get_nowait())
        for one in late:
            threading.Thread(target=self._come_later, args=(one,), name="uneven-late", daemon=True).start()

    def close(self) -> None:
        """The run is over: whoever waits, or comes from now on, is refused."""
        self._has_started, self._check_late = True, None
        self._is_open_again.set()

    def open_again(self, check: Callable[[RemoteNode], None]) -> None:
        """The run is on: who comes from now on joins it. `check` raises RefusedError where it cannot; on any thread."""
        self._check_late = check
        self._is_open_again.set()

    def arrived(self) -> list[RemoteNode]:
        """Machines that have come since the last call, and fit a run in progress."""
        self._show_strangers()
        found: list[RemoteNode] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._late.get_nowait())
        return found

    def _take(self, found: "RemoteNode | _Misfit") -> None:
        if isinstance(found, _Misfit):
            raise found.error
        self.nodes.append(found)
        for note in notes(self._facts, found.facts):
            self._say(f"  note: {note}")
        left = self._options.most - len(self.nodes) - 1
        more = "all are there" if not left else f"{left} more may join"
        if (missing := self._options.fewest - len(self.nodes) - 1) > 0:
            more = f"waiting for {missing} more"
        self._say(f"  {found.name} has joined with {','.join(found.devices)}: {more}")

    def _drop_lost(self) -> None:
        for node in self.nodes:
            if node.session.why_lost is not None:
                self._say(f"  {node.name} has left again: {node.session.why_lost}")
                node.session.close()
        self.nodes[:] = [node for node in self.nodes if node.session.why_lost is None]

    def _show_strangers(self) -> None:
        for address in set(self._door.wrong_tokens) - self._seen_strangers:
            self._seen_strangers.add(address)
            self._say(f"  {address} was refused: wrong token")

    def _refuse_unheard(self) -> None:
        for address, host in self._door.unheard.items():
            raise RefusedError(
                f"{host}: the way from {host_label()} ({self._door.address}) is closed (packets of {address} arrive "
                f"here, and the answers not there); let {self._door.address} in by the firewall of {host}, as in: "
                f"sudo ufw allow from {self._door.address}"
            )

    def _too_few(self, count: int) -> str:
        strangers = "".join(f"; {address} had a wrong token" for address in sorted(self._seen_strangers)[:3])
        return (
            f"{count} of {self._options.fewest} machines were there after {self._options.wait_s:g} s (--wait)"
            f"{strangers}; type on the others: uneven join {self._door.place}, and let port {self._door.port} in by "
            f"the firewall of {host_label()}"
        )

    def receive(self, connection: Connection, first: Mapping[str, Any]) -> None:
        """On a thread of the door: one machine, from its first message to the facts that fit or do not."""
        try:
            hello = checked(first, HELLO)
        except WireError as error:
            self._say(f"  {connection.peer_address} was sent away: {error}")
            raise
        session = Session(connection, FROM_NODE)
        host = hello["host"] or session.address
        if self._is_open_again.is_set() and self._check_late is None:
            refuse(session, OVER)
            return
        self.sessions.append(session)
        found: RemoteNode | _Misfit
        try:
            if (version := hello["version"]) != __version__:
                fix = f"pip install uneven=={__version__} there"
                raise RefusedError(f"{host}: uneven is {version}, the leader's is {__version__}; {fix}")
            found = self._compare(session, host)
        except RefusedError as error:
            found = _Misfit(session, host, error)
        except WireError as error:  # nobody waits for it
            self._say(f"  {host} ({session.address}) has left again: {error}")
            session.close()
            return
        with self._starting:
            if not self._has_started:
                self._arrived.put(found)
                return
        self._come_later(found)

    def _come_later(self, found: "RemoteNode | _Misfit") -> None:
        """A machine that the start does not count: it joins the run once that is on, or is refused alone."""
        try:
            if isinstance(found, _Misfit):
                raise found.error
            is_full = len(self.nodes) + 1 >= self._options.most
            if not self._is_open_again.is_set() and is_full:  # once it is on, machines may have left (lead.py)
                raise RefusedError(has_all(self._options.most))
            self._is_open_again.wait()
            if (check := self._check_late) is None:
                raise RefusedError(OVER)
            check(found)
            self._late.put(found)
        except RefusedError as error:
            self._say(f"  {found.host} ({found.session.address}) was refused, the run goes on: {error}")
            refuse(found.session, str(error))

    def _compare(self, session: Session, host: str) -> RemoteNode:
        """RefusedError where its facts do not fit."""
        asked_s = time.monotonic()
        session.send(order=self._order)
        answer = self._read_facts(session, host)
        round_trip_s = time.monotonic() - asked_s
        settings = self._order["settings"]
        facts = {**answer["facts"], "host": host}
        differences = compare(
            stamped(self._facts), facts, round_trip_s=round_trip_s, skip=self._options.skip,
            precision=settings.get("precision"), backend=settings.get("backend"),
        )  # fmt: skip
        if differences:
            more = "" if len(differences) == 1 else f" ({len(differences) - 1} more, see: uneven preflight)"
            raise RefusedError(f"{differences[0]}{more}")
        return RemoteNode(session, host, facts, answer["port"])

    def _read_facts(self, session: Session, host: str) -> dict[str, Any]:
        answer = session.expect("facts", "cannot", timeout_s=FACTS_S)
        if "cannot" in answer:
            raise RefusedError(f"{host}: {answer['cannot']}")
        return answer


def has_all(most: int) -> str:
    return f"the run has its {most} machines (--nodes)"


def refuse(session: Session, why: str) -> None:
    """Send it away in words."""
    session.send(refused=why)
    session.wait_closed(1.0)
    session.close()
