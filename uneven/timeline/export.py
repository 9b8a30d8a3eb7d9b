"""A timeline as files: timeline.json (complete, versioned), timeline.csv (a row per span or event), trace.json.

launch/run.py calls `save_timeline` at the end of a run.

JSON, version 1:
  version, unit ("ns since the run's start"), states,
  ranks: [{rank, device, end, starts: [...], states: [...codes into `states`]}],
  accounts: [{rank, seconds, shares, training_s, wall_s}],
  events: [{t, rank, kind, ...fields}],
  samples: [{t, cpu, process_cpu, ram_bytes, process_bytes, gpus: [[index, utilisation, memory]]}]
CSV columns: t_ms, rank, kind, ms, fields (JSON). `kind` is a state, an event's kind or "sample".
trace.json is the Chrome trace of trace.py.
"""

import csv
import io
import json
from pathlib import Path
from typing import Any

from uneven.timeline.timeline import Timeline
from uneven.timeline.trace import to_trace


def save_timeline(timeline: Timeline, folder: Path) -> None:
    """Write the three files into a folder that exists."""
    (folder / "timeline.json").write_text(json.dumps(timeline.to_json()))
    (folder / "timeline.csv").write_text(to_csv(timeline))
    (folder / "trace.json").write_text(json.dumps(to_trace(timeline), separators=(",", ":")))


def to_csv(timeline: Timeline) -> str:
    """All spans, events and samples, ordered by time."""
    rows: list[tuple[int, int | str, str, int, dict[str, Any]]] = []
    for lane in timeline.lanes:
        rows += [(start, lane.rank, state, stop - start, {}) for state, start, stop in lane.spans]
    rows += [(e.t_ns, e.rank, e.kind, 0, e.fields) for e in timeline.events]
    rows += [(s.t_ns, "", "sample", 0, s.fields()) for s in timeline.samples]
    rows.sort(key=lambda row: row[0])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["t_ms", "rank", "kind", "ms", "fields"])
    for t_ns, rank, kind, length, fields in rows:
        writer.writerow([f"{t_ns / 1e6:.4f}", rank, kind, f"{length / 1e6:.4f}", json.dumps(fields) if fields else ""])
    return out.getvalue()
