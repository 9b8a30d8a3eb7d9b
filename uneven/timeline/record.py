"""The recorder: what one rank's main thread was doing at every moment, and what happened when.

The rank is always in exactly one state, so the states partition its wall time by construction: nothing is
counted twice and nothing is missing. Entering a state costs one clock read and one append, 1.1 us between the steps of
a training; written down into arrays at once it was 2.6 us, for nothing of it is in the caches then. So changes are kept
as they come and packed many at a time.
States of TRAINING are the training clock; those of APART (setup, compile, evaluation, checkpoint) stop it.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

TRAINING = ("compute", "communication", "wait", "data", "other")
APART = ("setup", "compile", "evaluation", "checkpoint")
STATES = TRAINING + APART
MOST_FRESH = 1024  # states that wait to be packed


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment: an epoch's end, a share that moved, a stop request."""

    t_ns: int
    rank: int
    kind: str
    fields: dict[str, Any]


@dataclass
class Recorder:
    """One rank's recording. The first state is `setup`; `close()` ends the last one."""

    rank: int = 0
    clock: Callable[[], int] = time.perf_counter_ns
    events: list[Event] = field(default_factory=list)
    end_ns: int | None = None
    _fresh: list[tuple[int, str]] = field(default_factory=list)  # (since when, state), the present one last
    _starts_ns: "array[int]" = field(default_factory=lambda: array("q"))  # of the states that are packed
    _codes: bytearray = field(default_factory=bytearray)
    _totals_ns: list[int] = field(default_factory=lambda: [0] * len(STATES))

    def __post_init__(self) -> None:
        self._fresh.append((self.clock(), "setup"))

    def enter(self, state: str, at_ns: int | None = None) -> int:
        """From now on, or from a moment since the last change, the rank is in this state; returns the moment.

        A moment that was estimated may lie outside of what has been; it is then the nearest one inside.
        """
        now = self.clock()
        if at_ns is not None:
            now = min(max(at_ns, self._fresh[-1][0]), now)
        self._fresh.append((now, state))
        if len(self._fresh) > MOST_FRESH:
            self._pack()
        return now

    def _pack(self) -> None:
        """Put all states but the present one into the arrays: 9 bytes each, and nothing for the garbage collector."""
        fresh = self._fresh
        for (start, state), (stop, _) in pairwise(fresh):
            code = _CODES[state]
            self._totals_ns[code] += stop - start
            self._starts_ns.append(start)
            self._codes.append(code)
        self._fresh = fresh[-1:]  # in one piece: another thread may be asking for the state

    @property
    def state(self) -> str:
        """The state the rank is in now; may be asked from another thread."""
        return self._fresh[-1][1]

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append(Event(self.clock(), self.rank, kind, fields))

    def close(self) -> None:
        if self.end_ns is None:
            self.end_ns = self.enter("setup")

    def spans(self) -> list[tuple[str, int, int]]:
        """(state, start_ns, end_ns) in order, neighbours of one state joined."""
        self._pack()
        start, state = self._fresh[-1]
        starts = [*self._starts_ns, start, self.end_ns if self.end_ns is not None else self.clock()]
        names = [*(STATES[code] for code in self._codes), state]
        joined: list[tuple[str, int, int]] = []
        for name, (begins, ends) in zip(names, pairwise(starts), strict=True):
            if joined and joined[-1][0] == name:
                joined[-1] = (name, joined[-1][1], ends)
            else:
                joined.append((name, begins, ends))
        return joined

    def account(self) -> "Account":
        """Where the time went up to now (up to the end, once closed)."""
        self._pack()
        totals = list(self._totals_ns)
        if self.end_ns is None:
            start, state = self._fresh[-1]
            totals[_CODES[state]] += self.clock() - start
        return Account(self.rank, {state: ns / 1e9 for state, ns in zip(STATES, totals, strict=True)})


@dataclass(frozen=True)
class Account:
    """Where one rank's wall time went, in seconds; the shares of TRAINING sum to 1."""

    rank: int
    seconds: dict[str, float]

    @property
    def training_s(self) -> float:
        return sum(self.seconds[state] for state in TRAINING)

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        total = self.training_s
        return {state: self.seconds[state] / total if total else 0.0 for state in TRAINING}


_CODES = {state: code for code, state in enumerate(STATES)}
