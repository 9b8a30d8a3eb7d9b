"""A timeline as files: timeline.json (complete, versioned), timeline.csv (a row per span or event), trace.json.

launch/run.py calls `save_timeline` at the end of a run, and users read the files.

JSON, version 1:
  version, unit ("ns since the run's start"), states,
  machines: [{machine, host, offset_ns, error_ns, drift_ppm, readings: [[at_ns, offset_ns, error_ns]]}],
  run: {resumed_at, samples_before, samples, training_s, samples_per_s, disturbed, interference},
  ranks: [{rank, device, machine, host, end, samples, redone, ended, starts: [...], states: [...codes into `states`]}],
  accounts: [{rank, seconds, shares, training_s, wall_s}],
  events: [{t, rank, kind, ...fields}],
  cold_start: [{rank, device, phases: {name: seconds}, waited_s, waited_for, steps: [[slot, seconds]]}],
  links: [{machine, host, ranks, rounds, round_bytes, round_ms, mb_per_s, steps, step_bytes, step_ms, total_bytes}],
  samples: [{t, machine, cpu, process_cpu, ram_bytes, process_bytes, gpus: [[index, utilisation, memory]]}]
`run` is about this part of the run: `resumed_at` is the step that it went on from (null: it was not resumed),
`samples_before` those of earlier parts, `disturbed` whether other programs took its cores (null: not measured).
`ranks` has everyone who took part, also those that were lost or have left: `ended` is {t, how, why} there, `how` is
"lost" or "left", and they come after the ranks of the end. `samples` are those that the rank trained in this part and
that count, `redone` others, which were trained again.
A number in an event that is not finite (the loss of a diverged run) is null, in all three files: JSON has no such
numbers, and viewers refuse a file that contains them.
All times are on the clock of machine 0. `offset_ns` was added to those of another machine, more or less as it drifted
(`readings`, on its own clock); they may be off by `error_ns`.
CSV columns: t_ms, rank, kind, ms, fields (JSON), machine, host. `kind` is a state, an event's kind, "sample", or
"clock": a row for each of several machines, with its offset_ms, error_ms and drift_ppm in the fields.
trace.json is in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a process
per rank, with a thread for its lane and one for its rounds in the background, and one more process per machine whose
counters are its samples. Its times are in microseconds. `otherData` holds the machines.
"""

import csv
import io
import json
from pathlib import Path
from typing import Any

from uneven.files import finite
from uneven.timeline.clock import Machine
from uneven.timeline.cold_start import cold_starts
from uneven.timeline.links import machine_links
from uneven.timeline.timeline import RankRound, Timeline, rank_rounds

MAX_TRACE_SPANS = 200_000  # of the whole trace

TraceEvent = dict[str, Any]


def save_timeline(timeline: Timeline, folder: Path) -> None:
    """Write the three files into a folder that exists."""
    record = timeline.to_json()
    record |= {
        "events": finite(record["events"]),
        "cold_start": [start.to_json() for start in cold_starts(timeline)],
        "links": [link.to_json() for link in machine_links(timeline)],
    }
    (folder / "timeline.json").write_text(json.dumps(record))
    (folder / "timeline.csv").write_text(to_csv(timeline))
    (folder / "trace.json").write_text(json.dumps(to_trace(timeline), separators=(",", ":")))


def to_csv(timeline: Timeline) -> str:
    """All spans, events and samples, ordered by time."""
    hosts = {machine.number: machine.host for machine in timeline.machines}
    place_of = {lane.rank: lane.machine for lane in timeline.lanes}
    rows: list[tuple[int, int | str, str, int, dict[str, Any], int]] = []
    if not timeline.is_one_machine:
        rows += [(0, "", "clock", 0, _clock_fields(machine), machine.number) for machine in timeline.machines]
    for lane in timeline.lanes:
        rows += [(start, lane.rank, state, stop - start, {}, lane.machine) for state, start, stop in lane.spans]
    rows += [(e.t_ns, e.rank, e.kind, 0, e.fields, place_of[e.rank]) for e in timeline.events]
    rows += [(s.t_ns, "", "sample", 0, s.fields(), s.machine) for s in timeline.samples]
    rows.sort(key=lambda row: row[0])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["t_ms", "rank", "kind", "ms", "fields", "machine", "host"])
    for t_ns, rank, kind, length, fields, machine in rows:
        text = json.dumps(finite(fields)) if fields else ""
        writer.writerow([f"{t_ns / 1e6:.4f}", rank, kind, f"{length / 1e6:.4f}", text, machine, hosts[machine]])
    return out.getvalue()


def _clock_fields(machine: Machine) -> dict[str, Any]:
    error_ms = None if machine.error_ns is None else machine.error_ns / 1e6
    return {"offset_ms": machine.offset_ns / 1e6, "error_ms": error_ms, "drift_ppm": round(machine.drift_ppm, 3)}


