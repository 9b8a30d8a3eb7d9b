"""`uneven bench check RUNS`: every model and mode against what was published, and against one device alone.

Called by cli/bench_results.py. Quality is held at the end of the run, after as many samples as the reference, and at
equal time, when the best single device has finished: of runs that were made for it (bench/sweep/plan.py), else of the
local policies. Runs of less than a tenth of their recipe's epochs are there for their speed: after one epoch of fifty
the order of two qualities says nothing about the fiftieth, so theirs is held against nothing. What was changed, added
or taken away since the runs were packed is a fault, and so is a run whose own figures contradict each other.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.models.recipe import Recipe
from uneven.bench.report.build import read_efficiency
from uneven.bench.report.pack import changes
from uneven.bench.report.quality import at_time, best_on_the_way, is_worse, longer_than, slack_of
from uneven.bench.single.folders import (
    RunRecord,
    for_speed,
    nothing_found,
    read_equal_time,
    read_runs,
    single_device,
)
from uneven.bench.single.modes import OWN_LOOP
from uneven.bench.single.run_times import is_number

NEAR = 1e-6  # of two figures that are computed from each other
NEAR_SECONDS = (0.02, 0.5)  # of a rank's time and the last one in the history: a part of it, and at least so many
NEAR_QUALITY = 2e-3  # of a run's quality, and of the last evaluation in its history
LEAST_PART = 0.1  # of a recipe's epochs, for a quality that can be held against another
COMPARED = ("data", "epochs", "samples", "eval_samples", "precision")  # must be those of the runs it is held against


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_with_references(root: Path) -> tuple[list[Judged], list[str]]:
    """Every model and mode of a folder, and what is wrong with the folder itself; InputError without a finished run."""
    records, broken = read_runs(root)
    known, longer = [run for run in records if run.model in models.NAMES], read_equal_time(root)
    if not known:
        raise nothing_found(root)
    faults = [*changes(root), *(f"{run.folder}: {run.reason}" for run in broken)]
    faults += [f"{run.folder}: unknown model {run.model!r}" for run in records if run.model not in models.NAMES]
    found = []
    for name in models.NAMES:
        by_mode: dict[str, list[RunRecord]] = {}
        for run in known:
            if run.model == name:
                by_mode.setdefault(run.mode, []).append(run)
        for mode, runs in by_mode.items():
            if any(run.is_for_speed for run in runs):  # it has no quality of its own
                faults += [f"{name} {mode} {fault}" for run in runs for fault in _contradictions(run)]
            else:
                own = [run for run in longer if (run.model, run.mode) == (name, mode)]
                found.append(_judge(models.get(name), mode, by_mode, own))
    held = {(row.model, row.mode) for row in found}
    faults += [f"{run.folder}: no run of {run.mode} beside it" for run in longer if (run.model, run.mode) not in held]
    return found, faults


def _judge(recipe: Recipe, mode: str, by_mode: dict[str, list[RunRecord]], longer: list[RunRecord]) -> Judged:
    runs, alone = by_mode[mode], single_device(by_mode)
    solo = by_mode[alone] if alone is not None else []
    mean, half = interval([run.quality for run in runs])
    best = statistics.mean(best_on_the_way(recipe, run) for run in runs)
    worst = recipe.published.worst if recipe.published is not None and all(map(_is_whole, runs)) else None
    is_short = any(run.summary["epochs"] < LEAST_PART * recipe.epochs for run in runs)
    reference = None if is_short else _reference(mode, by_mode, alone)
    faults = [fault for run in (*runs, *longer) for fault in _contradictions(run)]
    faults += _wrong_pairs(runs)
    faults += _differences(runs, None if reference is None else (reference, by_mode[reference][0]))
    faults += _against_published(recipe, best if recipe.published and recipe.published.is_best else mean, worst)
    other, other_half = (math.nan, 0.0) if reference is None else interval([r.quality for r in by_mode[reference]])
    slack = slack_of(recipe, half, other_half)
    if reference is not None and is_worse(recipe, mean, other, slack):
        faults.append(f"{recipe.metric} {mean:.4g}, {reference} has {other:.4g} (allowed: {slack:.4g} worse)")
    longer = longer_than(longer, runs)
    equal_time, fault = _at_equal_time(recipe, mode, longer or runs, solo, is_made_for_it=bool(longer))
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
        reference_quality=None if reference is None else other,
        equal_time=equal_time,
        is_short=is_short,
        faults=faults,
    )


def _against_published(recipe: Recipe, quality: float, worst: float | None) -> list[str]:
    if worst is None or recipe.published is None or not is_worse(recipe, quality, worst):
        return []
    return [f"{recipe.metric} {quality:.4g}, and {worst:g} is the worst that agrees with {recipe.published.source}"]


def _at_equal_time(
    recipe: Recipe, mode: str, runs: Sequence[RunRecord], solo: Sequence[RunRecord], *, is_made_for_it: bool
) -> tuple[float | None, str | None]:
    """The quality when the single device has finished, and what is wrong with it.

    An exact mode that is slower than the single device is in the middle of its schedule then, so it is held to this
    only by runs that were made for it.
    """
    if runs[0].takes_turns:
        return None, None
    timed = for_speed(runs)
    found, has_ended = at_time(recipe, runs, solo)
    is_timed = _is_local(mode) or is_made_for_it
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


def _differences(runs: Sequence[RunRecord], reference: tuple[str, RunRecord] | None) -> list[str]:
    """Settings that the runs of a mode do not share, or not with those that they are held against."""
    first = _settings(runs[0])
    found = []
    for name in first:
        seen = sorted({str(_settings(run)[name]) for run in runs})
        if len(seen) > 1:
            found.append(f"its runs differ in {name}: {', '.join(seen)}")
    if reference is not None:
        mode, other = reference
        theirs = _settings(other)
        found += [
            f"{name} {first[name]}, {mode} has {theirs[name]}: they cannot be compared"
            for name in COMPARED
            if first[name] != theirs[name]
        ]
    return found


def _settings(run: RunRecord) -> dict[str, Any]:
    summary = run.summary
    trained = ("data", "epochs", "eval_samples", "batch_size", "global_batch_size", "lr_scale")
    names = (*trained, "devices", "precision", "compile")
    return {"samples": (summary.get("asked") or {}).get("samples"), **{name: summary.get(name) for name in names}}


def _is_near(seconds: float, other: float) -> bool:
    part, least = NEAR_SECONDS
    return abs(seconds - other) <= max(least, part * other)


def _is_local(mode: str) -> bool:
    return mode.endswith(("-cadence", "-async"))


def _reference(mode: str, by_mode: dict[str, list[RunRecord]], alone: str | None) -> str | None:
    """One device alone, at its batch; an exact mode with a larger one is held against PyTorch's DDP, which has it too.

    Twice the batch is half the steps, which is no fault of the mode.
    """
    if mode.startswith("solo-"):
        return None
    if alone is not None and (_is_local(mode) or _global_batch(by_mode[mode][0]) == _global_batch(by_mode[alone][0])):
        return alone
    if mode == "torch-ddp" or "torch-ddp" not in by_mode:
        return None
    own, devices = _global_batch(by_mode[mode][0]), len(by_mode[mode][0].summary["devices"])
    # DDP takes equal batches: of 128 samples for three devices it trains 126.
    return "torch-ddp" if _global_batch(by_mode["torch-ddp"][0]) in (own, own // devices * devices) else None


def _global_batch(run: RunRecord) -> int:
    summary = run.summary
    return int(summary.get("global_batch_size") or summary.get("batch_size", 0) * len(summary["devices"]))


def _is_whole(run: RunRecord) -> bool:
    """Whether a published figure may be held against it: the recipe's data and epochs, and the whole test set.

    One that is the best on the way is not held against a loop of the user's own, which is evaluated only at the end.
    """
    recipe, summary = models.get(run.model), run.summary
    asked = summary.get("asked") or {}
    is_cut = asked.get("samples") or summary.get("eval_samples")
    if recipe.published is not None and recipe.published.is_best and run.mode in OWN_LOOP:
        return False
    return not is_cut and summary.get("data") == recipe.data and summary.get("epochs", 0) >= recipe.epochs


def _contradictions(run: RunRecord) -> list[str]:
    """Where the figures of a run cannot all be right."""
    summary, name = run.summary, f"seed {run.seed}"
    found = [f"{name}: was changed since it was packed; pack the runs again"] if run.is_changed else []
    speed = summary["samples"] / summary["train_seconds"] if summary["train_seconds"] else 0.0
    if abs(speed - summary["samples_per_s"]) > NEAR * speed:
        found.append(
            f"{name}: {summary['samples']} samples in {summary['train_seconds']:.3f} s "
            f"are not {summary['samples_per_s']:.1f} a second"
        )
    if not run.metrics:
        return found
    last = run.metrics[-1]
    if last["epoch"] != summary["epochs"]:
        found.append(f"{name}: its history ends with epoch {last['epoch']:g}, its summary has {summary['epochs']}")
    if last["samples"] != summary["samples"] and not summary.get("dropped"):
        found.append(
            f"{name}: its history ends after {last['samples']:,} samples, its summary has {summary['samples']:,}"
        )
    found += [f"{name}: {fault}" for fault in _wrong_seconds(run, last["train_seconds"])]
    seen = last.get(summary["metric"])
    is_far = seen is not None and abs(seen - run.quality) > NEAR_QUALITY * abs(run.quality)
    if is_far and summary.get("precision") == "fp32":
        found.append(f"{name}: its last evaluation has {seen:.4g}, its summary {run.quality:.4g}")
    return found


def _wrong_pairs(runs: Sequence[RunRecord]) -> list[str]:
    """Where an efficiency is not that of its own pairs."""
    paired = read_efficiency(runs) or {}
    ratios = paired.get("ratios")
    if not isinstance(ratios, list) or len(ratios) < 2:
        return []
    if not all(map(is_number, ratios)):
        return ["efficiency: the ratios of its pairs are no numbers"]
    mean, half = interval(ratios)
    told, found = [paired[name] for name in ("efficiency", "half_width", "pairs")], (mean, half, len(ratios))
    if all(math.isclose(one, other, abs_tol=NEAR) for one, other in zip(told, found, strict=True)):
        return []
    return [
        f"efficiency: {told[0]:.4g} +- {told[1]:.4g} of {told[2]} pairs, but {len(ratios)} ratios have a mean of "
        f"{mean:.4g} +- {half:.4g}"
    ]


def _wrong_seconds(run: RunRecord, end_s: float) -> list[str]:
    """The summary has the longest rank's time and the history, which ends after `end_s`, one rank's own.

    They may differ: a rank that waits while another captures its steps is training meanwhile, and that one is not.
    """
    times, total_s = run.times(), run.summary["train_seconds"]
    ranks = [total_s] if times is None else [account.training_s for account in times.accounts]
    found = []
    if not any(_is_near(end_s, seconds) for seconds in ranks):
        found.append(f"its history ends after {end_s:.2f} s, its summary has {total_s:.2f}")
    if not _is_near(total_s, max(ranks)):
        found.append(f"its summary has {total_s:.2f} s, its longest rank trained for {max(ranks):.2f}")
    return found
