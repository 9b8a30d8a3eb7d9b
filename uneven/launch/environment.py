"""What the launcher of this process said about it: rank, world size, and the address of the ranks' store.

Read by launch/context.py. Only torchrun's variables are read. `uneven run` and `fit` hand theirs over in a file (see
launch/rank.py) and set no variables: a program that the user's script starts must not take itself for a rank.
"""

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from uneven.comm.store import Store, TCPStore, host_store, reach_store, under

ALONE = ""  # the launcher of a process that nobody started as a rank

_hosted: list[TCPStore] = []  # lives as long as the process: the other ranks need it to the end


def new_member_id(place: str, host: str | None = None) -> str:
    """An identity for one process: '<hostname>/<place>/<8 hex digits>', never used twice.

    A rank changes when machines come and go, and a restarted process is another member.
    """
    return f"{host or socket.gethostname()}/{place}/{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class LaunchEnvironment:
    """One process among `world_size`, as its launcher numbered them, and the address of their store."""

    launcher: str  # "fit", "uneven run", "torchrun", or ALONE
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: str = ""
    port: int = 0
    prefix: str = ""  # of all our keys: torchrun shares its store with other programs
    hosts_store: bool = False  # the launcher has no store of its own: this rank must serve it
    door: tuple[str, int, str] | None = field(default=None, repr=False)  # of the leader: address, port and token
    member: str = field(default_factory=lambda: new_member_id("process"), compare=False)

    def connect(self, name: str) -> Store:
        """A new client of the store, with its keys under `name`; a client that waits blocks its other users."""
        if self.hosts_store and not _hosted:
            _hosted.append(host_store(self.host, self.port))
        return under(f"{self.prefix}{name}", reach_store(self.host, self.port))


def read_torchrun(environ: Mapping[str, str] = os.environ) -> LaunchEnvironment | None:
    """What torchrun's variables say about this process, or None where torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    rank = int(environ["RANK"])
    local_rank = int(environ.get("LOCAL_RANK", rank))
    # The agent's store still holds the keys of the last attempt when torchrun restarts the ranks.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LaunchEnvironment(
        "torchrun",
        rank,
        int(environ["WORLD_SIZE"]),
        local_rank,
        int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        f"uneven/{environ['TORCHELASTIC_RUN_ID']}/{attempt}/",
        hosts_store=rank == 0 and not has_agent_store,
        member=new_member_id(f"local-{local_rank}"),
    )
