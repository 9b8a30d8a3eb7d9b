"""A run's timeline: for every rank what its device did at every moment, with events and machine samples.

The worker makes one per rank with `Timeline.of`, the launcher merges them, and idle, lanes, charts, trace and export
read the result. Invariant: the spans of a lane are in order and have no gaps. The JSON form is described in export.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from uneven.timeline.device import account_of, seen_by_device
from uneven.timeline.record import STATES, Account, Event, Recorder
from uneven.timeline.sample import Sample

VERSION = 1


@dataclass(frozen=True)
class Lane:
    """One rank's spans: (state, start_ns, end_ns), in order and without gaps."""

    rank: int
    device: str
    spans: list[tuple[str, int, int]]


@dataclass(frozen=True)
class Timeline:
    """Everything recorded about a run; times in ns since the run's start."""

    lanes: list[Lane]
    accounts: list[Account]
    events: list[Event]
    samples: list[Sample]

    @classmethod
    def of(
        cls, recorder: Recorder, device: str, samples: list[Sample], busy: Sequence[tuple[int, int]] = ()
    ) -> "Timeline":
        """One rank's timeline, in the machine's own clock; `merge` makes times count from the run's start.

        `busy` is when a CUDA device computed, where that is known: the lane then shows the device, not the host.
        """
        spans = recorder.spans()
        if not busy:
            return cls([Lane(recorder.rank, device, spans)], [recorder.account()], list(recorder.events), samples)
        spans = seen_by_device(spans, busy)
        account = account_of(recorder.rank, spans)
        return cls([Lane(recorder.rank, device, spans)], [account], list(recorder.events), samples)

    @classmethod
    def merge(cls, parts: Sequence["Timeline"]) -> "Timeline":
        """One timeline of all ranks. Ranks of one machine share its clock, so nothing has to be aligned."""
        start = min(lane.spans[0][1] for part in parts for lane in part.lanes)
        return cls(
            [
                Lane(lane.rank, lane.device, [(state, a - start, b - start) for state, a, b in lane.spans])
                for part in parts
                for lane in part.lanes
            ],
            [account for part in parts for account in part.accounts],
            sorted(
                (replace(event, t_ns=event.t_ns - start) for part in parts for event in part.events),
                key=lambda event: event.t_ns,
            ),
            # Every rank samples the same machine; the first one's samples stand for all.
            [replace(sample, t_ns=sample.t_ns - start) for sample in parts[0].samples],
        )

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Timeline":
        """The inverse of `to_json`."""
        if record.get("version") != VERSION:
            raise ValueError(f"the timeline has version {record.get('version')!r}; this reads version {VERSION}")
        names = record["states"]
        lanes = []
        for rank in record["ranks"]:
            bounds = [*rank["starts"], rank["end"]]
            spans = [(names[code], a, b) for code, (a, b) in zip(rank["states"], pairwise(bounds), strict=True)]
            lanes.append(Lane(rank["rank"], rank["device"], spans))
        events = [
            Event(e["t"], e["rank"], e["kind"], {k: v for k, v in e.items() if k not in ("t", "rank", "kind")})
            for e in record["events"]
        ]
        samples = [
            Sample(
                s["t"],
                s["cpu"],
                s["process_cpu"],
                s["ram_bytes"],
                s["process_bytes"],
                tuple((int(i), float(u), int(m)) for i, u, m in s["gpus"]),
            )
            for s in record["samples"]
        ]
        return cls(lanes, [Account(a["rank"], a["seconds"]) for a in record["accounts"]], events, samples)

    def to_json(self) -> dict[str, Any]:
        codes = {state: code for code, state in enumerate(STATES)}
        return {
            "version": VERSION,
            "unit": "ns since the run's start",
            "states": list(STATES),
            "ranks": [
                {
                    "rank": lane.rank,
                    "device": lane.device,
                    "end": lane.spans[-1][2],
                    "starts": [start for _, start, _ in lane.spans],
                    "states": [codes[state] for state, _, _ in lane.spans],
                }
                for lane in self.lanes
            ],
            "accounts": [
                {
                    "rank": a.rank,
                    "seconds": a.seconds,
                    "shares": a.shares,
                    "training_s": a.training_s,
                    "wall_s": a.wall_s,
                }
                for a in self.accounts
            ],
            "events": [{"t": e.t_ns, "rank": e.rank, "kind": e.kind, **e.fields} for e in self.events],
            "samples": [{"t": s.t_ns, **s.fields()} for s in self.samples],
        }
