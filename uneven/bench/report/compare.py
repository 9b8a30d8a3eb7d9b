"""`uneven bench compare`: is B better than A, paired over common seeds?

Called by cli/bench_results.py. Speeds of disturbed runs are not compared, see [Note: disturbed figures] in
undisturbed.py; their quality is.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.single.folders import BrokenRun, RunRecord, read_run, read_runs
from uneven.errors import InputError

OF_QUALITY = ("data", "epochs", "eval_samples")  # settings without which qualities say nothing of each other


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


def compare(first: Path, second: Path) -> list[Difference]:
    """One Difference for every model and mode that both folders have; InputError if there is none."""
    if _is_single(first) and _is_single(second):  # compared even if their modes and seeds differ
        old, new = _read_single(first), _read_single(second)
        if old.model != new.model:
            raise InputError(f"{first} is a run of {old.model}, {second} one of {new.model}: compare runs of one model")
        return [_difference(new.model, f"{old.mode} -> {new.mode}", [(old, new)])]
    before, after = ({run.key: run for run in read_runs(folder)[0]} for folder in (first, second))
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
    return Difference(
        model=model,
        mode=mode,
        pairs=len(pairs),
        quality=quality,
        quality_half=quality_half,
        speed=speed,
        speed_half=speed_half,
        verdict=f"{quality_verdict}, {speed_verdict}",
        is_disturbed=disturbed > 0,
    )


def _verdict(difference: float, half: float, what: str) -> str:
    if half == math.inf:
        return f"{what}: one pair does not show chance"
    if difference > half:
        return f"{what} better"
    return f"{what} worse" if difference < -half else f"{what}: no difference shown"
