"""What each rank has handed in, round by round, in the launcher's store: there it outlives the rank.

Before a rank sends its params for a round, its averaging thread writes down which parts are in them, and waits until
the store has it. So for every round that counts (policy/lineage.py) the store knows every rank's parts, in order, also
those of a rank that is gone. Without a Membership nobody goes on after a loss, and nothing is written.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from uneven.comm.store import Store
from uneven.policy.lineage import Era, Part, decode, encode
from uneven.policy.recorded import Round

AT_ONCE = 256  # records that are read with one request


class RoundRecords:
    """Life cycle: one per rank and run, with a client of the store that nobody else waits on. Used by one thread."""

    def __init__(self, store: Store, member: str) -> None:
        self._store, self._member = store, member

    def write(self, generation: int, number: int, parts: Iterable[Part], dropped: Iterable[Part], about: Round) -> None:
        """Before round `number` of a generation, counted from 1: the parts that this rank adds to its average.

        `about` is the round as this rank knows it so far: its slot, its parts when it entered, those when it merged
        the round before, and the factor on its learning rates since.
        """
        key = _key(generation, number, self._member)
        record = {"parts": encode(parts), "dropped": encode(dropped), "round": list(about)}
        self._store.set(key, json.dumps(record))
        self._store.check([key])  # a client sends and goes on: the answer says that the store has it

    def read(self, lineage: Sequence[Era], member: str) -> dict[str, Any]:
        """All that a member has handed in: `log` and `dropped` as in its results, and `rounds`."""
        keys = [
            _key(era.generation, number, member)
            for place, era in enumerate(lineage)
            if member in era.members
            for number in range(0 if place == 0 else 1, era.rounds + 1)
        ]
        found: list[dict[str, Any]] = []
        for first in range(0, len(keys), AT_ONCE):
            found += [json.loads(data) for data in self._store.multi_get(keys[first : first + AT_ONCE])]
        return {
            "member": member,
            "log": decode(run for record in found for run in record["parts"]),
            "dropped": decode(run for record in found for run in record["dropped"]),
            "rounds": [record["round"] for record in found],
        }


def _key(generation: int, number: int, member: str) -> str:
    return f"parts/{generation}/{number}/{member}"
