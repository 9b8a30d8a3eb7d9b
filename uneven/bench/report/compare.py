"""`uneven bench compare` and `check`: is B better than A, paired over the seeds both have, and a gate for CI.

Speeds of disturbed runs are not compared, see [Note: disturbed figures] in undisturbed.py; their quality is.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.report.build import MARGIN
from uneven.bench.single.folders import RunRecord, read_json, read_runs
from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.files import write_atomically

VERSION = 1
SLACK = 0.03  # of efficiency, that chance may take


@dataclass(frozen=True)
class Difference:
    """B against A for one model and mode: quality as a difference (positive is better), speed as a ratio."""

    model: str
    mode: str
    pairs: int  # seeds that both have
    quality: float
    quality_half: float
    speed: float  # samples/s of B over those of A
    speed_half: float
    verdict: str
    is_disturbed: bool = False  # some run was: nothing is said about speed

    def to_json(self) -> dict[str, Any]:
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}


def compare(first: Path, second: Path) -> list[Difference]:
    """Every model and mode that both folders have; InputError where there is none."""
    before, after = (_by_key(read_runs(folder)[0]) for folder in (first, second))
    if first.name.startswith("seed-") and second.name.startswith("seed-"):
        # Two single runs are compared whatever their modes and seeds are, as long as the model is one.
        (old,), (new,) = before.values(), after.values()
        if old.model != new.model:
            raise InputError(f"{first} is a run of {old.model}, {second} one of {new.model}: compare runs of one model")
        return [_difference(new.model, f"{old.mode} -> {new.mode}", [(old, new)])]
    shared = sorted(set(before) & set(after))
    if not shared:
        raise InputError(f"{first} and {second} have no model, mode and seed in common")
    groups = sorted({key[:2] for key in shared})
    return [_difference(*group, [(before[key], after[key]) for key in shared if key[:2] == group]) for group in groups]


def _by_key(records: Sequence[RunRecord]) -> dict[tuple[str, str, int], RunRecord]:
    return {(record.model, record.mode, record.seed): record for record in records}


def _difference(model: str, mode: str, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> Difference:
    recipe = models.get(model)
    sign = 1.0 if recipe.higher_is_better else -1.0
    quality, quality_half = interval([sign * (b.quality - a.quality) for a, b in pairs])
    speed, speed_half = interval([b.summary["samples_per_s"] / a.summary["samples_per_s"] for a, b in pairs])
    disturbed = sum(run.is_disturbed for pair in pairs for run in pair)
    speed_verdict = f"speed: {disturbed} disturbed runs" if disturbed else _verdict(speed - 1.0, speed_half, "speed")
    verdict = f"{_verdict(quality, quality_half, 'quality')}, {speed_verdict}"
    figures = (quality, quality_half, speed, speed_half)
    return Difference(model, mode, len(pairs), *figures, verdict, is_disturbed=disturbed > 0)


def _verdict(difference: float, half: float, what: str) -> str:
    if half == math.inf:
        return f"{what}: one pair does not show chance"
    if difference > half:
        return f"{what} better"
    return f"{what} worse" if difference < -half else f"{what}: no difference shown"


def make_baseline(root: Path) -> dict[str, Any]:
    """What `check` compares later runs with, per model and mode."""
    records, _ = read_runs(root)
    if not records:
        raise InputError(f"no finished run in {root}")
    rows: dict[str, Any] = {}
    for model, mode in sorted({(record.model, record.mode) for record in records}):
        runs = [record for record in records if (record.model, record.mode) == (model, mode)]
        rows[f"{model} {mode}"] = {
            "quality": [run.quality for run in runs],
            "efficiency": _efficiency(root, model, mode),
        }
    return {"version": VERSION, "rows": rows}


def write_baseline(root: Path, path: Path) -> None:
    write_atomically(path, json.dumps(make_baseline(root), indent=1).encode())


def check(root: Path, baseline: Path) -> list[str]:
    """What is worse than the baseline, a sentence each; empty where nothing is.

    Quality fails when it is not shown to be within the margin of the baseline (one-sided: better never fails);
    efficiency, where both measured it by pairs, when it fell by more than the slack and both intervals.
    """
    held = read_json(baseline)
    if not isinstance(held, dict) or held.get("version") != VERSION or "rows" not in held:
        raise InputError(
            f"{baseline} is no baseline of version {VERSION}: make one by 'uneven bench check RUNS --save {baseline}'"
        )
    now = make_baseline(root)["rows"]
    faults = []
    for name, row in held["rows"].items():
        if name not in now:
            faults.append(f"{name}: has no finished run")
            continue
        faults += _faults(name, row, now[name])
    return faults


def _faults(name: str, held: dict[str, Any], now: dict[str, Any]) -> list[str]:
    recipe = models.get(name.split()[0])
    sign = 1.0 if recipe.higher_is_better else -1.0
    margin = MARGIN.get(recipe.metric, 0.0)
    before, before_half = interval(held["quality"])
    after, after_half = interval(now["quality"])
    chance = math.hypot(*(0.0 if half == math.inf else half for half in (before_half, after_half)))
    found = []
    if sign * (after - before) < -(margin + chance):
        found.append(
            f"{name}: {recipe.metric} {after:.4f}, the baseline has {before:.4f} "
            f"(allowed: {margin:g} worse, and {chance:.4f} for chance)"
        )
    old, new = held["efficiency"], now["efficiency"]
    if old is not None and new is None:
        found.append(f"{name}: efficiency was not measured, or disturbed; the baseline has {old[0]:.3f}")
    elif old is not None and new[0] < old[0] - SLACK - math.hypot(old[1], new[1]):
        found.append(f"{name}: efficiency {new[0]:.3f} +- {new[1]:.3f}, the baseline has {old[0]:.3f} +- {old[1]:.3f}")
    return found


def _efficiency(root: Path, model: str, mode: str) -> list[float] | None:
    found = read_json(root / model / mode / "efficiency.json")
    if not isinstance(found, dict) or not {"efficiency", "half_width"} <= set(found) or is_disturbed(found):
        return None
    return [float(found["efficiency"]), float(found["half_width"])]
