"""`uneven bench check RUNS`: every model and mode against what was published, and against one device alone.

Called by cli/bench_results.py. Quality is held at the end of the run, after as many samples as the reference, and at
equal time, when the best single device has finished: of runs that were made for it (bench/sweep/plan.py), else of the
local policies. Runs of less than a tenth of their recipe's epochs are there for their speed: after one epoch of fifty
the order of two qualities says nothing about the fiftieth, so theirs is held against nothing. A published file that was
changed or taken away is a fault, and so is a run whose own figures contradict each other.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.modes import OWN_LOOP
from uneven.bench.report.model_runs import (
    ModelRuns,
    at_time,
    best_on_the_way,
    by_model,
    is_worse,
    slack_of,
    unknown_models,
)
from uneven.bench.single.folders import (
    EFFICIENCY,
    SWEEP,
    RunRecord,
    for_speed,
    nothing_found,
    read_efficiency,
    read_equal_time,
    read_runs,
)
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
    faults = [*_changed_files(root, (*records, *made)), *(f"{run.folder}: {run.reason}" for run in broken)]
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


def _changed_files(root: Path, runs: Sequence[RunRecord]) -> list[str]:
    """Published files that are not what sweep.json has the checksum of; finds mistakes, and is no signature."""
    record = read_json(root / SWEEP)
    checksums = record.get("files") if isinstance(record, dict) else None
    if not isinstance(checksums, dict):
        is_published = any(run.packed is not None for run in runs)
        return [f"{SWEEP}: has no checksums of the published files beside it"] if is_published else []
    faults = []
    for name, checksum in checksums.items():
        if not (root / name).is_file():
            faults.append(f"{name}: is missing, {SWEEP} has its checksum")
        elif hashlib.sha256((root / name).read_bytes()).hexdigest() != checksum:
            faults.append(f"{name}: was changed since it was published")
    published = [run.folder for run in runs if run.packed is not None and run.folder.is_relative_to(root)]
    names = [path.relative_to(root).as_posix() for path in published]
    return [*faults, *(f"{name}: {SWEEP} does not list it" for name in names if name not in checksums)]


def _judge(model: ModelRuns, mode: str) -> Judged:
    recipe, runs = model.recipe, model.by_mode[mode]
    mean, half = interval([run.quality for run in runs])
    best = best_on_the_way(recipe, runs)
    worst = recipe.published.worst if recipe.published is not None and all(map(_is_whole, runs)) else None
    is_short = any(run.summary.epochs < LEAST_PART * recipe.epochs for run in runs)
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
    return {"samples": run.summary.asked.get("samples"), **{name: getattr(run.summary, name) for name in SETTINGS}}


def _is_local(mode: str) -> bool:
    return mode.endswith(("-cadence", "-async"))


def _reference(model: ModelRuns, mode: str) -> str | None:
    """One device alone, at its batch; an exact mode with a larger one is held against PyTorch's DDP, which has it too.

    Twice the batch is half the steps, which is no fault of the mode.
    """
    if mode.startswith("solo-"):
        return None
    runs, ddp = model.by_mode[mode], model.by_mode.get("torch-ddp")
    own, devices = _global_batch(runs[0]), len(runs[0].summary.devices)
    if model.single is not None and (_is_local(mode) or own == _global_batch(model.solo[0])):
        return model.single
    # DDP takes equal batches: of 128 samples for three devices it trains 126.
    is_like_ddp = ddp is not None and _global_batch(ddp[0]) in (own, own // devices * devices)
    return "torch-ddp" if is_like_ddp and mode != "torch-ddp" else None


def _global_batch(run: RunRecord) -> int:
    summary = run.summary
    return int(summary.global_batch_size or summary.batch_size * len(summary.devices))


def _is_whole(run: RunRecord) -> bool:
    """Whether a published figure may be held against it: the recipe's data and epochs, and the whole test set.

    One that is the best on the way is not held against a loop of the user's own, which is evaluated only at the end.
    """
    recipe, summary = models.get(run.model), run.summary
    is_cut = summary.asked.get("samples") or summary.eval_samples
    if recipe.published is not None and recipe.published.is_best and run.mode in OWN_LOOP:
        return False
    return not is_cut and summary.data == recipe.data and summary.epochs >= recipe.epochs


def _contradictions(run: RunRecord) -> list[str]:
    """Where the figures of a run cannot all be right."""
    return [f"seed {run.summary.seed}: {fault}" for fault in _wrong_figures(run)]


def _wrong_figures(run: RunRecord) -> Iterator[str]:
    summary = run.summary
    samples, total_s = summary.samples, summary.train_seconds
    speed = samples / total_s if total_s else 0.0
    if abs(speed - summary.samples_per_s) > NEAR * speed:
        yield f"{samples} samples in {total_s:.3f} s are not {summary.samples_per_s:.1f} a second"
    if not run.metrics:
        return
    last = run.metrics[-1]
    if last["epoch"] != summary.epochs:
        yield f"its history ends with epoch {last['epoch']:g}, its summary has {summary.epochs}"
    if last["samples"] != samples and not summary.dropped:
        yield f"its history ends after {last['samples']:,} samples, its summary has {samples:,}"
    # The summary has the longest rank's time and the history one rank's own. They may differ: a rank that waits while
    # another captures its steps is training meanwhile, and that one is not.
    times, end_s = run.times(), last["train_seconds"]
    ranks = [total_s] if times is None else [account.training_s for account in times.accounts]
    if not any(_is_near(end_s, seconds) for seconds in ranks):
        yield f"its history ends after {end_s:.2f} s, its summary has {total_s:.2f}"
    if not _is_near(total_s, max(ranks)):
        yield f"its summary has {total_s:.2f} s, its longest rank trained for {max(ranks):.2f}"
    seen = last.get(summary.metric)
    is_far = seen is not None and abs(seen - run.quality) > NEAR_QUALITY * abs(run.quality)
    if is_far and summary.precision == "fp32":
        yield f"its last evaluation has {seen:.4g}, its summary {run.quality:.4g}"


def _is_near(seconds: float, other: float) -> bool:
    part, least = NEAR_SECONDS
    return abs(seconds - other) <= max(least, part * other)


def _wrong_pairs(runs: Sequence[RunRecord]) -> list[str]:
    """Where an efficiency is not that of its own pairs."""
    paired = read_efficiency(runs)
    if paired is None and (runs[0].folder.parent / EFFICIENCY).is_file():
        return ["efficiency: its file cannot be read"]
    if paired is None or len(paired.ratios) < 2:
        return []
    mean, half = interval(paired.ratios)
    stated = (paired.efficiency, paired.half_width, paired.pairs)
    found = (mean, half, len(paired.ratios))
    if all(math.isclose(one, other, abs_tol=NEAR) for one, other in zip(stated, found, strict=True)):
        return []
    return [
        f"efficiency: {paired.efficiency:.4g} +- {paired.half_width:.4g} of {paired.pairs} pairs, but "
        f"{len(paired.ratios)} ratios have a mean of {mean:.4g} +- {half:.4g}"
    ]
