"""A timeline in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank with a thread for its lane and one for its rounds in the background; what was sampled of the
machine are counters of a process of its own. Times are in microseconds.
"""

import math
from typing import Any

from uneven.timeline.timeline import Timeline
from uneven.timeline.trips import Trip, trips_of

MOST_SPANS = 200_000

Entry = dict[str, Any]


def to_trace(timeline: Timeline, most_spans: int = MOST_SPANS) -> dict[str, Any]:
    """The whole trace. Of more spans than `most_spans` the longest are kept, and `otherData` says what is missing."""
    shortest_ns, facts = _thinned(timeline, most_spans)
    entries: list[Entry] = []
    for lane in timeline.lanes:
        pid, tid = _pid(lane.rank), _tid(lane.rank)
        entries += _named(pid, f"rank {lane.rank}: {lane.device}", lane.rank)
        entries += _named_thread(pid, tid, "lane", 0)
        entries += [
            {"ph": "X", "name": state, "pid": pid, "tid": tid, "ts": first / 1e3, "dur": (last - first) / 1e3}
            for state, first, last in lane.spans
            if last - first >= shortest_ns
        ]
    trips = [trip for trip in trips_of(timeline.events) if trip.left_ns is not None]
    for rank in sorted({trip.rank for trip in trips}):
        entries += _named_thread(_pid(rank), _tid(rank) + 1, "rounds", 1)
    for trip in trips:
        entries += _trip_entries(trip)
    for event in timeline.events:
        pid, tid = _pid(event.rank), _tid(event.rank)
        entry = {"ph": "i", "s": "t", "name": event.kind, "pid": pid, "tid": tid, "ts": event.t_ns / 1e3}
        entries.append({**entry, "args": _finite(event.fields)} if event.fields else entry)
    entries += _counters(timeline)
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": facts}


def _pid(rank: int) -> int:
    return rank + 1  # 0 is the kernel's for some viewers


def _tid(rank: int) -> int:
    return 10 * _pid(rank)  # viewers take a number for one thread, whatever its process


def _thinned(timeline: Timeline, most: int) -> tuple[int, dict[str, Any]]:
    """The length from which on spans are kept, and what that leaves out."""
    lengths = sorted((last - first for lane in timeline.lanes for _, first, last in lane.spans if first < last))
    shortest_ns = 1
    if len(lengths) > most:
        # One ns more than the longest that does not fit: equal ones go together.
        shortest_ns = lengths[len(lengths) - most - 1] + 1
    dropped = [ns for ns in lengths if ns < shortest_ns]
    facts: dict[str, Any] = {"spans": len(lengths), "kept": len(lengths) - len(dropped)}
    if dropped:
        facts["thinned"] = f"spans shorter than {shortest_ns / 1e3:g} us are left out ({sum(dropped) / 1e9:.3f} s)"
    return shortest_ns, facts


def _finite(value: Any) -> Any:
    """With numbers that JSON does not have (the loss of a run that diverged) as words: viewers refuse the file else."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(element) for element in value]
    return value


def _named(pid: int, name: str, place: int) -> list[Entry]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": place}},
    ]


def _named_thread(pid: int, tid: int, name: str, place: int) -> list[Entry]:
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": place}},
    ]


def _trip_entries(trip: Trip) -> list[Entry]:
    """A round from its snapshot to its merge, and inside it what it was doing."""
    assert trip.left_ns is not None, "only rounds whose way is known"
    whole = {"ph": "X", "pid": _pid(trip.rank), "tid": _tid(trip.rank) + 1}
    args = {"bytes": trip.wire_bytes, "cost_ms": trip.cost_ms, "steps_late": trip.steps_late}
    stages = [
        ("waiting for the others", trip.left_ns, trip.met_ns),
        ("sum", trip.met_ns, trip.back_ns),
        ("waiting for its merge", trip.back_ns, trip.merged_ns),
    ]
    length = (trip.merged_ns - trip.left_ns) / 1e3
    return [
        {**whole, "name": f"round {trip.number}", "ts": trip.left_ns / 1e3, "dur": length, "args": _finite(args)},
        *({**whole, "name": name, "ts": a / 1e3, "dur": (b - a) / 1e3} for name, a, b in stages if a < b),
    ]


def _counters(timeline: Timeline) -> list[Entry]:
    if not timeline.samples:
        return []
    pid = max((_pid(lane.rank) for lane in timeline.lanes), default=0) + 1
    entries = _named(pid, "machine", pid)
    for sample in timeline.samples:
        counted: list[tuple[str, dict[str, float]]] = [
            ("cpu %", {"all cores": sample.cpu}),
            ("process %", {"100 per core": sample.process_cpu}),
            ("memory MB", {"process": sample.process_bytes / 1e6}),
        ]
        for index, utilisation, memory in sample.gpus:
            counted += [(f"gpu {index} %", {"gpu": utilisation}), (f"gpu {index} memory MB", {"used": memory / 1e6})]
        entries += [
            {"ph": "C", "name": name, "pid": pid, "ts": sample.t_ns / 1e3, "args": args} for name, args in counted
        ]
    return entries