def to_trace(timeline: Timeline, max_spans: int = MAX_TRACE_SPANS) -> dict[str, Any]:
    """The whole trace. Only the `max_spans` longest spans are kept; `otherData` records how many were left out."""
    shortest_ns, facts = _min_length(timeline, max_spans)
    facts["machines"] = [
        {"machine": machine.number, "host": machine.host, **_clock_fields(machine)} for machine in timeline.machines
    ]
    order = sorted(timeline.lanes, key=lambda lane: (lane.machine, lane.rank))
    entries: list[TraceEvent] = []
    for lane in timeline.lanes:
        pid, tid = _pid(lane.rank), _tid(lane.rank)
        entries += _process_metadata(pid, f"rank {lane.rank}: {timeline.name(lane)}", order.index(lane))
        entries += _thread_metadata(pid, tid, "lane", 0)
        entries += [
            {"ph": "X", "name": state, "pid": pid, "tid": tid, "ts": first / 1e3, "dur": (last - first) / 1e3}
            for state, first, last in lane.spans
            if last - first >= shortest_ns
        ]
    rounds = rank_rounds(timeline.events)
    for rank in sorted({round_.rank for round_ in rounds}):
        entries += _thread_metadata(_pid(rank), _tid(rank) + 1, "rounds", 1)
    for round_ in rounds:
        entries += _round_entries(round_)
    for event in timeline.events:
        pid, tid = _pid(event.rank), _tid(event.rank)
        entry = {"ph": "i", "s": "t", "name": event.kind, "pid": pid, "tid": tid, "ts": event.t_ns / 1e3}
        entries.append({**entry, "args": finite(event.fields)} if event.fields else entry)
    entries += _counters(timeline)
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": facts}


def _pid(rank: int) -> int:
    return rank + 1  # some viewers reserve pid 0 for the kernel


def _tid(rank: int) -> int:
    return 10 * _pid(rank)  # some viewers identify a thread by its tid alone, so it is unique over all processes


def _min_length(timeline: Timeline, limit: int) -> tuple[int, dict[str, Any]]:
    """The length in ns from which spans are kept so that at most `limit` remain, and the entries of `otherData`."""
    lengths = sorted((last - first for lane in timeline.lanes for _, first, last in lane.spans if first < last))
    shortest_ns = 1
    if len(lengths) > limit:
        # One ns more than the longest span that does not fit: spans of equal length are kept or dropped together.
        shortest_ns = lengths[len(lengths) - limit - 1] + 1
    dropped = [ns for ns in lengths if ns < shortest_ns]
    facts: dict[str, Any] = {"spans": len(lengths), "kept": len(lengths) - len(dropped)}
    if dropped:
        facts["thinned"] = f"spans shorter than {shortest_ns / 1e3:g} us are left out ({sum(dropped) / 1e9:.3f} s)"
    return shortest_ns, facts


def _process_metadata(pid: int, name: str, sort_index: int) -> list[TraceEvent]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": sort_index}},
    ]


def _thread_metadata(pid: int, tid: int, name: str, sort_index: int) -> list[TraceEvent]:
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": sort_index}},
    ]


def _round_entries(round_: RankRound) -> list[TraceEvent]:
    """A round from its snapshot to its merge, with its stages nested in it."""
    whole = {"ph": "X", "pid": _pid(round_.rank), "tid": _tid(round_.rank) + 1}
    args = {"bytes": round_.wire_bytes, "cost_ms": round_.cost_ms, "steps_late": round_.steps_late}
    args |= {} if round_.mb_per_s is None else {"mb_per_s": round_.mb_per_s}
    stages = [
        ("waiting for the others", round_.snapshot_ns, round_.joined_ns),
        ("sum", round_.joined_ns, round_.averaged_ns),
        ("waiting for its merge", round_.averaged_ns, round_.merged_ns),
    ]
    length = (round_.merged_ns - round_.snapshot_ns) / 1e3
    return [
        {**whole, "name": f"round {round_.number}", "ts": round_.snapshot_ns / 1e3, "dur": length}
        | {"args": finite(args)},
        *({**whole, "name": name, "ts": a / 1e3, "dur": (b - a) / 1e3} for name, a, b in stages if a < b),
    ]


def _counters(timeline: Timeline) -> list[TraceEvent]:
    first = max((_pid(lane.rank) for lane in timeline.lanes), default=0) + 1
    entries: list[TraceEvent] = []
    for machine in sorted({sample.machine for sample in timeline.samples}):
        name = "machine" if timeline.is_one_machine else f"machine {timeline.machines[machine].host}"
        entries += _process_metadata(first + machine, name, first + machine)
    for sample in timeline.samples:
        pid = first + sample.machine
        counters: list[tuple[str, dict[str, float]]] = [
            ("cpu %", {"all cores": sample.cpu}),
            ("process %", {"100 per core": sample.process_cpu}),
            ("memory MB", {"process": sample.process_bytes / 1e6}),
        ]
        for index, utilisation, memory in sample.gpus:
            counters += [(f"gpu {index} %", {"gpu": utilisation}), (f"gpu {index} memory MB", {"used": memory / 1e6})]
        entries += [
            {"ph": "C", "name": name, "pid": pid, "ts": sample.t_ns / 1e3, "args": args} for name, args in counters
        ]
    return entries
