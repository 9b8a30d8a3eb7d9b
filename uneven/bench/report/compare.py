"""`uneven bench compare` (is B better than A, paired over common seeds) and `uneven bench check` (a gate for CI).

Called by cli/bench_results.py. Speeds of disturbed runs are not compared, see [Note: disturbed figures] in
undisturbed.py; their quality is.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.report.build import read_efficiency, write_report
from uneven.bench.report.pack import changes
from uneven.bench.report.quality import is_worse, slack_of
from uneven.bench.single.folders import BrokenRun, RunRecord, nothing_found, read_run, read_runs
from uneven.bench.single.run_times import is_number
from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.files import read_json

VERSION = 1
OF_QUALITY = ("data", "epochs", "eval_samples")  # settings without which qualities say nothing of each other
SLACK = 0.03  # efficiency may fall by this much by chance


@dataclass(frozen=True)
class Difference:
    """B against A for one model and mode: quality as a difference (positive is better), speed as a ratio."""

    model: str
    mode: str
    pairs: int  # common seeds
    quality: float
    quality_half: float
    speed: float  # samples/s of B over those of A
    speed_half: float
    verdict: str
    is_disturbed: bool = False  # some run was, so there is no verdict about speed

    def to_json(self) -> dict[str, Any]:
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}


def compare(first: Path, second: Path) -> list[Difference]:
    """One Difference for every model and mode that both folders have; InputError if there is none."""
    if _is_single(first) and _is_single(second):  # compared even if their modes and seeds differ
        old, new = _read_single(first), _read_single(second)
        if old.model != new.model:
            raise InputError(f"{first} is a run of {old.model}, {second} one of {new.model}: compare runs of one model")
        return [_difference(new.model, f"{old.mode} -> {new.mode}", [(old, new)])]
    before, after = (_by_key(read_runs(folder)[0]) for folder in (first, second))
    shared = sorted(set(before) & set(after))
    if not shared:
        raise InputError(f"{first} and {second} have no model, mode and seed in common")
    groups = sorted({key[:2] for key in shared})
    return [_difference(*group, [(before[key], after[key]) for key in shared if key[:2] == group]) for group in groups]


def _is_single(folder: Path) -> bool:
    """Whether it is the folder of one run, or of an older one that was moved aside."""
    return folder.is_dir() and re.fullmatch(r"seed-\d+(\.\d+)?", folder.name) is not None


def _read_single(folder: Path) -> RunRecord:
    found = read_run(folder)
    if isinstance(found, BrokenRun):
        raise InputError(f"{found.folder}: {found.reason}")
    return found


def _by_key(records: Sequence[RunRecord]) -> dict[tuple[str, str, int], RunRecord]:
    return {(record.model, record.mode, record.seed): record for record in records}


def _difference(model: str, mode: str, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> Difference:
    recipe = models.get(model)
    sign = 1.0 if recipe.higher_is_better else -1.0
    quality, quality_half = interval([sign * (b.quality - a.quality) for a, b in pairs])
    speeds = [(a.summary["samples_per_s"], b.summary["samples_per_s"]) for a, b in pairs]
    speed, speed_half = interval([new / old if old else math.nan for old, new in speeds])
    disturbed = sum(run.is_disturbed for pair in pairs for run in pair)
    speed_verdict = f"speed: {disturbed} disturbed runs" if disturbed else _verdict(speed - 1.0, speed_half, "speed")
    others = [name for name in OF_QUALITY if any(a.summary.get(name) != b.summary.get(name) for a, b in pairs)]
    quality_verdict = _verdict(quality, quality_half, "quality")
    if others:
        quality_verdict = f"quality: runs with other {', '.join(others)}"
    verdict = f"{quality_verdict}, {speed_verdict}"
    figures = (quality, quality_half, speed, speed_half)
    return Difference(model, mode, len(pairs), *figures, verdict, is_disturbed=disturbed > 0)


def _verdict(difference: float, half: float, what: str) -> str:
    if half == math.inf:
        return f"{what}: one pair does not show chance"
    if difference > half:
        return f"{what} better"
    return f"{what} worse" if difference < -half else f"{what}: no difference shown"


def make_baseline(root: Path) -> dict[str, Any]:
    """Quality and efficiency per model and mode, for `check` to compare later runs with."""
    records, _ = read_runs(root)
    if not records:
        raise nothing_found(root)
    rows: dict[str, Any] = {}
    for model, mode in sorted({(record.model, record.mode) for record in records}):
        runs = [record for record in records if (record.model, record.mode) == (model, mode)]
        rows[f"{model} {mode}"] = {
            "quality": [run.quality for run in runs],
            "efficiency": _efficiency(runs),
        }
    return {"version": VERSION, "rows": rows}


def write_baseline(root: Path, path: Path) -> None:
    """MachineError if the file cannot be written."""
    write_report(path, json.dumps(make_baseline(root), indent=1))


def check(root: Path, baseline: Path) -> list[str]:
    """One sentence for each figure that is worse than the baseline, and for each run that does not count.

    Quality fails if it is worse by more than the margin and chance (better never fails). Efficiency, if both measured
    it by pairs, fails if it fell by more than the slack and both intervals.
    """
    saved = read_json(baseline)
    if not isinstance(saved, dict) or saved.get("version") != VERSION or not _are_rows(saved.get("rows")):
        raise InputError(
            f"{baseline} is no baseline of version {VERSION}: make one by 'uneven bench check RUNS --save {baseline}'"
        )
    now = make_baseline(root)["rows"]
    faults = [*changes(root), *(f"{run.folder}: {run.reason}" for run in read_runs(root)[1])]
    for name, row in saved["rows"].items():
        if name not in now:
            faults.append(f"{name}: has no finished run")
            continue
        faults += _faults(name, row, now[name])
    return faults


def _are_rows(rows: Any) -> bool:
    """Whether they are those of a baseline, with at least one."""
    return isinstance(rows, dict) and len(rows) > 0 and all(_is_row(name, row) for name, row in rows.items())


def _is_row(name: str, row: Any) -> bool:
    if not isinstance(row, dict) or name.split()[:1] not in [[known] for known in models.NAMES]:
        return False
    quality, efficiency = row.get("quality"), row.get("efficiency")
    figures = [quality, [0.0, 0.0] if efficiency is None else efficiency]
    are_numbers = all(isinstance(one, list) and one and all(map(is_number, one)) for one in figures)
    return are_numbers and (efficiency is None or len(efficiency) == 2)


def _faults(name: str, saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    recipe = models.get(name.split()[0])
    before, before_half = interval(saved["quality"])
    after, after_half = interval(now["quality"])
    slack = slack_of(recipe, before_half, after_half)
    faults = []
    if is_worse(recipe, after, before, slack):
        faults.append(
            f"{name}: {recipe.metric} {after:.4g}, the baseline has {before:.4g} (allowed: {slack:.4g} worse)"
        )
    old, new = saved["efficiency"], now["efficiency"]
    if old is not None and new is None:
        faults.append(f"{name}: efficiency was not measured, or disturbed; the baseline has {old[0]:.3f}")
    elif old is not None and new[0] < old[0] - SLACK - math.hypot(old[1], new[1]):
        faults.append(f"{name}: efficiency {new[0]:.3f} +- {new[1]:.3f}, the baseline has {old[0]:.3f} +- {old[1]:.3f}")
    return faults


def _efficiency(runs: Sequence[RunRecord]) -> list[float] | None:
    """Figure and half-width by pairs; None if they were not measured, or disturbed."""
    paired = read_efficiency(runs)
    if paired is None or is_disturbed(paired):
        return None
    return [float(paired["efficiency"]), float(paired["half_width"])]
