"""The quality of runs: at the end, on the way to a target, after equal samples and after equal time."""

import math
import statistics
from collections.abc import Sequence

from uneven.bench.models.recipe import Recipe
from uneven.bench.single.folders import RunRecord, for_speed

MARGIN = {
    "accuracy": 0.004,
    "loss": 0.05,
    "mse": 0.0001,
}  # a mode that is worse than solo by less counts as equally good
MOST_CHANCE = 2.0  # margins: two seeds that differ by chance would allow any quality
NEAR = 0.99  # the target is this fraction of solo's accuracy (or its loss divided by it), which solo itself reaches


def slack_of(recipe: Recipe, *halves: float) -> float:
    """By how much a mean may be worse than another: the margin, and chance as far as it is known, within limits."""
    margin = MARGIN.get(recipe.metric, 0.0)
    chance = math.hypot(*(0.0 if half == math.inf else half for half in halves))
    return margin + min(chance, MOST_CHANCE * margin)


def is_worse(recipe: Recipe, value: float, than: float, slack: float = 0.0) -> bool:
    return (value < than - slack) if recipe.higher_is_better else (value > than + slack)


def target_of(recipe: Recipe, solo: Sequence[RunRecord]) -> float | None:
    """The quality for time-to-target: slightly worse than solo's final quality, so that solo reaches it too."""
    if not solo:
        return None
    mean = statistics.mean(run.quality for run in solo)
    return mean * NEAR if recipe.higher_is_better else mean / NEAR


def reached(recipe: Recipe, run: RunRecord, target: float | None, evaluations: int | None = None) -> float | None:
    """Seconds of training at the first evaluation that reached the target, of the first `evaluations` or of all."""
    if target is None:
        return None
    for entry in [epoch for epoch in run.metrics if recipe.metric in epoch][:evaluations]:
        value = entry[recipe.metric]
        if value >= target if recipe.higher_is_better else value <= target:
            return float(entry["train_seconds"])
    return None


def at_time(recipe: Recipe, runs: Sequence[RunRecord], solo: Sequence[RunRecord]) -> tuple[float | None, bool]:
    """The mean quality of the runs when the single device has finished, and whether they had ended by then.

    Times are those of undisturbed runs. Where these had ended, the others would have, too, had they run alone, so that
    all seeds count. Where one was still on, undisturbed runs alone do, by their last evaluation before that moment;
    None where one had none.
    """
    if not solo:
        return None, False
    seconds = statistics.median(run.summary["train_seconds"] for run in for_speed(solo))
    timed = for_speed(runs)
    if all(run.summary["train_seconds"] <= seconds for run in timed):
        return statistics.mean(run.quality for run in runs), True
    found = []
    for run in timed:
        if run.summary["train_seconds"] <= seconds:
            found.append(run.quality)
            continue
        before = [one for one in run.metrics if recipe.metric in one and one["train_seconds"] <= seconds]
        if not before:
            return None, False
        found.append(float(before[-1][recipe.metric]))
    return statistics.mean(found), False


def longer_than(longer: Sequence[RunRecord], runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Those of the runs at equal time that belong to `runs`: with more epochs, over the same data."""
    most = max(run.summary["epochs"] for run in runs)
    data = runs[0].summary.get("data")
    return [run for run in longer if run.summary["epochs"] > most and run.summary.get("data") == data]


def best_on_the_way(recipe: Recipe, run: RunRecord) -> float:
    """The best quality that the run had at any evaluation or at its end."""
    seen = [float(entry[recipe.metric]) for entry in run.metrics if recipe.metric in entry]
    return (max if recipe.higher_is_better else min)([*seen, run.quality])


def passed(recipe: Recipe, runs: Sequence[RunRecord]) -> float | None:
    """The mean over runs of their best evaluation, if the final quality is worse than it by more than the margin."""
    if recipe.metric not in MARGIN or not all(any(recipe.metric in one for one in run.metrics) for run in runs):
        return None
    best = statistics.mean(best_on_the_way(recipe, run) for run in runs)
    sign = 1.0 if recipe.higher_is_better else -1.0
    lost = sign * (best - statistics.mean(run.quality for run in runs))
    return best if lost > MARGIN[recipe.metric] else None


def loss_gap(runs: Sequence[RunRecord], solo: Sequence[RunRecord]) -> float | None:
    """Training loss of the last epoch minus solo's; None unless both trained the same number of samples."""
    ends = [[run.metrics[-1] for run in group if run.metrics] for group in (runs, solo)]
    ends = [[end for end in group if end.get("train_loss") is not None] for group in ends]
    if not all(ends) or {end["samples"] for end in ends[0]} != {end["samples"] for end in ends[1]}:
        return None
    mine, theirs = (statistics.mean(float(end["train_loss"]) for end in group) for group in ends)
    return float(mine - theirs)
