"""Bring the ranks that an engine started together: find the store, meet, settle how they speak. Once per process.

Called by launch/context.py when the first run of the process asks who takes part.
"""

import json
import time
from dataclasses import replace

from uneven.comm.store import Store, get_text
from uneven.errors import USER_ERRORS, InputError, RankError
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.external.interface import settle_interface
from uneven.launch.external.locate import locate_store, warn
from uneven.launch.external.placement import Placement, read_facts
from uneven.launch.external.rendezvous import rendezvous

READY_PAUSE_S = 0.02
REFUSED_KEY = "refused"


def assemble(environment: LaunchEnvironment) -> tuple[LaunchEnvironment, Placement, list[str]]:
    """(the environment with its numeric address and the keys of this attempt, who is where, lines for the user)."""
    rank, size = environment.rank, environment.world_size
    if size == 1:
        return environment, Placement((read_facts(replace(environment, host="")),)), []
    environment = locate_store(environment)
    name, facts = rendezvous(environment.connect("meeting"), rank, size, read_facts(environment), warn)
    environment = replace(environment, prefix=f"{environment.prefix}{name}/")
    placement = Placement(facts)
    address, lines = settle_interface(environment.connect("interface"), rank, placement)
    return replace(environment, address=address), placement, lines


def await_all(store: Store, rank: int, size: int, refusals: Store | None = None) -> None:
    """Wait until every rank has passed its checks. InputError or MachineError with the words of one that has not.

    `refusals` is where those are written, if not to the same keys.
    """
    store.set(f"ready/{rank}", "1")
    keys = [f"ready/{other}" for other in range(size)]
    while not store.check(keys):
        if (text := get_text(refusals or store, REFUSED_KEY)) is not None:
            told = json.loads(text)
            raise USER_ERRORS.get(told["kind"], RankError)(told["message"])
        time.sleep(READY_PAUSE_S)


def tell_refusal(store: Store, rank: int, host: str, error: BaseException) -> None:
    """This rank will not come: its checks have failed."""
    kind = next((name for name, kind in USER_ERRORS.items() if isinstance(error, kind)), "other")
    message = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    store.set(REFUSED_KEY, json.dumps({"kind": kind, "message": f"rank {rank} on {host}: {message}"}))
