"""The recorder: which state one rank was in at every moment, and the events of its run.

The worker enters states on the rank's main thread. Invariant: the rank is always in exactly one state, so the states
partition its wall time: no time is counted twice and none is missing.
States of TRAINING count as training time; those of NOT_TRAINING (setup, compile, evaluation, checkpoint, user) do not.
`user` is code of the user's own between epochs or in `ddp.pause()`, and the time that another rank waits for it.

The recorder sees the host. For a CUDA rank `device_spans` replaces the host's view by the device's: while the host
loads data or copies a snapshot the device may compute, and a host that enqueues kernels is not a device that computes.
"""

import pickle
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

State = Literal[
    "compute", "communication", "wait", "data", "other", "setup", "compile", "evaluation", "checkpoint", "user"
]
Span = tuple[str, int, int]  # (state, start_ns, end_ns)

TRAINING: tuple[State, ...] = ("compute", "communication", "wait", "data", "other")
NOT_TRAINING: tuple[State, ...] = ("setup", "compile", "evaluation", "checkpoint", "user")
STATES: tuple[State, ...] = TRAINING + NOT_TRAINING

# Entering a state costs one clock read and one list append: 1.1 us between training steps. Writing it to the arrays at
# once took 2.6 us, because the arrays have left the CPU caches by then. So states are packed in batches of this size.
PACK_AFTER = 1024
# An event is 650 bytes of objects, packed 29; a run of a week has a million rounds.
PACK_EVENTS = 512

_CODES: dict[str, int] = {state: code for code, state in enumerate(STATES)}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment: the end of an epoch, a change of shares, a stop request."""

    t_ns: int
    rank: int
    kind: str
    fields: dict[str, Any]


@dataclass
class Recorder:
    """One rank's recording. The first state is `setup`; `close()` ends the last one."""

    rank: int = 0
    clock: Callable[[], int] = time.perf_counter_ns
    end_ns: int | None = None
    _unpacked: list[tuple[int, State]] = field(default_factory=list)  # (start_ns, state); the last is the current one
    _starts_ns: "array[int]" = field(default_factory=lambda: array("q"))  # of the packed states
    _codes: bytearray = field(default_factory=bytearray)
    _totals_ns: list[int] = field(default_factory=lambda: [0] * len(STATES))
    _events: list[Event] = field(default_factory=list)  # those that are not packed
    _packed_events: list[bytes] = field(default_factory=list)  # in batches of PACK_EVENTS

    def __post_init__(self) -> None:
        self._unpacked.append((self.clock(), "setup"))

    def enter(self, state: State, at_ns: int | None = None) -> int:
        """Start a state now, or at `at_ns`, and return its start time.

        `at_ns` may be an estimate; it is clamped to the time between the last change of state and now.
        """
        now = self.clock()
        if at_ns is not None:
            now = min(max(at_ns, self._unpacked[-1][0]), now)
        self._unpacked.append((now, state))
        if len(self._unpacked) > PACK_AFTER:
            self._pack()
        return now

    def _pack(self) -> None:
        """Move all states but the current one into the arrays: 9 bytes each, and no objects to garbage-collect."""
        unpacked = self._unpacked
        for (start, state), (stop, _) in pairwise(unpacked):
            code = _CODES[state]
            self._totals_ns[code] += stop - start
            self._starts_ns.append(start)
            self._codes.append(code)
        self._unpacked = unpacked[-1:]  # one assignment, never an empty list: another thread may read `state`

    @property
    def state(self) -> State:
        """The current state; safe to read from another thread."""
        return self._unpacked[-1][1]

    def go_on_as(self, rank: int) -> None:
        """This rank has another number from now on."""
        self.rank = rank

    def event(self, kind: str, **fields: Any) -> None:
        self._events.append(Event(self.clock(), self.rank, kind, fields))
        if len(self._events) >= PACK_EVENTS:
            batch = [(event.t_ns, event.rank, event.kind, event.fields) for event in self._events[:PACK_EVENTS]]
            self._packed_events.append(zlib.compress(pickle.dumps(batch), 1))
            del self._events[:PACK_EVENTS]

    @property
    def events(self) -> list[Event]:
        """All of them, in order; a new list."""
        batches = (pickle.loads(zlib.decompress(data)) for data in self._packed_events)
        packed = (Event(t_ns, rank, kind, fields) for batch in batches for t_ns, rank, kind, fields in batch)
        return [*packed, *self._events]

    def events_since(self, count: int) -> list[Event]:
        """Without the first `count`."""
        packed = PACK_EVENTS * len(self._packed_events)
        return self._events[count - packed :] if count >= packed else self.events[count:]

    @property
    def event_count(self) -> int:
        return PACK_EVENTS * len(self._packed_events) + len(self._events)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a rank's preparation, as an event with its length: timeline/cold_start.py reads it."""
        began = self.clock()
        yield
        self.event("prepared", phase=name, ms=(self.clock() - began) / 1e6)

    def close(self) -> None:
        if self.end_ns is None:
            self.end_ns = self.enter("setup")

    def spans(self) -> list[Span]:
        """All spans in order, with neighbours of the same state joined."""
        spans, _ = self.closed_spans()
        start, state = self._unpacked[-1]
        end = self.end_ns if self.end_ns is not None else self.clock()
        if spans and spans[-1][0] == state:
            return [*spans[:-1], (state, spans[-1][1], end)]
        return [*spans, (state, start, end)]

    def closed_spans(self, known: int = 0) -> tuple[list[Span], int]:
        """Without the first `known` states, those that are over, joined likewise; and how many are over."""
        self._pack()
        starts = [*self._starts_ns[known:], self._unpacked[-1][0]]
        spans: list[Span] = []
        for code, (start, end) in zip(self._codes[known:], pairwise(starts), strict=True):
            if spans and spans[-1][0] == STATES[code]:
                spans[-1] = (STATES[code], spans[-1][1], end)
            else:
                spans.append((STATES[code], start, end))
        return spans, len(self._codes)

    def account(self) -> "Account":
        """Seconds per state up to now, or up to the end if the recorder is closed."""
        self._pack()
        totals = list(self._totals_ns)
        if self.end_ns is None:
            start, state = self._unpacked[-1]
            totals[_CODES[state]] += self.clock() - start
        return Account(self.rank, {state: ns / 1e9 for state, ns in zip(STATES, totals, strict=True)})


