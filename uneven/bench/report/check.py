"""`uneven bench check RUNS`: every model and mode against what was published, one device alone, or a baseline.

Called by cli/bench_results.py. Quality is held at the end of the run, after as many samples as the reference, and at
equal time, when the best single device has finished: of runs that were made for it (bench/sweep/plan.py), else of the
local policies. Runs of less than a tenth of their recipe's epochs are there for their speed: after one epoch of fifty
the order of two qualities says nothing about the fiftieth, so theirs is held against nothing. What was changed, added
or taken away since the runs were packed is a fault, and so is a run whose own figures contradict each other.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.models.recipe import Recipe
from uneven.bench.report.model_runs import (
    ModelRuns,
    at_time,
    best_on_the_way,
    by_model,
    is_worse,
    slack_of,
    unknown_models,
)
from uneven.bench.report.pack import changes
from uneven.bench.single.folders import (
    BrokenRun,
    RunRecord,
    for_speed,
    nothing_found,
    read_efficiency,
    read_equal_time,
    read_runs,
    write_file,
)
from uneven.bench.single.modes import OWN_LOOP
from uneven.bench.single.shape import Shape, fits, is_number, optional
from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.files import ABSENT, read_json

NEAR = 1e-6  # of two figures that are computed from each other
NEAR_SECONDS = (0.02, 0.5)  # of a rank's time and the last one in the history: a part of it, and at least so many
NEAR_QUALITY = 2e-3  # of a run's quality, and of the last evaluation in its history
LEAST_PART = 0.1  # of a recipe's epochs, for a quality that can be held against another
COMPARED = ("data", "epochs", "samples", "eval_samples", "precision")  # must be those of the runs it is held against
SETTINGS = (
    *("data", "epochs", "eval_samples", "batch_size", "global_batch_size", "lr_scale"),
    *("devices", "precision", "compile"),
)
BASELINE_VERSION = 1
SLACK = 0.03  # efficiency may fall by this much by chance


@dataclass(frozen=True)
class Judged:
    """One model and mode. `faults` is empty where it holds."""

    model: str
    mode: str
    seeds: int
    metric: str
    quality: float
    best: float  # at any evaluation, mean over seeds: of some recipes the published figure is held against it
    published: float | None  # the worst that agrees with it; None where these runs cannot be held against it
    reference: str | None  # the mode that it is held against, and ...
    reference_quality: float | None
    equal_time: float | None  # quality when the best single device had finished
    is_short: bool = False  # trained too little for its quality to be held against anything
    faults: list[str] = field(default_factory=list)
    sweep: str | None = field(default=None, metadata=ABSENT)  # where a folder has several


def compare_with_references(root: Path) -> tuple[list[Judged], list[str]]:
    """Every model and mode of a folder, and what is wrong with the folder itself; InputError without a finished run."""
    records, broken = read_runs(root)
    made, unknown = read_equal_time(root), unknown_models(records)
    if len(unknown) == len(records):
        raise nothing_found(root)
    faults = _faults_of_folder(root, broken)
    faults += [f"{run.folder}: unknown model {run.model!r}" for run in unknown]
    found = []
    for runs in by_model(records, made):
        for mode, some in runs.by_mode.items():
            if any(run.is_for_speed for run in some):  # it has no quality of its own
                faults += [f"{runs.recipe.name} {mode} {fault}" for run in some for fault in _contradictions(run)]
            else:
                found.append(_judge(runs, mode))
    judged = {(row.model, row.mode) for row in found}
    faults += [f"{run.folder}: no run of {run.mode} beside it" for run in made if run.key[:2] not in judged]
    return found, faults


def _faults_of_folder(root: Path, broken: Sequence[BrokenRun]) -> list[str]:
    return [*changes(root), *(f"{run.folder}: {run.reason}" for run in broken)]


def _judge(model: ModelRuns, mode: str) -> Judged:
    recipe, runs = model.recipe, model.by_mode[mode]
    mean, half = interval([run.quality for run in runs])
    best = best_on_the_way(recipe, runs)
    worst = recipe.published.worst if recipe.published is not None and all(map(_is_whole, runs)) else None
    is_short = any(run.summary["epochs"] < LEAST_PART * recipe.epochs for run in runs)
    reference = None if is_short else _reference(model, mode)
    made = [run for run in model.made_for_equal_time if run.mode == mode]
    faults = [fault for run in (*runs, *made) for fault in _contradictions(run)]
    faults += _wrong_pairs(runs)
    faults += _differences(runs, None if reference is None else (reference, model.by_mode[reference][0]))
    if recipe.published is not None and worst is not None:
        seen = best if recipe.published.is_best else mean
        if is_worse(recipe, seen, worst):
            source = recipe.published.source
            faults.append(f"{recipe.metric} {seen:.4g}, and {worst:g} is the worst that agrees with {source}")
    other = None
    if reference is not None:
        other, other_half = interval([run.quality for run in model.by_mode[reference]])
        slack = slack_of(recipe, half, other_half)
        if is_worse(recipe, mean, other, slack):
            faults.append(f"{recipe.metric} {mean:.4g}, {reference} has {other:.4g} (allowed: {slack:.4g} worse)")
    equal_time, fault = _at_equal_time(model, mode)
    faults += [fault] if fault and not is_short else []
    return Judged(
        model=recipe.name,
        mode=mode,
        seeds=len(runs),
        metric=recipe.metric,
        quality=mean,
        best=best,
        published=worst,
        reference=reference,
        reference_quality=other,
        equal_time=equal_time,
        is_short=is_short,
        faults=faults,
    )


def _at_equal_time(model: ModelRuns, mode: str) -> tuple[float | None, str | None]:
    """The quality when the single device has finished, and what is wrong with it.

    An exact mode that is slower than the single device is in the middle of its schedule then, so it is held to this
    only by runs that were made for it.
    """
    recipe, solo = model.recipe, model.solo
    made = model.longer(mode)
    runs = made or model.by_mode[mode]
    if runs[0].takes_turns:
        return None, None
    timed = for_speed(runs)
    found, has_ended = at_time(recipe, runs, solo)
    is_timed = _is_local(mode) or bool(made)
    if found is None or not is_timed or any(run.is_disturbed for run in [*timed, *for_speed(solo)]):
        return found, None
    judged = runs if has_ended else timed
    (_, half), (other, other_half) = (interval([run.quality for run in group]) for group in (judged, solo))
    slack = slack_of(recipe, half, other_half)
    if not is_worse(recipe, found, other, slack):
        return found, None
    return found, (
        f"{recipe.metric} {found:.4g} when {solo[0].mode} has finished with {other:.4g} (allowed: {slack:.4g} worse)"
    )


def _differences(runs: Sequence[RunRecord], reference: tuple[str, RunRecord] | None) -> Iterator[str]:
    """Settings that the runs of a mode do not share, or not with those that they are held against."""
    first = _settings(runs[0])
    for name in first:
        seen = sorted({str(_settings(run)[name]) for run in runs})
        if len(seen) > 1:
            yield f"its runs differ in {name}: {', '.join(seen)}"
    if reference is not None:
        mode, theirs = reference[0], _settings(reference[1])
        for name in COMPARED:
            if first[name] != theirs[name]:
                yield f"{name} {first[name]}, {mode} has {theirs[name]}: they cannot be compared"


def _settings(run: RunRecord) -> dict[str, Any]:
    asked = run.summary.get("asked") or {}
    return {"samples": asked.get("samples"), **{name: run.summary.get(name) for name in SETTINGS}}


def _is_local(mode: str) -> bool:
    return mode.endswith(("-cadence", "-async"))


def _reference(model: ModelRuns, mode: str) -> str | None:
    """One device alone, at its batch; an exact mode with a larger one is held against PyTorch's DDP, which has it too.

    Twice the batch is half the steps, which is no fault of the mode.
    """
    if mode.startswith("solo-"):
        return None
    runs, ddp = model.by_mode[mode], model.by_mode.get("torch-ddp")
    own, devices = _global_batch(runs[0]), len(runs[0].summary["devices"])
    if model.single is not None and (_is_local(mode) or own == _global_batch(model.solo[0])):
        return model.single
    # DDP takes equal batches: of 128 samples for three devices it trains 126.
    is_like_ddp = ddp is not None and _global_batch(ddp[0]) in (own, own // devices * devices)
    return "torch-ddp" if is_like_ddp and mode != "torch-ddp" else None


def _global_batch(run: RunRecord) -> int:
    summary = run.summary
    return int(summary.get("global_batch_size") or summary.get("batch_size", 0) * len(summary["devices"]))


def _is_whole(run: RunRecord) -> bool:
    """Whether a published figure may be held against it: the recipe's data and epochs, and the whole test set.

    One that is the best on the way is not held against a loop of the user's own, which is evaluated only at the end.
    """
    recipe, summary = models.get(run.model), run.summary
    is_cut = (summary.get("asked") or {}).get("samples") or summary.get("eval_samples")
    if recipe.published is not None and recipe.published.is_best and run.mode in OWN_LOOP:
        return False
    return not is_cut and summary.get("data") == recipe.data and summary.get("epochs", 0) >= recipe.epochs


def _contradictions(run: RunRecord) -> list[str]:
    """Where the figures of a run cannot all be right."""
    return [f"seed {run.seed}: {fault}" for fault in _wrong_figures(run)]


def _wrong_figures(run: RunRecord) -> Iterator[str]:
    summary = run.summary
    samples, total_s = summary["samples"], summary["train_seconds"]
    if run.is_changed:
        yield "was changed since it was packed; pack the runs again"
    speed = samples / total_s if total_s else 0.0
    if abs(speed - summary["samples_per_s"]) > NEAR * speed:
        yield f"{samples} samples in {total_s:.3f} s are not {summary['samples_per_s']:.1f} a second"
    if not run.metrics:
        return
    last = run.metrics[-1]
    if last["epoch"] != summary["epochs"]:
        yield f"its history ends with epoch {last['epoch']:g}, its summary has {summary['epochs']}"
    if last["samples"] != samples and not summary.get("dropped"):
        yield f"its history ends after {last['samples']:,} samples, its summary has {samples:,}"
    # The summary has the longest rank's time and the history one rank's own. They may differ: a rank that waits while
    # another captures its steps is training meanwhile, and that one is not.
    times, end_s = run.times(), last["train_seconds"]
    ranks = [total_s] if times is None else [account.training_s for account in times.accounts]
    if not any(_is_near(end_s, seconds) for seconds in ranks):
        yield f"its history ends after {end_s:.2f} s, its summary has {total_s:.2f}"
    if not _is_near(total_s, max(ranks)):
        yield f"its summary has {total_s:.2f} s, its longest rank trained for {max(ranks):.2f}"
    seen = last.get(summary["metric"])
    is_far = seen is not None and abs(seen - run.quality) > NEAR_QUALITY * abs(run.quality)
    if is_far and summary.get("precision") == "fp32":
        yield f"its last evaluation has {seen:.4g}, its summary {run.quality:.4g}"


def _is_near(seconds: float, other: float) -> bool:
    part, least = NEAR_SECONDS
    return abs(seconds - other) <= max(least, part * other)


def _wrong_pairs(runs: Sequence[RunRecord]) -> list[str]:
    """Where an efficiency is not that of its own pairs."""
    paired = read_efficiency(runs) or {}
    ratios = paired.get("ratios")
    if not isinstance(ratios, list) or len(ratios) < 2:
        return []
    if not all(map(is_number, ratios)):
        return ["efficiency: the ratios of its pairs are no numbers"]
    mean, half = interval(ratios)
    stated = [paired[name] for name in ("efficiency", "half_width", "pairs")]
    if all(
        math.isclose(one, other, abs_tol=NEAR) for one, other in zip(stated, (mean, half, len(ratios)), strict=True)
    ):
        return []
    return [
        f"efficiency: {stated[0]:.4g} +- {stated[1]:.4g} of {stated[2]} pairs, but {len(ratios)} ratios have a mean of "
        f"{mean:.4g} +- {half:.4g}"
    ]


def _baseline_of(root: Path) -> dict[str, Any]:
    """Quality and efficiency per model and mode, for `check_baseline` to compare later runs with."""
    records, _ = read_runs(root)
    if not records:
        raise nothing_found(root)
    return {
        f"{runs.recipe.name} {mode}": {"quality": [run.quality for run in some], "efficiency": _efficiency(some)}
        for runs in by_model(records)
        for mode, some in runs.by_mode.items()
    }


def _efficiency(runs: Sequence[RunRecord]) -> list[float] | None:
    """Figure and half-width by pairs; None if they were not measured, or disturbed."""
    paired = read_efficiency(runs)
    if paired is None or is_disturbed(paired):
        return None
    return [float(paired["efficiency"]), float(paired["half_width"])]


def write_baseline(root: Path, path: Path) -> None:
    """MachineError if the file cannot be written."""
    write_file(
        path, json.dumps({"version": BASELINE_VERSION, "rows": dict(sorted(_baseline_of(root).items()))}, indent=1)
    )


def check_baseline(root: Path, baseline: Path) -> list[str]:
    """One sentence for each figure that is worse than the baseline, and for each run that does not count.

    Quality fails if it is worse by more than the margin and chance (better never fails). Efficiency, if both measured
    it by pairs, fails if it fell by more than the slack and both intervals.
    """
    saved = read_json(baseline)
    rows = saved.get("rows") if isinstance(saved, dict) and saved.get("version") == BASELINE_VERSION else None
    if not rows or not isinstance(rows, dict) or not all(_is_row(name, row) for name, row in rows.items()):
        raise InputError(
            f"{baseline} is no baseline of version {BASELINE_VERSION}: make one by "
            f"'uneven bench check RUNS --save {baseline}'"
        )
    now = _baseline_of(root)
    faults = _faults_of_folder(root, read_runs(root)[1])
    for name, row in rows.items():
        faults += _worse(name, row, now[name]) if name in now else [f"{name}: has no finished run"]
    return faults


def _is_row(name: str, row: Any) -> bool:
    shape: Shape = {"quality": [is_number], "efficiency": optional([is_number])}
    has_figures = fits(row, shape) and len(row["quality"]) > 0 and len(row.get("efficiency") or (0.0, 0.0)) == 2
    return has_figures and name.split()[:1] in [[known] for known in models.NAMES]


def _worse(name: str, saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    recipe: Recipe = models.get(name.split()[0])
    before, before_half = interval(saved["quality"])
    after, after_half = interval(now["quality"])
    slack = slack_of(recipe, before_half, after_half)
    if is_worse(recipe, after, before, slack):
        yield f"{name}: {recipe.metric} {after:.4g}, the baseline has {before:.4g} (allowed: {slack:.4g} worse)"
    old, new = saved.get("efficiency"), now["efficiency"]
    if old is not None and new is None:
        yield f"{name}: efficiency was not measured, or disturbed; the baseline has {old[0]:.3f}"
    elif old is not None and new[0] < old[0] - SLACK - math.hypot(old[1], new[1]):
        yield f"{name}: efficiency {new[0]:.3f} +- {new[1]:.3f}, the baseline has {old[0]:.3f} +- {old[1]:.3f}"
