"""Write finished runs as small files, as those of docs/results, from which `uneven bench report` makes the same tables.

    python tools/publish.py RUNS OUT

OUT/MODEL/MODE/seed-S.json has a run's settings, history, times and versions, and no weights; efficiencies by pairs come
with them, and runs at equal time below OUT/equal-time. OUT/sweep.json has the commands and every file's checksum, so
that `uneven bench check` sees what was changed or taken away. That finds mistakes; it is no signature.
"""

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from uneven.bench.single.folders import (
    EFFICIENCY,
    EQUAL_TIME,
    PACKED_VERSION,
    SWEEP,
    RunRecord,
    nothing_found,
    read_equal_time,
    read_runs,
    write_file,
)
from uneven.errors import InputError
from uneven.files import finite, read_json

LOCAL_SETTINGS = ("out", "progress", "overwrite", "resume", "replay")  # of one machine, and of no figure
DIGITS = 7  # of a number in a published history


def publish(root: Path, out: Path) -> Path:
    """Returns `out`; InputError without a finished run."""
    if out.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{out} lies in {root}, whose report would count every run twice; choose another folder")
    records, _ = read_runs(root)
    if not records:
        raise nothing_found(root)
    files: dict[Path, Any] = {}
    for folder, runs in ((out, records), (out / EQUAL_TIME, read_equal_time(root))):
        for run in runs:
            files[folder / run.model / run.mode / f"seed-{run.summary.seed}.json"] = run.packed or _packed(run)
            if folder == out and isinstance(paired := read_json(run.folder.parent / EFFICIENCY), dict):
                files[out / run.model / run.mode / EFFICIENCY] = paired
    for path, content in files.items():
        write_file(path, json.dumps(content, separators=(",", ":")) + "\n")
    before, sweep = read_json(out / SWEEP), read_json(root / SWEEP)
    known = [record for record in (before, sweep) if isinstance(record, dict)]
    record = {
        "version": 1,
        "commands": list(dict.fromkeys(line for one in known for line in one.get("commands", []))),
        "skipped": {mode: why for one in known for mode, why in one.get("skipped", {}).items()},
        "files": _checksums(out),
    }
    write_file(out / SWEEP, json.dumps(record, indent=1) + "\n")
    return out


def _packed(run: RunRecord) -> dict[str, Any]:
    """Everything of a finished run that a report needs, and its settings; small enough for git."""
    config, times = read_json(run.folder / "config.json"), run.times()
    settings = config if isinstance(config, dict) else {}
    columns = list(dict.fromkeys(key for entry in run.metrics for key in entry))
    rows = [[_short(entry.get(name)) for name in columns] for entry in run.metrics]
    return {
        "version": PACKED_VERSION,
        "summary": finite(run.summary),
        "settings": {name: value for name, value in settings.items() if name not in LOCAL_SETTINGS},
        "metrics": {"columns": columns, "rows": rows},
        "times": None if times is None else asdict(times),
    }


def _short(value: Any) -> Any:
    return finite(float(f"{value:.{DIGITS}g}")) if isinstance(value, float) else value


def _checksums(out: Path) -> dict[str, str]:
    files = [path for path in sorted(out.rglob("*.json")) if path != out / SWEEP]
    return {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    print(f"wrote {publish(Path(sys.argv[1]), Path(sys.argv[2]))}")
