"""`uneven bench pack RUNS --out FOLDER`: finished runs as small files, to be published beside the tables made of them.

Called by cli/sweep.py. FOLDER/MODEL/MODE/seed-S.json has a run's settings, history, times and versions, and no
weights; efficiencies by pairs and the record of the sweep come with them, runs at equal time below
FOLDER/equal-time. `uneven bench report FOLDER` makes the same tables of it as of the runs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uneven.bench.single.folders import (
    EQUAL_TIME,
    SWEEP,
    RunRecord,
    digest,
    pack_failure,
    pack_run,
    read_equal_time,
    read_runs,
)
from uneven.errors import InputError
from uneven.files import folder_error, read_json, write_atomically

EFFICIENCY = "efficiency.json"


def pack(root: Path, out: Path) -> list[Path]:
    """Returns the files that were written; InputError without a finished run."""
    if out.resolve().is_relative_to(root.resolve()):
        raise InputError(f"--out {out} lies in {root}, whose report would count every run twice; choose another folder")
    records, broken = read_runs(root)
    if not records:
        raise InputError(f"no finished run in {root}: make some by 'uneven bench sweep --out {root}'")
    files = {}
    for folder, some in ((out, records), (out / EQUAL_TIME, read_equal_time(root))):
        for run in some:
            files[folder / run.model / run.mode / f"seed-{run.seed}.json"] = _compact(pack_run(run))
    for broken_run in broken:
        within = broken_run.folder.relative_to(root)
        own = out / EQUAL_TIME if within.parts[:1] == (EQUAL_TIME,) else out
        files[own.joinpath(*broken_run.folder.parts[-3:]).with_suffix(".json")] = _compact(pack_failure(broken_run))
    for path in sorted(root.glob(f"*/*/{EFFICIENCY}")):
        if isinstance(paired := read_json(path), dict):
            files[out / path.relative_to(root)] = _compact({"sha256": digest(paired), **paired})
    if isinstance(sweep := read_json(root / SWEEP), dict):
        before = read_json(out / SWEEP)  # of other runs that were packed into this folder
        known = before.get("commands", []) if isinstance(before, dict) else []
        commands = list(dict.fromkeys([*known, *sweep.get("commands", [])]))
        files[out / SWEEP] = json.dumps({**sweep, "commands": commands}, indent=1)
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (text + "\n").encode())
    except OSError as error:
        raise folder_error(out, error) from error
    return list(files)


def is_efficiency_changed(folder: Path, runs: Sequence[RunRecord]) -> bool:
    """Whether the efficiency of packed runs, MODEL/MODE, is not what it was when it was packed."""
    paired = read_json(folder / EFFICIENCY)
    if not isinstance(paired, dict) or ("sha256" not in paired and any(run.packed is None for run in runs)):
        return False  # measured here, and not packed yet
    return paired.get("sha256") != digest(paired)


def _compact(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))
