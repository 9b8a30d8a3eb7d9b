"""The runs of one model, by mode, and their quality: at the end, on the way to a target, and at equal time.

Used by build.py and check.py. Quality is the mean over seeds; speed is the median over undisturbed seeds ([Note:
disturbed figures] in undisturbed.py).
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from uneven.bench import models
from uneven.bench.models.recipe import Recipe
from uneven.bench.single.folders import RunRecord, for_speed, median_of, single_device

MARGIN = {"accuracy": 0.004, "loss": 0.05, "mse": 0.0001}  # a mode that is worse than solo by less is equally good
MOST_CHANCE = 2.0  # margins: two seeds that differ by chance would allow any quality
NEAR = 0.99  # the target is this fraction of solo's accuracy (or its loss divided by it), which solo itself reaches


@dataclass(frozen=True)
class ModelRuns:
    """The finished runs of a model, by mode in order of seeds, and those that were made for equal time."""

    recipe: Recipe
    by_mode: dict[str, list[RunRecord]] = field(default_factory=dict)
    made_for_equal_time: list[RunRecord] = field(default_factory=list)

    @cached_property
    def single(self) -> str | None:
        """The mode of the best single device."""
        return single_device(self.by_mode)

    @property
    def solo(self) -> Sequence[RunRecord]:
        return self.by_mode[self.single] if self.single is not None else []

    @cached_property
    def alone(self) -> list[float]:
        """Samples/s of every device alone, in order; empty if there are fewer than two or one is missing."""
        speeds: list[float] = []
        while f"solo-{len(speeds)}" in self.by_mode:
            speeds.append(median_of("samples_per_s", for_speed(self.by_mode[f"solo-{len(speeds)}"])))
        devices = max(len(run.summary.devices) for runs in self.by_mode.values() for run in runs)
        return speeds if len(speeds) >= max(2, devices) else []

    @cached_property
    def is_solo_disturbed(self) -> bool:
        """The speed of some device alone is not known."""
        return any(
            mode.startswith("solo-") and all(run.is_disturbed for run in runs) for mode, runs in self.by_mode.items()
        )

    @cached_property
    def target(self) -> float | None:
        """The quality for time-to-target: slightly worse than solo's final quality, so that solo reaches it too."""
        if not self.solo:
            return None
        mean = mean_quality(self.solo)
        return mean * NEAR if self.recipe.higher_is_better else mean / NEAR

    def longer(self, mode: str) -> list[RunRecord]:
        """The runs at equal time of a mode: with more epochs than its others, over the same data."""
        runs = self.by_mode[mode]
        most, data = max(run.summary.epochs for run in runs), runs[0].summary.data
        made = [run for run in self.made_for_equal_time if run.mode == mode]
        return [run for run in made if run.summary.epochs > most and run.summary.data == data]


def by_model(records: Sequence[RunRecord], made_for_equal_time: Sequence[RunRecord] = ()) -> Iterator[ModelRuns]:
    """Those of every known model that has some, in the order of the models."""
    for name in models.NAMES:
        found = ModelRuns(models.get(name), {}, [run for run in made_for_equal_time if run.model == name])
        for run in (run for run in records if run.model == name):
            found.by_mode.setdefault(run.mode, []).append(run)
        for runs in found.by_mode.values():
            runs.sort(key=lambda run: run.summary.seed)
        if found.by_mode:
            yield found


def unknown_models(records: Sequence[RunRecord]) -> list[RunRecord]:
    return [run for run in records if run.model not in models.NAMES]


def mean_quality(runs: Sequence[RunRecord]) -> float:
    return statistics.mean(run.quality for run in runs)


def slack_of(recipe: Recipe, *halves: float) -> float:
    """By how much a mean may be worse than another: the margin, and chance as far as it is known, within limits."""
    margin = MARGIN[recipe.metric]
    chance = math.hypot(*(0.0 if half == math.inf else half for half in halves))
    return margin + min(chance, MOST_CHANCE * margin)


def is_worse(recipe: Recipe, value: float, than: float, slack: float = 0.0) -> bool:
    return (value < than - slack) if recipe.higher_is_better else (value > than + slack)


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
    seconds = median_of("train_seconds", for_speed(solo))
    timed = for_speed(runs)
    if all(run.summary.train_seconds <= seconds for run in timed):
        return mean_quality(runs), True
    found = []
    for run in timed:
        before = [one for one in run.metrics if recipe.metric in one and one["train_seconds"] <= seconds]
        if run.summary.train_seconds <= seconds:
            found.append(run.quality)
        elif before:
            found.append(float(before[-1][recipe.metric]))
        else:
            return None, False
    return statistics.mean(found), False


def best_on_the_way(recipe: Recipe, runs: Sequence[RunRecord]) -> float:
    """The best quality that a run had at any evaluation or at its end, mean over the runs."""
    best = max if recipe.higher_is_better else min
    return statistics.mean(
        best([*(float(one[recipe.metric]) for one in run.metrics if recipe.metric in one), run.quality]) for run in runs
    )


def passed_by(recipe: Recipe, runs: Sequence[RunRecord]) -> float | None:
    """The mean over runs of their best evaluation, if the final quality is worse than it by more than the margin."""
    if not all(any(recipe.metric in one for one in run.metrics) for run in runs):
        return None
    best = best_on_the_way(recipe, runs)
    return best if is_worse(recipe, mean_quality(runs), best, MARGIN[recipe.metric]) else None


def loss_gap(runs: Sequence[RunRecord], solo: Sequence[RunRecord]) -> float | None:
    """Training loss of the last epoch minus solo's; None unless both trained the same number of samples."""
    ends = [[run.metrics[-1] for run in group if run.metrics] for group in (runs, solo)]
    ends = [[end for end in group if end.get("train_loss") is not None] for group in ends]
    if not all(ends) or {end["samples"] for end in ends[0]} != {end["samples"] for end in ends[1]}:
        return None
    mine, theirs = (statistics.mean(float(end["train_loss"]) for end in group) for group in ends)
    return float(mine - theirs)
