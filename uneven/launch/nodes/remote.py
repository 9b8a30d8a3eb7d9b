"""A joined machine as the leader sees it: what it brings, and the ranks that run on it.

Made at the leader's door (launch/nodes/gathering.py), used by launch/nodes/lead.py to the end of the run. `AllRanks`
puts the ranks of all machines into one list, so that launch/watch/watch.py need not know where a rank runs.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.launch.control.leave_requests import Answer, LeaveRequest, RequestFiles
from uneven.launch.local_ranks import LocalRanks, Newcomer
from uneven.launch.processes import leave_error
from uneven.machines.session import Session
from uneven.train.requests import Requests

if TYPE_CHECKING:
    from uneven.train.rank_info import Generation  # imports torch

MOST_TOLD = 256  # ranks in a status that goes to other machines
MOST_ASKED = 64  # requests of one machine that are not answered
ENDED_S = 5.0  # for a machine that was told to end its ranks


@dataclass
class RemoteNode:
    """`host` is the name it gave itself, made unique among the machines of the run."""

    session: Session
    host: str
    facts: Mapping[str, Any]
    port: int  # of its listener for the reach test
    ranks: tuple[int, ...] = ()  # the numbers of its processes
    codes: list[int | None] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)  # of its processes, those that a signal has stopped
    left: str | None = None  # why it went by itself
    refused: set[int] = field(default_factory=set)  # of its processes, those that could not join
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)  # requests to leave that it has sent, by their names
    gone: dict[int, str] = field(default_factory=dict)  # those that have left on purpose, and a line about each
    dropped: dict[int, str] = field(default_factory=dict)  # those that the run has lost, and a line about each
    is_let_go: bool = False  # it was told that none of its processes is in the run any more

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(str(device["device"]) for device in self.facts["devices"])

    @property
    def name(self) -> str:
        return f"{self.host} ({self.session.address})"

    def place(self, ranks: Sequence[int]) -> None:
        """The numbers of its processes, which are about to start."""
        self.ranks, self.codes = tuple(ranks), [None] * len(ranks)

    def watch(self) -> None:
        """Its ranks start, and the watch over them is on; it is told so."""
        self.session.send(watched=1)
        self.session.watch()

    def hear(self, folder: Path, requests: Requests) -> None:
        """Take in what it has said: exit codes, reports of failed ranks, which go into `folder`, a request to stop."""
        while (message := self.session.take()) is not None:
            reports = {int(number): report for number, report in message.get("errors", {}).items()}
            own = [*reports, *message.get("unused", ()), *message.get("stopped", ())]
            count = len(message.get("codes", self.codes))
            if any(number >= len(self.ranks) for number in own) or count != len(self.ranks):
                self.session.end(f"it spoke of ranks that it does not have: it has {len(self.ranks)}")
                return
            for number, report in reports.items():
                leave_error(folder, self.ranks[number], report)
            for number in message.get("unused", ()):
                (folder / f"unused-{self.ranks[number]}").touch()
            if "codes" in message:
                self.codes = message["codes"]
            if "stopped" in message:
                self.stopped = {self.ranks[number] for number in message["stopped"]}
            if "stop" in message:
                requests.rank_signalled(message["stop"] or signal.SIGINT)
            if "left" in message:
                self.left = message["left"]
            if "leave" in message:
                self.asked[message["leave"]] = {**message, "is_new": True}
            if len(self.asked) > MOST_ASKED:
                self.session.end(f"it asked for more than {MOST_ASKED} things at a time")
                return
            if "stays" in message:
                self.asked.pop(message["stays"], None)

    def take_requests(self) -> list[LeaveRequest]:
        """What it has asked for since the last call."""
        new = {name: message for name, message in self.asked.items() if message.pop("is_new", False)}
        return [self._request(name, message) for name, message in new.items()]

    def _request(self, name: str, message: Mapping[str, Any]) -> LeaveRequest:
        ranks = message.get("ranks")
        return LeaveRequest(
            self.ranks,
            partial(self._answer, name),
            None if ranks is None else tuple(ranks),
            is_urgent=bool(message.get("is_urgent")),
            is_open=lambda: name in self.asked,
        )

    def _answer(self, name: str, answer: Answer) -> None:
        self.session.send(answer=name, **answer)
        self.asked.pop(name, None)

    @property
    def has_place(self) -> bool:
        """Whether it counts as one of the run's machines."""
        return self.session.why_lost is None and not self.is_let_go

    def let_go(self) -> None:
        """Where none of its ranks is in the run any more, and all have ended, it is told so and may go.

        It was told only where all of them had left on purpose: `uneven join` stayed, without ranks, and kept its place.
        """
        is_out = bool(self.gone or self.dropped) and {*self.gone, *self.dropped} | self.refused == {*self.ranks}
        is_lost = self.session.why_lost is not None
        if self.is_let_go or not is_out or not (is_lost or all(code is not None for code in self.codes)):
            return
        self.is_let_go = True
        if self.gone:
            self.session.send(end="; ".join(dict.fromkeys(self.gone.values())), code=0, has_left=1)
        else:
            self.session.send(dropped="; ".join(dict.fromkeys(self.dropped.values())))
        if is_lost:
            self.session.close()  # what was sent is read first by a machine that was only suspended

    def lost(self) -> dict[int, str]:
        """Its ranks that ran when it went, with the line that says so."""
        lost = [rank for rank, code in zip(self.ranks, self.codes, strict=False) if code is None]
        if (why := self.left or self.session.why_lost) is None:
            return {}
        return dict.fromkeys(lost, f"{self.name} is lost with rank {', '.join(map(str, lost))}: {why}")