@dataclass(frozen=True)
class Account:
    """One rank's wall time by state, in seconds; the shares of the TRAINING states sum to 1."""

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


def account_of(rank: int, spans: Sequence[Span]) -> Account:
    totals: dict[str, int] = dict.fromkeys(STATES, 0)
    for state, start, end in spans:
        totals[state] += end - start
    return Account(rank, {state: ns / 1e9 for state, ns in totals.items()})


def device_spans(host_spans: Sequence[Span], busy: Sequence[tuple[int, int]]) -> list[Span]:
    """The spans of a CUDA device: the host's spans overlaid with the intervals in which the device was busy.

    Both arguments are ordered by time; the result covers the same time as `host_spans`. In training states a busy
    device is `compute`, whatever the host does. An idle device has the host's state, which explains why it is idle;
    only `compute` (the host enqueues kernels) becomes `other`. In all other states the host's state is kept.
    """
    spans: list[Span] = []
    busy_intervals = iter(busy)
    busy_start, busy_end = next(busy_intervals, (0, 0))
    for state, start, end in host_spans:
        if state not in TRAINING:
            _append_span(spans, state, start, end)
            continue
        idle_state = "other" if state == "compute" else state
        now = start
        while now < end:
            while busy_end <= now and busy_end:
                busy_start, busy_end = next(busy_intervals, (0, 0))
            if not busy_end or busy_start >= end:
                _append_span(spans, idle_state, now, end)
                break
            _append_span(spans, idle_state, now, max(now, busy_start))
            _append_span(spans, "compute", max(now, busy_start), min(end, busy_end))
            now = min(end, busy_end)
    return spans


def _append_span(spans: list[Span], state: str, start: int, end: int) -> None:
    """Append a span, or extend the last one if it has the same state; empty spans are dropped."""
    if start >= end:
        return
    if spans and spans[-1][0] == state:
        spans[-1] = (state, spans[-1][1], end)
    else:
        spans.append((state, start, end))
