"""What the launcher of this process said about it: rank, world size, and the address of the ranks' store.

Made by launch/external/variables.py from the variables of torchrun, Slurm or Kubernetes, and by launch/rank.py
from the plan of `uneven run` and `fit`. Those hand theirs over in a file and set no variables: a program that the
user's script starts must not take itself for a rank.
"""

import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uneven.comm.store import Store

ALONE = ""  # the launcher of a process that nobody started as a rank
OWN_LAUNCHERS = ("fit", "uneven run")
WRITE_S = 2.0  # for a store that is there


def new_member_id(place: str, host: str | None = None) -> str:
    """An identity for one process: '<hostname>/<place>/<8 hex digits>', never used twice.

    A rank changes when machines come and go, and a restarted process is another member.
    """
    return f"{host or socket.gethostname()}/{place}/{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class BegunWithout:
    """Of ranks that were started again, because others were lost before the first step: who is left, and why."""

    why: str  # one line for the user
    left: tuple[int, ...]  # places among the devices of the first start
    of: int  # how many those were


@dataclass(frozen=True)
class LaunchEnvironment:
    """One process among `world_size`, as its launcher numbered them, and the address of their store.

    What the launcher does not say is None. `host` may be a name until launch/external/meeting.py has made it a number.
    """

    launcher: str  # "fit", "uneven run", the name of another one, or ALONE
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    host: str = ""
    port: int = 0
    prefix: str = ""  # of all our keys: torchrun shares its store with other programs
    has_store: bool = True  # the launcher serves the store; else rank 0 must
    node: int | None = None  # the launcher's number of this machine
    variable: str = "MASTER_ADDR"  # what `host` was read from, with its value, for messages
    fallback: str = ""  # another way to the store's machine, where `host` is a name that nobody knows
    peers: tuple[str, ...] = ()  # names of the other machines, as far as the launcher tells
    is_kubernetes: bool = False
    address: str = ""  # under another launcher: at which the other machines reach this one, once it is settled
    doubt: str = ""  # about the user's choice of that address, if the other machines are not reached
    door: tuple[str, int, str] | None = field(default=None, repr=False)  # of the leader: address, port and token
    without: BegunWithout | None = None
    member: str = field(default_factory=lambda: new_member_id("process"), compare=False)

    @property
    def is_external(self) -> bool:
        """Whether another launcher than ours started the ranks: they find and watch each other."""
        return self.launcher != ALONE and self.launcher not in OWN_LAUNCHERS

    @property
    def is_launched(self) -> bool:
        """Whether a launcher of ours started the ranks: it watches over them."""
        return self.launcher in OWN_LAUNCHERS

    @property
    def hosts_store(self) -> bool:
        return self.rank == 0 and not self.has_store

    @property
    def is_on_one_machine(self) -> bool:
        """Whether the launcher says that all ranks are on this machine; it may not say it where they are."""
        return self.local_world_size == self.world_size

    def connect(self, name: str) -> "Store":
        """A new client of the store, with its keys under `name`; a client that waits blocks its other users."""
        from uneven.comm.store import reach_store, under  # imports torch

        return under(f"{self.prefix}{name}", reach_store(self.host, self.port))

    def write(self, name: str, write: Callable[["Store"], None]) -> None:
        """Write to the store; one that is gone, with the rank that served it, is not waited for."""

        def connect() -> None:
            with suppress(RuntimeError):
                write(self.connect(name))

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(WRITE_S)
