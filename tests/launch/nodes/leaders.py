"""A leader with its door, and machines that join it."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uneven.launch.nodes.gathering import Gathering
from uneven.launch.nodes.remote import AllRanks
from uneven.machines.door import Door, knock, listen
from uneven.machines.facts import stamped
from uneven.machines.file_service import FileService
from uneven.machines.options import LeadOptions
from uneven.machines.wire import Connection
from uneven.train.requests import Requests
from uneven.version import __version__

TOKEN = "the-right-token"


FACTS: dict[str, Any] = {
    "host": "lead", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.0.0", "code": {"train.py": "aa"},
    "uneven": {"version": __version__, "digest": "d"}, "devices": [{"device": "cpu", "precisions": ["fp32"]}],
}  # fmt: skip


OPTIONS = LeadOptions(2, 2, TOKEN, wait=30.0)


class Leader:
    """A door with a gathering behind it, and what it has printed."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._gathering: Gathering | None = None
        self.door = Door(listen("127.0.0.1"), TOKEN)
        self.door.open({"node": self._receive, "files": FileService(self.said.append).handle})

    def gather(self, options: LeadOptions = OPTIONS, script: str = "train.py") -> Gathering:
        order = {"script": script, "args": [], "settings": {"precision": "bf16"}, "host": "lead", "ports": None}
        self._gathering = Gathering(self.door, options, order, FACTS, self.said.append)
        return self._gathering

    def _receive(self, connection: Connection, first: dict[str, Any]) -> None:
        assert self._gathering is not None
        self._gathering.receive(connection, first)

    def join(self, host: str = "node", version: str = __version__) -> Connection:
        connection = knock("127.0.0.1", self.door.port, TOKEN, 10.0)
        connection.send(role="node", version=version, host=host)
        return connection


def read(connection: Connection) -> dict[str, Any]:
    while "alive" in (message := connection.read(20.0)):
        pass
    return message


def bring(connection: Connection, **changes: Any) -> None:
    """Answer the order with facts."""
    assert read(connection)["order"]["script"] == "train.py"
    send_facts(connection, {**FACTS, **changes})


def send_facts(connection: Connection, facts: Mapping[str, Any]) -> None:
    connection.send(facts=stamped(facts), port=7000)


class NoProcesses:
    numbers = (0,)

    def exit_codes(self) -> list[int | None]:
        return [None]

    def lost(self) -> dict[int, str]:
        return {}

    def stopped(self) -> set[int]:
        return {0}


class Joined:
    """A machine with two ranks in a run, as its leader has it."""

    def __init__(self, leader: Leader, folder: Path) -> None:
        gathering = leader.gather()
        self.connection = leader.join("pc")
        bring(self.connection, devices=[{"device": "cpu", "precisions": ["fp32"]}] * 2)
        (self.node,) = gathering.wait()
        self.node.place((1, 2))
        processes: Any = NoProcesses()
        self.ranks = AllRanks(processes, [self.node], folder, Requests())

    def end_ranks(self, *codes: int | None) -> None:
        self.connection.send(codes=codes)
        while self.ranks.exit_codes()[1:] != [*codes]:
            time.sleep(0.01)