class AllRanks:
    """The processes of all machines by their numbers: at the start in rank order, this machine's own first.

    `arrived` returns machines that want to join the run, and have passed all checks; `start` has their ranks started,
    as processes from this number on, and added to this generation.
    """

    def __init__(
        self,
        processes: LocalRanks,
        nodes: Sequence[RemoteNode],
        folder: Path,
        requests: Requests,
        arrived: Callable[[], list[RemoteNode]] = list,
        start: "Callable[[RemoteNode, int, Generation], list[Newcomer]] | None" = None,
    ) -> None:
        self._processes = processes
        self._nodes = list(nodes)
        self._folder = folder
        self._requests = requests
        self._arrived = arrived
        self._start_node = start
        self._files = RequestFiles(folder)

    def exit_codes(self) -> list[int | None]:
        codes = dict(zip(self._processes.numbers, self._processes.exit_codes(), strict=True))
        for node in self._nodes:
            node.hear(self._folder, self._requests)
            node.let_go()
            codes |= dict.fromkeys(node.ranks) | dict(zip(node.ranks, node.codes, strict=False))
        return [codes[number] for number in sorted(codes)]

    def arrivals(self, number: int, present: "Generation") -> list[Newcomer]:
        """Those that have come since: their processes start with these numbers, from `number` on."""
        newcomers: list[Newcomer] = []
        for node in self._arrived():
            assert self._start_node is not None, "whoever lets machines in can start them"
            newcomers += self._start_node(node, number + len(newcomers), present)
            self._nodes += [node] if node.ranks else []
        return newcomers

    def asked(self) -> list[LeaveRequest]:
        """Which ranks were asked to leave since the last call, on this machine or another."""
        own = self._files.requests(tuple(self._processes.numbers))
        return [*own, *(request for node in self._nodes for request in node.take_requests())]

    def restart(self, lost: int, number: int, present: "Generation") -> Newcomer | None:
        return self._processes.restart(lost, number, present)

    def turn_away(self, number: int, why: str) -> None:
        """This process could not join. Its machine is told when none of its processes can."""
        for node in self._nodes:
            if number in node.ranks:
                node.refused.add(number)
                if node.refused == {*node.ranks}:
                    node.is_let_go = True
                    node.session.send(refused=why)

    def let_go(self, number: int, line: str) -> None:
        """This process has left on purpose. Its machine may go when all of its processes have."""
        for node in self._nodes:
            if number in node.ranks:
                node.gone[number] = line

    def lose(self, number: int, line: str) -> None:
        """The run goes on without this process. Its machine may go when none of its processes is in the run."""
        for node in self._nodes:
            if number in node.ranks:
                node.dropped[number] = line

    def tell(self, status: Mapping[str, Any]) -> None:
        """Where the run is, for `uneven status` on the other machines; all of it where it is small."""
        short = status if len(status["ranks"]) <= MOST_TOLD else {**status, "ranks": status["ranks"][:MOST_TOLD]}
        for node in self._nodes:
            if node.has_place:
                node.session.send(status=short)

    def lost(self) -> dict[int, str]:
        return {rank: why for node in self._nodes for rank, why in node.lost().items()}

    def stopped(self) -> set[int]:
        return self._processes.stopped().union(*(node.stopped for node in self._nodes))

    def give_up(self, number: int) -> None:
        for node in self._nodes:
            if number in node.ranks:
                node.session.send(give_up=node.ranks.index(number))
                return
        self._processes.give_up(number)


def end_sessions(sessions: Sequence[Session], reason: str, code: int) -> None:
    """Tell all machines that the run is over, and wait until they have ended their ranks."""
    for session in sessions:
        session.send(end=reason, code=code)
    end_s = time.monotonic() + ENDED_S
    for session in sessions:
        session.wait_closed(end_s - time.monotonic())
        session.close()
