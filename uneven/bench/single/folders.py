"""Reads runs, ROOT/MODEL/MODE/seed-S: finished ones as RunRecords, all others as BrokenRuns with a reason.

A run is a folder, or the one file `seed-S.json` that `pack_run` makes of it to be published: everything that a report
needs and no weights. Where both are there, the folder counts if a run has ended in it, finished or failed. Runs at
equal time, which bench/sweep/plan.py plans, are below ROOT/equal-time, apart from the others. Used by the report, by
comparisons and by sweeps. Invariant: what is in them never raises, so that a report can be made of an interrupted or
damaged set of runs.
"""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.bench.single.run_times import RunTimes, is_number
from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.files import read_json
from uneven.hardware.device import is_lesser_copy, parse_device, parse_devices, takes_turns
from uneven.timeline.timeline import Timeline

SUMMARY_VERSION = 1
PACKED_VERSION = 1
NEEDED = (
    *("model", "mode", "seed", "devices", "epochs"),
    *("metric", "quality", "train_seconds", "samples_per_s", "samples"),
)
SWEEP = "sweep.json"  # in the folder of a sweep: its commands, and the modes it left out
EQUAL_TIME = "equal-time"  # in the folder of a sweep: runs with as many epochs as fit the single device's time
DEPTHS = ("*/*/seed-*", "*/seed-*", "seed-*")  # of a sweep's folder, a model's, a mode's
EFFICIENCY = "efficiency.json"  # in the folder of a mode: measured by pairs
FAILURE = "failure.json"  # written by a sweep into the folder of a run that failed
LOCAL_SETTINGS = ("out", "progress", "overwrite", "resume", "replay")  # of one machine, and of no figure
TAKEN = ("stolen_share", "foreign_cores", "pressure_share")  # of a run's interference, where they are known
DIGITS = 7  # of a number in a packed history


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its folder, or its packed file, with what is in summary.json and metrics.jsonl."""

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]  # one entry per epoch
    packed: dict[str, Any] | None = None  # the whole file of a packed run

    @property
    def model(self) -> str:
        return str(self.summary["model"])

    @property
    def mode(self) -> str:
        return str(self.summary["mode"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @property
    def quality(self) -> float:
        return float(self.summary["quality"][self.summary["metric"]])

    @property
    def is_disturbed(self) -> bool:
        """Whether its speed is marked; its quality is valid all the same."""
        return is_disturbed(self.summary)

    @property
    def is_for_speed(self) -> bool:
        """A simulated slow device alone is run for its speed: its quality would repeat another run's."""
        if not self.mode.startswith("solo-"):
            return False
        device = parse_device(self.summary["devices"][0])
        asked = (self.summary.get("asked") or {}).get("devices")
        try:
            return is_lesser_copy(device, parse_devices(asked)) if asked else device.speed < 1.0
        except (InputError, AttributeError, TypeError):  # unlike the device, this record is not checked before
            return False

    @property
    def takes_turns(self) -> bool:
        """Its ranks compute one after the other on one GPU: such a run counts for quality only."""
        return takes_turns([parse_device(name) for name in self.summary["devices"]])

    @property
    def is_changed(self) -> bool:
        """Whether a packed run is not what it was when it was packed."""
        return self.packed is not None and self.packed.get("sha256") != digest(self.packed)

    def timeline(self) -> Timeline | None:
        """None if it is missing or cannot be read, as that of a packed run; the run counts all the same."""
        try:
            return Timeline.from_json(json.loads((self.folder / "timeline.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def times(self) -> RunTimes | None:
        """How it spent its time; None as for `timeline`."""
        if self.packed is None:
            timeline = self.timeline()
            return None if timeline is None else RunTimes.of(timeline)
        try:
            return RunTimes.from_json(self.packed["times"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            return None


@dataclass(frozen=True)
class BrokenRun:
    """A run folder without a finished run, and the reason."""

    folder: Path
    reason: str


def for_speed(runs: Sequence[RunRecord]) -> Sequence[RunRecord]:
    """The undisturbed runs; all of them if every run was disturbed."""
    return [run for run in runs if not run.is_disturbed] or runs


def single_device(by_mode: Mapping[str, Sequence[RunRecord]]) -> str | None:
    """The mode of the fastest device alone, of those whose quality counts; None without any."""
    alone = {
        mode: statistics.median(run.summary["samples_per_s"] for run in for_speed(runs))
        for mode, runs in by_mode.items()
        if mode.startswith("solo-") and not any(run.is_for_speed for run in runs)
    }
    return max(alone, key=lambda mode: alone[mode]) if alone else None


def read_runs(root: Path) -> tuple[list[RunRecord], list[BrokenRun]]:
    """The runs of a sweep's folder, of a model's or a mode's in it, or a run folder's own.

    InputError if it does not exist. Those at equal time are left out, but for the broken ones. Sweeps in folders of
    their own below this one are other runs.
    """
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: make runs by 'uneven bench sweep --out {root}'")
    runs, sweep = _read_below(root), sweep_of(root)
    longer = [run for run in _read_below(sweep / EQUAL_TIME) if _is_within(run.folder, sweep / EQUAL_TIME, root, sweep)]
    broken = [run for run in (*runs, *longer) if isinstance(run, BrokenRun)]
    broken += _apart([run for run in longer if isinstance(run, RunRecord)])[1]
    for path in sorted(sweep.glob(f"*/*/{FAILURE}")):  # of a measurement of efficiency, which has no run's folder
        failure = read_json(path)
        is_own = not _is_run(path.parent) and _is_within(path.parent, sweep, root, sweep)
        if is_own and isinstance(failure, dict):
            broken.append(BrokenRun(path.parent, f"efficiency: {failure.get('reason', 'failed')}"))
    records, copies = _apart([run for run in runs if isinstance(run, RunRecord)])
    return records, broken + copies


def _apart(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[BrokenRun]]:
    """Every seed of a mode once, and what repeats one: counted twice, it would make the interval too narrow."""
    first: dict[tuple[str, str, int], RunRecord] = {}
    copies = []
    for run in runs:
        known = first.setdefault((run.model, run.mode, run.seed), run)
        if known is not run:
            what = f"{run.model} {run.mode} seed {run.seed}"
            copies.append(BrokenRun(run.folder, f"holds {what}, as {known.folder} does: it was copied or moved"))
    return list(first.values()), copies


def sweep_of(root: Path) -> Path:
    """The folder of the sweep that `root` belongs to: its own, or one above a model's, a mode's or a run's."""
    for run in _read_below(root):
        place = run.folder.absolute()
        if isinstance(run, RunRecord) and place.parts[-3:-1] == (run.model, run.mode):
            found = place.parents[2]
            return root if found == root.absolute() else found
    return root


def _is_within(path: Path, base: Path, root: Path, sweep: Path) -> bool:
    """Whether a file below `base`, which is laid out as the sweep is, belongs to the part of it that `root` is."""
    part = root.absolute().relative_to(sweep.absolute()).parts
    return path.absolute().relative_to(base.absolute()).with_suffix("").parts[: len(part)] == part


def sweeps_in(root: Path) -> list[Path]:
    """The folder itself if it has runs, else the folders of runs in it; the folder itself also without any.

    One without sweep.json counts, too: that of `uneven demo`, or a packed one whose missing file `uneven bench check`
    reports.
    """
    if not root.is_dir() or _run_paths(root):
        return [root]
    records = {path: read_json(path / SWEEP) for path in sorted(root.iterdir()) if path.is_dir()}
    packed = [path for path, record in records.items() if isinstance(record, dict) and record.get("files")]
    return [path for path in records if path in packed or (path.name != EQUAL_TIME and _run_paths(path))] or [root]


def nothing_found(root: Path) -> InputError:
    """There is no finished run in the folder; says where there are some."""
    deeper = next((path for path in sorted(root.glob("*/*/*/seed-*")) if _is_run(path)), None)
    make = f"make some by 'uneven bench sweep --out {root}'"
    return InputError(f"no finished run in {root}: {f'there are some in {deeper.parents[2]}' if deeper else make}")


def read_equal_time(root: Path) -> list[RunRecord]:
    """The finished runs at equal time of a sweep, or of the model or mode whose folder it is."""
    sweep = sweep_of(root)
    base = sweep / EQUAL_TIME
    found = [run for run in _read_below(base) if _is_within(run.folder, base, root, sweep)]
    return _apart([run for run in found if isinstance(run, RunRecord)])[0]


def read_run(folder: Path) -> RunRecord | BrokenRun:
    """The run in a folder or in its packed file, finished or not."""
    packed = _packed(folder)
    has_ended = any((folder / name).is_file() for name in ("summary.json", FAILURE))
    return read_packed(packed) if packed.is_file() and not has_ended else _read_folder(folder)


def _read_below(root: Path) -> list[RunRecord | BrokenRun]:
    return [read_run(folder) for folder in sorted({_folder(path) for path in _run_paths(root)})]


def _run_paths(root: Path) -> list[Path]:
    """The folders and packed files of runs, those at equal time left out."""
    below = (path for depth in DEPTHS for path in root.glob(depth) if _is_run(path))
    return [root] if _is_run(root) else [path for path in below if EQUAL_TIME not in path.relative_to(root).parts]


def _read_folder(folder: Path) -> RunRecord | BrokenRun:
    failure = read_json(folder / FAILURE)
    summary = read_json(folder / "summary.json")
    if isinstance(failure, dict):  # a run that ends well takes it away: it is newer than a summary beside it
        return BrokenRun(folder, str(failure.get("reason", "failed")))
    if not (folder / "summary.json").is_file():
        return BrokenRun(folder, "not finished: there is no summary.json")
    if (fault := _fault(summary)) is not None:
        return BrokenRun(folder, f"summary.json {fault}")
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        metrics = [_known(json.loads(line)) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        return BrokenRun(folder, f"metrics.jsonl cannot be read ({error})")
    if not all(_is_entry(entry, summary["metric"]) for entry in metrics):
        return BrokenRun(folder, "metrics.jsonl cannot be read (a line is no entry of an epoch)")
    return RunRecord(folder, summary, metrics)


def read_packed(path: Path) -> RunRecord | BrokenRun:
    """The run in a packed file, whole or not."""
    packed = read_json(path)
    if not isinstance(packed, dict) or packed.get("version") != PACKED_VERSION:
        return BrokenRun(path, f"is no packed run of version {PACKED_VERSION}")
    if "failure" in packed:
        return BrokenRun(path, str(packed["failure"]))
    if (fault := _fault(packed.get("summary"))) is not None:
        return BrokenRun(path, f"its summary {fault}")
    try:
        columns, rows = packed["metrics"]["columns"], packed["metrics"]["rows"]
        entries = [dict(zip(columns, row, strict=True)) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        return BrokenRun(path, f"its metrics cannot be read ({error})")
    metrics = [_known(entry) for entry in entries]
    if not all(_is_entry(entry, packed["summary"]["metric"]) for entry in metrics):
        return BrokenRun(path, "its metrics cannot be read (a row is no entry of an epoch)")
    run = RunRecord(path, packed["summary"], metrics, packed)
    if (run.model, run.mode, f"seed-{run.seed}.json") != path.absolute().parts[-3:]:
        return BrokenRun(path, f"holds {run.model} {run.mode} seed {run.seed}: it was changed, copied or moved")
    return run


def pack_run(run: RunRecord) -> dict[str, Any]:
    """Everything of a finished run that a report needs, and its settings; small enough for git."""
    if run.packed is not None:
        return run.packed
    config, times = read_json(run.folder / "config.json"), run.times()
    columns = list(dict.fromkeys(key for entry in run.metrics for key in entry))
    packed = {
        "version": PACKED_VERSION,
        "summary": run.summary,
        "settings": {key: value for key, value in config.items() if key not in LOCAL_SETTINGS}
        if isinstance(config, dict)
        else None,
        "metrics": {
            "columns": columns,
            "rows": [[_shortened(entry.get(column)) for column in columns] for entry in run.metrics],
        },
        "times": None if times is None else times.to_json(),
    }
    return {**packed, "sha256": digest(packed)}


def pack_failure(run: BrokenRun) -> dict[str, Any]:
    """A run that has no result is published, too, with the reason."""
    return {"version": PACKED_VERSION, "failure": run.reason}


def digest(packed: Mapping[str, Any]) -> str:
    """Of a packed run, without its own entry."""
    content = {key: value for key, value in packed.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shortened(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None  # JSON has no name for others


def _fault(summary: Any) -> str | None:
    """Why nothing can be told of a run with this summary; None if it is whole."""
    if not isinstance(summary, dict):
        return "cannot be read"
    if summary.get("version") != SUMMARY_VERSION:
        return f"is of version {summary.get('version')!r}, this is {SUMMARY_VERSION}"
    missing: Sequence[str] = [key for key in NEEDED if key not in summary]
    if missing:
        return f"lacks {', '.join(missing)}"
    quality, devices = summary["quality"], summary["devices"]
    if not isinstance(summary["metric"], str):
        return "has no usable metric"
    if not isinstance(quality, dict) or not is_number(quality.get(summary["metric"])):
        return f"lacks {summary['metric']}"
    wrong = [name for name in ("train_seconds", "samples_per_s", "samples") if not is_number(summary[name])]
    wrong += [name for name in ("seed", "epochs") if not isinstance(summary[name], int)]
    if not devices or not isinstance(devices, list) or not all(map(_is_device, devices)):
        wrong.append("devices")
    wrong += _wrong_extras(summary)
    return f"has no usable {', '.join(wrong)}" if wrong else None


def _wrong_extras(summary: Mapping[str, Any]) -> list[str]:
    """What a run need not tell, and has told in a way that nobody can read."""
    records = {name: summary.get(name) for name in ("asked", "machine", "interference")}
    wrong = [name for name, record in records.items() if not (record is None or isinstance(record, dict))]
    wrong += [
        name for name in ("peak_memory_bytes", "eval_samples", "runs_at_once") if not _is_optional(summary.get(name))
    ]
    shares = summary.get("sample_shares")
    if not (shares is None or (isinstance(shares, list) and all(map(is_number, shares)))):
        wrong.append("sample_shares")
    taken = records["interference"] if isinstance(records["interference"], dict) else {}
    return wrong + [name for name in TAKEN if not _is_optional(taken.get(name))]


def _is_optional(value: Any) -> bool:
    return value is None or is_number(value)


def _is_device(name: Any) -> bool:
    try:
        return isinstance(name, str) and parse_device(name) is not None
    except InputError:
        return False


def _known(entry: Any) -> Any:
    """An epoch of a history without what it does not know."""
    return {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else entry


def _is_entry(entry: Any, metric: str) -> bool:
    """Whether it is an epoch of a history, with what every figure of it needs."""
    names = ("epoch", "samples", "train_seconds")
    if not isinstance(entry, dict) or not all(is_number(entry.get(name)) for name in names):
        return False
    figures = [entry[name] for name in ("train_loss", metric) if name in entry]
    return all(isinstance(figure, int | float) and not isinstance(figure, bool) for figure in figures)  # NaN, too


def _packed(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _folder(path: Path) -> Path:
    """The folder of a run, whether it is there or packed in a file."""
    return path.with_suffix("") if path.is_file() else path


def _is_run(path: Path) -> bool:
    # An older run that was moved aside is named seed-0.1 and does not count.
    if path.is_file():
        return re.fullmatch(r"seed-\d+\.json", path.name) is not None
    return path.is_dir() and re.fullmatch(r"seed-\d+", path.name) is not None
