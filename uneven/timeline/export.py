"""A run's timeline, and its plain forms: JSON (complete, versioned) and CSV (one row per thing).

JSON, version 1:
  version, unit ("ns since the run's start"), states,
  ranks: [{rank, device, end, starts: [...], states: [...codes into `states`]}],
  accounts: [{rank, seconds, shares, training_s, wall_s}],
  events: [{t, rank, kind, ...fields}],
  samples: [{t, cpu, process_cpu, ram_bytes, process_bytes, gpus: [[index, utilisation, memory]]}]
CSV columns: t_ms, rank, kind, ms, fields (JSON). `kind` is a state, an event's kind or "sample".
Beside them lies trace.json (see trace.py), to be looked at.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
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
        """One rank's timeline, in the machine's own clock; `together` makes times count from the start.

        `busy` is when a CUDA device was at work, where that is known: the lane is then the device's.
        """
        spans = recorder.spans()
        if not busy:
            return cls([Lane(recorder.rank, device, spans)], [recorder.account()], list(recorder.events), samples)
        spans = seen_by_device(spans, busy)
        account = account_of(recorder.rank, spans)
        return cls([Lane(recorder.rank, device, spans)], [account], list(recorder.events), samples)

    @classmethod
    def together(cls, parts: Sequence["Timeline"]) -> "Timeline":
        """The ranks' timelines as one. Ranks of one machine share its clock, so nothing has to be aligned."""
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
            raise ValueError(f"a timeline of version {record.get('version')!r}; this is version {VERSION}")
        names = record["states"]
        lanes = []
        for one in record["ranks"]:
            bounds = [*one["starts"], one["end"]]
            spans = [(names[code], a, b) for code, (a, b) in zip(one["states"], pairwise(bounds), strict=True)]
            lanes.append(Lane(one["rank"], one["device"], spans))
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

    def to_csv(self) -> str:
        rows: list[tuple[int, int | str, str, int, dict[str, Any]]] = []
        for lane in self.lanes:
            rows += [(start, lane.rank, state, stop - start, {}) for state, start, stop in lane.spans]
        rows += [(e.t_ns, e.rank, e.kind, 0, e.fields) for e in self.events]
        rows += [(s.t_ns, "", "sample", 0, s.fields()) for s in self.samples]
        rows.sort(key=lambda row: row[0])
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["t_ms", "rank", "kind", "ms", "fields"])
        for t_ns, rank, kind, length, fields in rows:
            writer.writerow(
                [f"{t_ns / 1e6:.4f}", rank, kind, f"{length / 1e6:.4f}", json.dumps(fields) if fields else ""]
            )
        return out.getvalue()

    def save(self, folder: Path) -> None:
        (folder / "timeline.json").write_text(json.dumps(self.to_json()))
        (folder / "timeline.csv").write_text(self.to_csv())
        from uneven.timeline.trace import to_trace  # it reads timelines, so it cannot be imported by their module

        (folder / "trace.json").write_text(json.dumps(to_trace(self), separators=(",", ":")))
