"""What each rank's device did so far, in the launcher's store: there it outlives the rank, and so does its lane.

The timeline of a run is made at its end, of what the ranks have recorded. A rank that was lost or has left is not there
any more, and a page without it denied the device that its run had had. So each rank that others may lose writes down
its spans and events between steps, and whoever is rank 0 at the end adds the lanes of those who are gone.

A part is written every second, and every thousandth of the run once that is longer: a week is some 7,000 parts. The
first MOST_SPANS spans are written one by one, then the sums of every second by state.
"""

import json
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from uneven.comm.store import Store
from uneven.timeline.record import STATES, Span, account_of, device_spans
from uneven.timeline.timeline import LEFT, LOST, Ended, Lane, Timeline
from uneven.train.engine import Engine

COLLECT_NS = 1_000_000_000
WRITE_EVERY = 1_000  # parts of the run so far
MOST_SPANS = 10_000
MOST_EVENTS = 5_000


class LaneRecords:
    """Life cycle: made with the settler, `tell` between steps, `leave` where this rank goes; `read` at the run's end.

    Used by the thread that trains alone.
    """

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine
        self._member = engine.rank_info.member
        # With a local policy the log of a rank that is gone has what it had trained before the run was resumed, too.
        self._restored = sum(samples for _, _, samples in engine.state.log) if engine.config.is_local else 0
        self._states = self._events = self._spans = self._parts = 0  # that are written, or wait for it
        self._waiting: list[Span] = []
        self._unsure: list[Span] = []  # of a CUDA device: it is not known yet whether it was busy
        self._began_ns = engine.recorder.clock()
        self._collect_ns = self._write_ns = self._began_ns

    def tell(self) -> None:
        """Write what is new, where it is time; called between steps."""
        now_ns = self._engine.recorder.clock()
        if now_ns >= self._collect_ns:
            self._collect_ns = now_ns + COLLECT_NS
            self._collect()
            if now_ns >= self._write_ns:
                self._write_ns = now_ns + max(COLLECT_NS, (now_ns - self._began_ns) // WRITE_EVERY)
                self._write(has_left=False)

    def leave(self) -> None:
        """All that this rank has trained is with the others, and it is about to go."""
        self._collect(is_last=True)
        self._write(has_left=True)

    def read(self, members: Sequence[str]) -> list[dict[str, Any]]:
        """What these members, who are gone, have written; without those who had not begun. As JSON."""
        return [found for member in members if (found := self._read(member)) is not None]

    def _collect(self, *, is_last: bool = False) -> None:
        spans, self._states = self._engine.recorder.closed_spans(self._states)
        if self._engine.device.type == "cuda":
            spans = self._as_of_device([*self._unsure, *spans], is_last=is_last)
        self._spans += len(spans)
        self._waiting += spans if self._spans <= MOST_SPANS else _sums(spans)

    def _as_of_device(self, spans: list[Span], *, is_last: bool) -> list[Span]:
        """Up to the end of the last step that the device is known to have finished."""
        busy = self._engine.run_ahead.busy
        known_ns = busy[-1][1] if busy else spans[-1][2] if spans else 0
        sure = [span for span in spans if is_last or span[2] <= known_ns]
        self._unsure = spans[len(sure) :]
        first = max(0, bisect_left(busy, (sure[0][1], 0)) - 1) if sure else 0
        return device_spans(sure, busy[first:])

    def _write(self, *, has_left: bool) -> None:
        engine = self._engine
        info = self._engine.rank_info
        spans = self._waiting
        events = engine.recorder.events_since(self._events)[: MOST_EVENTS - self._events]
        self._waiting, self._events = [], self._events + len(events)
        lane = Lane(info.rank, str(info.device), spans, info.machine.number)
        part = {
            "timeline": Timeline([lane], [], events, [], (info.machine,)).to_json() if spans else None,
            "trained": engine.state.samples,
            "restored": self._restored,
            "has_left": has_left,
        }
        packed: Any = zlib.compress(json.dumps(part).encode())  # bytes are taken as they are; the stub knows only str
        self._store.set(_key(self._parts, self._member), packed)
        self._parts += 1

    def _read(self, member: str) -> dict[str, Any] | None:
        parts: list[dict[str, Any]] = []
        while self._store.check([_key(len(parts), member)]):
            parts.append(json.loads(zlib.decompress(self._store.get(_key(len(parts), member)))))
        timelines = [Timeline.from_json(part["timeline"]) for part in parts if part["timeline"] is not None]
        if not timelines:
            return None
        (lane,) = timelines[-1].lanes
        lane = replace(lane, spans=[span for timeline in timelines for span in timeline.lanes[0].spans])
        events = [event for timeline in timelines for event in timeline.events]
        whole = Timeline([lane], [account_of(lane.rank, lane.spans)], events, [], timelines[-1].machines)
        return {**parts[-1], "member": member, "timeline": whole.to_json()}


def gone_lane(
    found: Mapping[str, Any], rank: int, counted: int | None, why: str, present: Sequence[Timeline]
) -> Timeline:
    """The timeline of a member that is gone, from what `read` found; `present` are those of the ranks at the end.

    `rank` is the place of its log among all logs, after those of the ranks at the end; `counted` the samples in it.
    """
    timeline = Timeline.from_json(found["timeline"])
    samples = max(0, (counted or 0) - int(found["restored"]))
    ended = Ended(LEFT if found["has_left"] else LOST, why)
    number, machines = _place(timeline, present)
    lanes = [
        replace(
            lane,
            rank=rank,
            machine=number,
            samples=samples,
            redone=max(0, int(found["trained"]) - samples),
            ended=ended,
        )
        for lane in timeline.lanes
    ]
    accounts = [replace(account, rank=rank) for account in timeline.accounts]
    events = [replace(event, rank=rank) for event in timeline.events]
    return replace(timeline, lanes=lanes, accounts=accounts, events=events, machines=machines)


def _place(timeline: Timeline, present: Sequence[Timeline]) -> tuple[int, tuple[Any, ...]]:
    """The number of its machine among those of the run's end: machines are numbered anew when one is gone."""
    (machine,), known = timeline.machines, {one.number: one.host for other in present for one in other.machines}
    others = (number for number, host in known.items() if number > 0 and host == machine.host)
    number = 0 if machine.number == 0 else next(others, max(known, default=0) + 1)
    return number, (replace(machine, number=number),)


def why_gone(segments: Sequence[Mapping[str, Any]], member: str) -> str:
    """What the run said when this member was not among its ranks any more."""
    was_there = False
    for segment in segments:
        is_there = member in segment.get("members", ())
        if was_there and not is_there:
            return str(segment.get("why", ""))
        was_there |= is_there
    return ""


def _sums(spans: Sequence[Span]) -> list[Span]:
    """The same time, state by state."""
    if not spans:
        return []
    at, found = spans[0][1], []
    totals: dict[str, int] = dict.fromkeys(STATES, 0)
    for state, first, last in spans:
        totals[state] += last - first
    for state, ns in totals.items():
        if ns:
            found.append((state, at, at + ns))
            at += ns
    return found


def _key(number: int, member: str) -> str:
    return f"lanes/{number}/{member}"
