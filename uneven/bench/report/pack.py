"""`uneven bench pack RUNS --out FOLDER`: finished runs as small files, to be published beside the tables made of them.

Called by cli/sweep.py. FOLDER/MODEL/MODE/seed-S.json has a run's settings, history, times and versions, and no
weights; efficiencies by pairs and the record of the sweep come with them. `uneven bench report FOLDER` makes the same
tables of it as of the runs.
"""

import json
from pathlib import Path

from uneven.bench.single.folders import SWEEP, pack_failure, pack_run, read_runs
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
    files = {
        out / run.model / run.mode / f"seed-{run.seed}.json": json.dumps(pack_run(run), separators=(",", ":"))
        for run in records
    }
    for run in broken:
        own = out.joinpath(*run.folder.parts[-3:]).with_suffix(".json")
        files[own] = json.dumps(pack_failure(run), separators=(",", ":"))
    for path in sorted(root.glob(f"*/*/{EFFICIENCY}")):
        files[out / path.relative_to(root)] = json.dumps(read_json(path), separators=(",", ":"))
    if isinstance(sweep := read_json(root / SWEEP), dict):
        files[out / SWEEP] = json.dumps(sweep, indent=1)
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (text + "\n").encode())
    except OSError as error:
        raise folder_error(out, error) from error
    return list(files)
