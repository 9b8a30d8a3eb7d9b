"""A run's timeline, and its two plain forms: JSON (complete, versioned) and CSV (one row per thing).

JSON, version 1:
  version, unit ("ns since the run's start"), states,
  ranks: [{rank, device, end, starts: [...], states: [...codes into `states`]}],
  accounts: [{rank, seconds, shares, training_s, wall_s}],
  events: [{t, rank, kind, ...fields}],
  samples: [{t, cpu, process_cpu, ram_bytes, process_bytes, gpus: [[index, utilisation, memory]]}]
CSV columns: t_ms, rank, kind, ms, fields (JSON). `kind` is a state, an event's kind or "sample".
"""

import csv
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    def of(cls, recorder: Recorder, device: str, samples: list[Sample]) -> "Timeline":
        start = recorder.starts_ns[0]
        spans = [(state, begin - start, end - start) for state, begin, end in recorder.spans()]
        events = [Event(e.t_ns - start, e.rank, e.kind, e.fields) for e in recorder.events]
        shifted = [replace(s, t_ns=s.t_ns - start) for s in samples]
        return cls([Lane(recorder.rank, device, spans)], [recorder.account()], events, shifted)

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
