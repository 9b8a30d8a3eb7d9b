"""The trace against the rules of its format, checked event by event.

The rules are those of the Trace Event Format document: which keys each phase must have, and of what type.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.timeline.synthetic import lanes_of, make_machines, make_run
from uneven.timeline.export import save_timeline, to_trace
from uneven.timeline.record import Event
from uneven.timeline.timeline import Timeline

NUMBER = (int, float)
METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def check_entry(entry: dict[str, Any]) -> None:
    phase = entry["ph"]
    allowed = {"X": {"dur", "args", "tid"}, "i": {"s", "args", "tid"}, "C": {"args"}, "M": {"args", "tid"}}
    assert set(entry) <= {"ph", "name", "pid", "ts"} | allowed[phase], entry
    assert isinstance(entry["name"], str)
    assert entry["name"]
    assert type(entry["pid"]) is int
    assert entry["pid"] > 0
    if phase == "M":
        key, kind = METADATA[entry["name"]]
        assert isinstance(entry["args"][key], kind)
        assert ("tid" in entry) == entry["name"].startswith("thread")
        return
    assert isinstance(entry["ts"], NUMBER)
    assert entry["ts"] >= 0
    if phase in "Xi":
        assert type(entry["tid"]) is int
        assert isinstance(entry.get("args", {}), dict)
    if phase == "X":
        assert isinstance(entry["dur"], NUMBER)
        assert entry["dur"] >= 0
    elif phase == "i":
        assert entry["s"] in ("t", "p", "g")
    elif phase == "C":
        assert entry["args"]
        assert all(isinstance(value, NUMBER) for value in entry["args"].values())


def check_nesting(entries: list[dict[str, Any]]) -> None:
    """Complete events of one thread lie beside or inside each other: they never cut each other."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in entries:
        if entry["ph"] == "X":
            span = (round(1e3 * entry["ts"]), round(1e3 * (entry["ts"] + entry["dur"])))
            threads.setdefault((entry["pid"], entry["tid"]), []).append(span)
    assert threads
    for spans in threads.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def no_constant(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


@pytest.mark.parametrize(
    "timeline", [make_run(), make_run(ranks=1, epochs=1), make_machines(9), lanes_of([("compute", 5)])]
)
def test_every_event_follows_the_rules_of_the_format(timeline: Timeline, tmp_path: Path) -> None:
    save_timeline(timeline, tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=no_constant)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for entry in trace["traceEvents"]:
        check_entry(entry)
    check_nesting(trace["traceEvents"])
    threads = {(entry["tid"], entry["pid"]) for entry in trace["traceEvents"] if "tid" in entry}
    assert len({tid for tid, _ in threads}) == len(threads)
    named = {entry["pid"] for entry in trace["traceEvents"] if entry["name"] == "process_name"}
    assert {entry["pid"] for entry in trace["traceEvents"]} == named


def test_the_trace_equals_the_timeline() -> None:
    timeline = make_run()
    entries = to_trace(timeline)["traceEvents"]
    names = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert names == ["rank 0: cpu@0", "rank 1: cpu@1", "machine"]
    for lane in timeline.lanes:
        own = [entry for entry in entries if entry["ph"] == "X" and entry["tid"] == 10 * (lane.rank + 1)]
        drawn = [(entry["name"], round(1e3 * entry["ts"]), round(1e3 * entry["dur"])) for entry in own]
        assert drawn == [(state, first, last - first) for state, first, last in lane.spans]
    instants = [(entry["name"], round(1e3 * entry["ts"])) for entry in entries if entry["ph"] == "i"]
    assert instants == [(event.kind, event.t_ns) for event in timeline.events]
    cpu = [entry["args"]["all cores"] for entry in entries if entry["name"] == "cpu %"]
    assert cpu == [sample.cpu for sample in timeline.samples]


def test_a_round_in_the_background_has_a_lane_of_its_own() -> None:
    fields = {"round": 7, "bytes": 1000, "left_ms_ago": 9.0, "met_ms_ago": 5.0, "back_ms_ago": 2.0, "transfer_ms": 0.5}
    events = [Event(20_000_000, 1, "round", fields)]
    timeline = lanes_of([("compute", 30_000_000)], [("compute", 30_000_000)])
    entries = to_trace(Timeline(timeline.lanes, [], events, []))["traceEvents"]
    rounds = [entry for entry in entries if entry["ph"] == "X" and entry["tid"] == 21]
    assert [(entry["name"], entry["ts"], entry["dur"]) for entry in rounds] == [
        ("round 7", 11_000, 9_000),
        ("waiting for the others", 11_000, 4_000),
        ("sum", 15_000, 3_000),
        ("waiting for its merge", 18_000, 2_000),
    ]
    assert rounds[0]["args"] == {"bytes": 1000, "cost_ms": 0.5, "steps_late": 0, "mb_per_s": pytest.approx(1 / 3)}
    assert {entry["tid"] for entry in entries if entry["ph"] == "X"} == {10, 20, 21}


def test_the_shortest_of_too_many_spans_are_left_out_and_counted() -> None:
    timeline = lanes_of([("compute", 1000 + place) if place % 2 else ("data", 10 + place) for place in range(100)])
    trace = to_trace(timeline, max_spans=50)
    assert [entry["name"] for entry in trace["traceEvents"] if entry["ph"] == "X"] == ["compute"] * 50
    assert trace["otherData"]["spans"] == 100
    assert trace["otherData"]["kept"] == 50
    assert "shorter than" in trace["otherData"]["thinned"]
    assert "thinned" not in to_trace(timeline, max_spans=100)["otherData"]
    equal = lanes_of([("compute", 10), ("data", 10), ("compute", 30)])
    assert to_trace(equal, max_spans=2)["otherData"]["kept"] == 1


def test_nan_and_infinity_become_null_in_every_file(tmp_path: Path) -> None:
    events = [Event(1, 0, "epoch", {"train_loss": float("nan"), "all": [float("inf"), 1.0]})]
    save_timeline(Timeline(lanes_of([("compute", 5)]).lanes, [], events, []), tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=no_constant)
    assert trace["traceEvents"][-1]["args"] == {"train_loss": None, "all": [None, 1.0]}
    record = json.loads((tmp_path / "timeline.json").read_text(), parse_constant=no_constant)
    assert record["events"] == [{"t": 1, "rank": 0, "kind": "epoch", "train_loss": None, "all": [None, 1.0]}]
    with (tmp_path / "timeline.csv").open() as file:
        (fields,) = [row["fields"] for row in csv.DictReader(file) if row["kind"] == "epoch"]
    assert json.loads(fields, parse_constant=no_constant) == {"train_loss": None, "all": [None, 1.0]}
