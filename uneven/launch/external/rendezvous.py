"""Where ranks that an engine started meet: all learn each other's facts, and one name for this attempt of the run.

Called once per process by launch/context.py, before anything else is written to the store. An agent's store keeps the
keys of earlier attempts, and the engines have no number of the attempt that all machines share: torchrun counts
restarts on each machine by itself. So every process brings a word of its own, rank 0 proposes a name together with the
words it has read, and only who finds its own word in a proposal accepts it. When all have, it is the name; a word that
was left by a process of the last attempt is replaced by its successor's, and rank 0 proposes anew.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from uneven.comm.store import Store, get_text
from uneven.errors import MachineError

RENDEZVOUS_S = 1800.0  # another rank may still load its data before it trains
PATIENCE_S = 10.0  # then rank 0 says for whom it waits
PAUSE_S = 0.02

Facts = dict[str, Any]


def rendezvous(
    store: Store,
    rank: int,
    size: int,
    facts: Facts,
    say: Callable[[str], None],
    limit_s: float = RENDEZVOUS_S,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, tuple[Facts, ...]]:
    """(name of the attempt, the facts of all ranks in rank order), the same on all ranks."""
    own = json.dumps({"word": uuid.uuid4().hex, "facts": facts})
    store.set(_hello(rank), own)
    patience = _Patience(rank, size, limit_s, say, clock)
    name, words = (_propose if rank == 0 else _accept)(store, rank, size, own, patience)
    return name, tuple(json.loads(text)["facts"] for text in words)


class _Patience:
    """Between two looks at the store: says once for whom it waits, and gives up after the limit."""

    def __init__(
        self, rank: int, size: int, limit_s: float, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._rank, self._size, self._limit_s, self._say, self._clock = rank, size, limit_s, say, clock
        self._begin, self._has_said = clock(), False

    def wait(self, missing: Sequence[int]) -> None:
        waited_s = self._clock() - self._begin
        names = ", ".join(str(rank) for rank in missing) or "none"
        if waited_s > self._limit_s:
            raise MachineError(
                f"rank {self._rank} has waited {waited_s:.0f} s for the other {self._size - 1} ranks; "
                f"not heard of: {names}; look at the output of those, and start all of them again"
            )
        if waited_s > PATIENCE_S and missing and not self._has_said:
            self._has_said = True
            self._say(f"rank {self._rank} waits for ranks {names} of {self._size}")
        time.sleep(PAUSE_S)


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _propose(store: Store, rank: int, size: int, own: str, patience: _Patience) -> tuple[str, list[str]]:
    assert rank == 0, "one rank proposes"
    name, proposed = "", list[str]()
    while True:
        missing = [other for other in range(1, size) if not store.check([_hello(other)])]
        if not missing:
            words = [own, *(store.get(_hello(other)).decode() for other in range(1, size))]
            if words != proposed:
                name, proposed = uuid.uuid4().hex[:12], words
                store.set("proposal", json.dumps([name, words]))
            missing = [other for other in range(1, size) if not store.check([f"accept/{name}/{other}"])]
        if proposed and not missing:
            store.set(f"go/{name}", "1")
            return name, proposed
        patience.wait(missing)


def _accept(store: Store, rank: int, size: int, own: str, patience: _Patience) -> tuple[str, list[str]]:
    accepted = ""
    while True:
        if (text := get_text(store, "proposal")) is not None:
            name, words = json.loads(text)
            if len(words) == size and words[rank] == own:
                if name != accepted:
                    store.set(f"accept/{name}/{rank}", "1")
                    accepted = name
                if store.check([f"go/{name}"]):
                    return name, words
        patience.wait([] if accepted else [0])
