"""What each rank has handed in, round by round, in the launcher's store: there it outlives the rank.

Before a rank sends its params for a round, its averaging thread writes down which parts are in them, and waits until
the store has it. So for every round that counts (policy/lineage.py) the store knows every rank's parts, in order, also
those of a rank that is gone. Without a Membership nobody goes on after a loss, and nothing is written.

Each rank has CHUNK keys that it uses in turn. Before it uses them again, what they hold is written as one compressed
chunk: a record under a key of its own took the store 294 bytes instead of 47, and there is one for each rank and round.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from uneven.comm.store import Store
from uneven.policy.lineage import Era, Part, decode, encode
from uneven.policy.recorded import Round

CHUNK = 16  # records; so many stay uncompressed of each rank that is lost


class RoundRecords:
    """Life cycle: one per rank and run, with a client of the store that nobody else waits on. Used by one thread."""

    def __init__(self, store: Store, member: str) -> None:
        self._store, self._member = store, member
        self._recent: list[dict[str, Any]] = []  # since the last chunk
        self._chunks = 0

    def write(
        self,
        generation: int,
        number: int,
        parts: Iterable[Part],
        dropped: Iterable[Part],
        about: Round,
        last: Round | None = None,
    ) -> None:
        """Before round `number` of a generation, counted from 1: the parts that this rank adds to its average.

        `about` is the round as this rank knows it so far: its slot, its parts when it entered, those when it merged
        the round before, and the factor on its learning rates since. `last` is the one that it has merged before.
        """
        if len(self._recent) == CHUNK:
            # Bytes are taken as they are; the stub knows only str.
            packed: Any = zlib.compress(json.dumps(self._recent).encode())
            self._store.set(_chunk_key(self._chunks, self._member), packed)
            self._recent, self._chunks = [], self._chunks + 1
        key = _key(len(self._recent), self._member)
        record = {"at": [generation, number], "parts": encode(parts), "dropped": encode(dropped), "round": list(about)}
        record |= {} if last is None else {"last": list(last)}
        self._recent.append(record)
        self._store.set(key, json.dumps(record))
        self._store.check([key])  # a client sends and goes on: the answer says that the store has it

    def read(self, lineage: Sequence[Era], member: str) -> dict[str, Any]:
        """All that a member has handed in: `log`, `dropped` and `rounds` as in its results.

        When it merged its last round is not known, and does not matter: nothing that it trained since counts.
        """
        written = self._written(member)
        found = [
            written[era.generation, number]
            for place, era in enumerate(lineage)
            if member in era.members
            for number in range(0 if place == 0 else 1, era.rounds + 1)
        ]
        return {
            "member": member,
            "log": decode(run for record in found for run in record["parts"]),
            "dropped": decode(run for record in found for run in record["dropped"]),
            "rounds": [*(record.get("last", record["round"]) for record in found[1:]), *_last_round(found)],
        }

    def _written(self, member: str) -> dict[tuple[int, int], dict[str, Any]]:
        """By generation and number. A key that the member has not used again holds what is in the last chunk, too."""
        records: list[dict[str, Any]] = []
        number = 0
        while self._store.check([_chunk_key(number, member)]):
            records += json.loads(zlib.decompress(self._store.get(_chunk_key(number, member))))
            number += 1
        keys = [key for key in (_key(place, member) for place in range(CHUNK)) if self._store.check([key])]
        records += [json.loads(data) for data in self._store.multi_get(keys)] if keys else []
        return {(record["at"][0], record["at"][1]): record for record in records}


def _last_round(found: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Of a member that is gone: as if it had merged it at once."""
    return [[due, entered, entered, scale] for due, entered, _, scale in (record["round"] for record in found[-1:])]


def _key(place: int, member: str) -> str:
    return f"parts/{place}/{member}"


def _chunk_key(number: int, member: str) -> str:
    return f"parts/chunk-{number}/{member}"
