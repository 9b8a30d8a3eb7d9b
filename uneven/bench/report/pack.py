"""`uneven bench pack RUNS --out FOLDER`: finished runs as small files, to be published beside the tables made of them.

Called by cli/bench_results.py. FOLDER/MODEL/MODE/seed-S.json has a run's settings, history, times and versions, and no
weights; efficiencies by pairs and the record of the sweep come with them, runs at equal time below
FOLDER/equal-time. `uneven bench report FOLDER` makes the same tables of it as of the runs. Every file has a checksum,
and FOLDER/sweep.json a list of them all, so that `uneven bench check` sees what was changed, added or taken away. That
finds mistakes; it is no signature.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from uneven.bench.single.folders import (
    DEPTHS,
    EFFICIENCY,
    EQUAL_TIME,
    FAILURE,
    PACKED_VERSION,
    SWEEP,
    RunRecord,
    digest,
    nothing_found,
    read_equal_time,
    read_run,
    read_runs,
    sweep_of,
    write_file,
)
from uneven.errors import InputError
from uneven.files import finite, folder_error, read_json

LOCAL_SETTINGS = ("out", "progress", "overwrite", "resume", "replay")  # of one machine, and of no figure
DIGITS = 7  # of a number in a packed history


def pack(root: Path, out: Path) -> list[Path]:
    """Returns the files that were written; InputError without a finished run."""
    if out.resolve().is_relative_to(root.resolve()):
        raise InputError(f"--out {out} lies in {root}, whose report would count every run twice; choose another folder")
    records, broken = read_runs(root)
    if not records:
        raise nothing_found(root)
    files: dict[Path, str] = {}
    for folder, some in ((out, records), (out / EQUAL_TIME, read_equal_time(root))):
        for run in some:
            files[folder / run.model / run.mode / f"seed-{run.seed}.json"] = _compact(run.packed or _packed(run))
    for broken_run in broken:
        place = broken_run.folder.absolute()
        if not place.name.startswith("seed-"):  # of a measurement of efficiency
            reason = broken_run.reason.removeprefix("efficiency: ")
            files[out.joinpath(*place.parts[-2:], FAILURE)] = _compact({"reason": reason})
            continue
        own = out / EQUAL_TIME if place.parts[-4] == EQUAL_TIME else out
        file = own.joinpath(*place.parts[-3:]).with_suffix(".json")
        if not isinstance(read_run(file.with_suffix("")), RunRecord):  # never in place of a finished one
            files[file] = _compact({"version": PACKED_VERSION, "failure": broken_run.reason})
    stale = []
    for folder in dict.fromkeys(run.folder.parent for run in records):
        if isinstance(paired := read_json(folder / EFFICIENCY), dict):
            place = out.joinpath(*folder.absolute().parts[-2:])
            files[place / EFFICIENCY] = _compact(paired)
            stale += [place / FAILURE] if place / FAILURE not in files else []
    try:
        for path in stale:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise folder_error(out, error) from error
    for path, text in files.items():
        write_file(path, f"{text}\n")
    write_file(out / SWEEP, json.dumps(_record(sweep_of(root), out), indent=1) + "\n")
    return [*files, out / SWEEP]


def _packed(run: RunRecord) -> dict[str, Any]:
    """Everything of a finished run that a report needs, and its settings; small enough for git."""
    config, times = read_json(run.folder / "config.json"), run.times()
    settings = config.items() if isinstance(config, dict) else None
    columns = list(dict.fromkeys(key for entry in run.metrics for key in entry))
    rows = [[_shortened(entry.get(column)) for column in columns] for entry in run.metrics]
    packed = {
        "version": PACKED_VERSION,
        "summary": run.summary,
        "settings": None if settings is None else {key: one for key, one in settings if key not in LOCAL_SETTINGS},
        "metrics": {"columns": columns, "rows": rows},
        "times": None if times is None else times.to_json(),
    }
    return {**packed, "sha256": digest(packed)}


def _shortened(value: Any) -> Any:
    return finite(float(f"{value:.{DIGITS}g}")) if isinstance(value, float) else value


def _record(root: Path, out: Path) -> dict[str, Any]:
    """What sweep.json says of the packed folder: the sweeps that made it, and the checksum of every file in it."""
    known, new = ([found] if isinstance(found := read_json(one / SWEEP), dict) else [] for one in (out, root))
    record = {
        "version": 1,
        "commands": list(dict.fromkeys(line for one in (*known, *new) for line in one.get("commands", []))),
        "skipped": {mode: why for one in (*known, *new) for mode, why in one.get("skipped", {}).items()},
        "files": _checksums(out),
    }
    return {**record, "sha256": digest(record)}


def _checksums(out: Path) -> dict[str, str]:
    found = [path for folder in (out, out / EQUAL_TIME) for path in folder.glob(f"{DEPTHS[0]}.json")]
    found += [path for name in (EFFICIENCY, FAILURE) for path in out.glob(f"*/*/{name}")]
    files = sorted(path for path in found if path.is_file())
    return {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changes(root: Path) -> list[str]:
    """What is not as it was when the folder was packed; nothing of a folder of runs that were never packed."""
    sweep = sweep_of(root)
    record, found = read_json(sweep / SWEEP), _checksums(sweep)
    packed = [name for name in found if Path(name).name.startswith("seed-")]
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return [f"{SWEEP}: lists no packed files, though there are some; pack the runs again"] if packed else []
    listed = record["files"]
    faults = [] if record.get("sha256") == digest(record) else [f"{SWEEP}: was changed since it was packed"]
    faults += [f"{name}: was there when the folder was packed, and is missing" for name in listed if name not in found]
    faults += [f"{name}: came after the folder was packed" for name in found if name not in listed]
    both = [name for name in found if name in listed]
    faults += [f"{name}: was changed since it was packed" for name in both if found[name] != listed[name]]
    hidden = [name for name in packed if read_run((sweep / name).with_suffix("")).folder != sweep / name]
    faults += [f"{name}: a folder beside it counts in its place; pack the runs again" for name in hidden]
    folders = [run.folder for run in (*read_runs(sweep)[0], *read_equal_time(sweep)) if run.packed is None]
    names = [folder.relative_to(sweep).as_posix() for folder in folders]
    later = [name for name in names if f"{name}.json" not in packed]
    return [*faults, *(f"{name}: came after the folder was packed; pack the runs again" for name in later)]


def _compact(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))
