"""Who started this process: nobody, `uneven run` or torchrun; and the way to the store its ranks share.

Reads torchrun's variables and nothing else. `uneven run` sets no variables (see launch/script.py): a program that the
user's script starts must not take itself for a rank. Keys have a prefix of ours: under torchrun the store is shared.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from uneven.comm.store import Store, TCPStore, host_store, reach_store, under

_hosted: list[TCPStore] = []  # lives as long as the process: the other ranks need it to the end


@dataclass(frozen=True)
class Started:
    """This process's number among `world_size`, and the address of their store."""

    by: str  # "uneven run" or "torchrun"
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    prefix: str
    hosts_store: bool = False  # nobody else does: this rank must

    def reach(self, name: str) -> Store:
        """A client of its own, with its keys under `name`; a client that waits blocks its other users."""
        if self.hosts_store and not _hosted:
            _hosted.append(host_store(self.host, self.port))
        return under(f"{self.prefix}{name}", reach_store(self.host, self.port))


def read_torchrun(environ: Mapping[str, str] = os.environ) -> Started | None:
    """What torchrun says of this process, or None where it was not started by it."""
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    rank = int(environ["RANK"])
    # A restarted run meets the keys of its last attempt in the agent's store.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Started(
        "torchrun",
        rank,
        int(environ["WORLD_SIZE"]),
        int(environ.get("LOCAL_RANK", rank)),
        int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        f"uneven/{environ['TORCHELASTIC_RUN_ID']}/{attempt}/",
        hosts_store=rank == 0 and not has_agent,
    )
