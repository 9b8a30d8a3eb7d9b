"""The report of a folder of runs: per model and mode, quality over seeds, speed, efficiency, and how time was spent.

Called by cli/bench_results.py. Computes plain data from finished runs; sections.py turns it into text, page.py into a
page. A figure that was not measured is None. Quality is the mean over seeds, speed the median over undisturbed seeds;
if all seeds were disturbed, the speed is marked and no mode is called the best ([Note: disturbed figures] in
undisturbed.py). Ranks that share a GPU without slices take turns on it, so their runs count for quality only.
"""

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench.interval import interval
from uneven.bench.modes import JOINT, OWN_LOOP
from uneven.bench.report.model_runs import (
    MARGIN,
    ModelRuns,
    at_time,
    by_model,
    loss_gap,
    mean_quality,
    passed_by,
    reached,
    unknown_models,
)
from uneven.bench.single.folders import (
    SWEEP,
    MachineFacts,
    RunRecord,
    Summary,
    for_speed,
    median_of,
    nothing_found,
    read_efficiency,
    read_equal_time,
    read_runs,
)
from uneven.errors import InputError
from uneven.files import read_json
from uneven.hardware.yardstick import Yardstick
from uneven.timeline.verdict import MEASURED, Verdict, lost_by_state, verdict

VERSION = 1
SETTINGS = ("data", "epochs", "devices", "precision", "compile", "eval_samples")
RULE = "the fastest mode whose mean quality is no worse than solo's by more than the margin"


@dataclass(frozen=True)
class ModeReport:
    """One mode of a model, over its seeds."""

    mode: str
    seeds: int
    batch: str  # samples a step, as in "64", "2 x 64" or "64 in all", and what the learning rates are multiplied by
    is_for_speed: bool  # a simulated device alone, run for its speed; its quality would repeat another run's
    has_speed: bool  # False for ranks that take turns on one GPU
    is_disturbed: bool  # every run was, so the speed is marked
    is_efficiency_disturbed: bool
    quality: float | None
    quality_half: float | None  # 95 % interval; None with one seed
    vs_published: float | None
    train_s: float | None  # this and all other figures of speed: median over undisturbed seeds
    samples_per_s: float | None
    speedup: float | None  # over the fastest device alone
    efficiency: float | None
    efficiency_half: float | None  # None: efficiency is an estimate from separate runs
    efficiency_pairs: int | None
    efficiency_batch: int | None  # samples per device and step that the pairs were measured with
    rounds: int | None
    transfer_ms: float | None  # mean of a round
    wait_ms: float | None
    utilisation: dict[str, float] = field(default_factory=dict)  # device -> share of the time in which it computes
    idle_s: dict[str, float] = field(default_factory=dict)  # cause -> seconds, all devices, mean over seeds
    lost: dict[str, float] = field(default_factory=dict)  # state -> samples/s by the speeds alone, mean over seeds
    sample_shares: list[float] = field(default_factory=list)  # per device, mean over seeds; they follow the speeds
    peak_memory_bytes: int | None = None
    target_s: float | None = None  # seconds of training to the target, median of the seeds that reached it
    target_seeds: int = 0  # that reached it, of ...
    target_of_seeds: int = 0  # the undisturbed ones, or of all
    target_is_bound: bool = False  # a run's first evaluation reached it already, so target_s is an upper bound
    equal_time: float | None = None  # quality when the best single device had finished, mean over seeds
    equal_time_is_end: bool = False  # all of them had ended before
    equal_time_epochs: int | None = None  # of runs that were made for it, median over seeds; None without such runs
    is_equal_time_disturbed: bool = False  # the runs that it is of, or those of the single device
    passed: float | None = None  # the best quality during training, mean over seeds, if the end is worse by the margin
    loss_gap: float | None = None  # training loss minus solo's after equal samples
    trajectories: list[list[dict[str, Any]]] = field(default_factory=list)  # per seed, per epoch
    folders: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)  # each seed's quality, seconds and interference

    @property
    def timed(self) -> list[int]:
        """The places in `trajectories` of the undisturbed runs, whose seconds count; all if there is none."""
        places = range(len(self.trajectories))
        return [place for place in places if not self.runs[place]["is_disturbed"]] or list(places)


@dataclass(frozen=True)
class ModelReport:
    model: str
    title: str
    metric: str
    higher_is_better: bool
    published: float | None
    source: str | None
    recipe_epochs: int  # for which the published figure holds
    settings: dict[str, Any]  # data, epochs and devices of its runs
    gap: float | None
    sync_bound: float | None  # the highest efficiency that equal batches allow
    target: float | None
    rows: list[ModeReport]
    best: str | None
    is_solo_disturbed: bool = False  # the speed of some device alone; gap and bound are then None
    verdict: Verdict | None = None  # of the best joint mode; None without joint runs


@dataclass(frozen=True)
class Report:
    version: int
    root: str
    hardware: list[MachineFacts]
    models: list[ModelReport]
    failed: list[dict[str, str]]  # folder, reason
    skipped: dict[str, str]  # mode -> why the hardware did not allow it
    commands: list[str]  # the sweeps that made the runs
    rule: str = RULE


def build_report(root: Path) -> Report:
    """The report of a folder; InputError if it holds no finished run."""
    records, broken = read_runs(root)
    if not records:
        reasons = "".join(f"\n  {run.folder}: {run.reason}" for run in broken)
        raise InputError(f"{nothing_found(root)}{reasons}")
    failed = [{"folder": str(run.folder), "reason": run.reason} for run in broken]
    failed += [{"folder": str(run.folder), "reason": f"unknown model {run.model!r}"} for run in unknown_models(records)]
    machines = {record.summary.machine for record in records}
    record = read_json(root / SWEEP)
    sweep = record if isinstance(record, dict) else {}
    skipped, commands = sweep.get("skipped"), sweep.get("commands")
    typed = [str(line) for line in commands] if isinstance(commands, list) else []
    return Report(
        version=VERSION,
        root=str(root),
        hardware=sorted(machines, key=astuple),
        models=[_model(runs) for runs in by_model(records, read_equal_time(root))],
        failed=failed,
        skipped=dict(skipped) if isinstance(skipped, dict) else {},
        commands=[*typed, f"uneven bench report {root}"] if isinstance(record, dict) else [],
    )


def _model(runs: ModelRuns) -> ModelReport:
    recipe, alone = runs.recipe, [] if runs.is_solo_disturbed else runs.alone
    rows = [_row(runs, mode) for mode in sorted(runs.by_mode, key=_order)]
    first, best = next(iter(runs.by_mode.values()))[0].summary, _best(runs, rows)
    return ModelReport(
        model=recipe.name,
        title=recipe.title,
        metric=recipe.metric,
        higher_is_better=recipe.higher_is_better,
        published=recipe.published.value if recipe.published else None,
        source=recipe.published.source if recipe.published else None,
        recipe_epochs=recipe.epochs,
        settings={key: getattr(first, key) for key in SETTINGS},
        gap=Yardstick.of(alone).gap if alone else None,
        sync_bound=Yardstick.of(alone).ddp_bound if alone else None,
        target=runs.target,
        rows=rows,
        best=best,
        is_solo_disturbed=runs.is_solo_disturbed,
        verdict=_verdict(runs, rows, best),
    )


def _order(mode: str) -> tuple[int, str]:
    """Sort key: each device alone, then PyTorch's DDP, then our modes in their order."""
    if mode.startswith("solo-"):
        return 0, mode
    ours = [*OWN_LOOP, *JOINT]
    return (1 if mode == "torch-ddp" else 2 + ours.index(mode) if mode in ours else 99), mode


def _verdict(runs: ModelRuns, rows: list[ModeReport], best: str | None) -> Verdict | None:
    """Of the best mode, or of the fastest one on several devices where the best is a device alone or not known."""
    joint = [row for row in rows if row.mode in (*OWN_LOOP, *JOINT) and row.samples_per_s]
    title = runs.recipe.title[:1].upper() + runs.recipe.title[1:]
    if not joint:
        return None
    timed = [row for row in joint if not row.is_disturbed]
    if not timed or runs.is_solo_disturbed:
        return Verdict(f"{title}: no verdict, since other programs disturbed the runs that it needs.")
    row = next((row for row in timed if row.mode == best), max(timed, key=lambda row: row.samples_per_s or 0.0))
    assert row.samples_per_s is not None, "chosen by it"
    alone = runs.alone
    # Speeds that were measured in turn are nearer the truth than those of whole runs, between which a machine drifts.
    paired = None if row.is_efficiency_disturbed else _pair_speeds(runs.by_mode[row.mode])
    owned, speed = paired if paired is not None and alone else (alone, row.samples_per_s)
    lost = {cause: loss * sum(owned) / sum(alone) for cause, loss in row.lost.items()} if alone else {}
    return verdict(owned, speed, lost, MEASURED, f"{title} by {row.mode}")


def _pair_speeds(runs: Sequence[RunRecord]) -> tuple[list[float], float] | None:
    """Samples/s of each device alone and of all together, from the pairs of a mode; None if they do not tell."""
    paired = read_efficiency(runs)
    if paired is None or len(paired.solo_samples_per_s) != len(runs[0].summary.devices):
        return None
    alone, joint = paired.solo_samples_per_s, paired.joint_samples_per_s
    return (alone, joint) if min(*alone, joint) > 0.0 else None


def _row(model: ModelRuns, mode: str) -> ModeReport:
    recipe, runs = model.recipe, model.by_mode[mode]
    alone, solo = model.alone, model.solo
    first, timed = runs[0].summary, for_speed(runs)
    longer = model.longer(mode)
    has_quality, has_speed = not runs[0].is_for_speed, not runs[0].takes_turns
    is_timed = has_quality and has_speed
    mean, half = interval([run.quality for run in runs])
    is_marked = all(run.is_disturbed for run in runs)
    speed = median_of("samples_per_s", timed) if has_speed else None
    when_reached = [when for run in timed if (when := reached(recipe, run, model.target)) is not None]
    judged = longer or runs
    equal_time, is_end = at_time(recipe, judged, solo) if is_timed else (None, False)
    pairs = read_efficiency(runs)
    paired = pairs if has_speed else None
    estimate = speed / sum(alone) if speed and alone and len(first.devices) > 1 else None
    # Where not every device was run alone, it is that of those that were.
    fastest = max(alone) if alone else median_of("samples_per_s", for_speed(solo)) if solo else None
    return ModeReport(
        mode=mode,
        seeds=len(runs),
        batch=_batch(first),
        is_for_speed=not has_quality,
        has_speed=has_speed,
        is_disturbed=is_marked,
        is_efficiency_disturbed=pairs.is_disturbed if pairs else is_marked or model.is_solo_disturbed,
        quality=mean if has_quality else None,
        quality_half=half if has_quality and len(runs) > 1 else None,
        vs_published=mean - recipe.published.value if has_quality and recipe.published else None,
        train_s=median_of("train_seconds", timed) if is_timed else None,
        samples_per_s=speed,
        speedup=speed / fastest if speed and fastest else None,
        efficiency=paired.efficiency if paired else estimate,
        efficiency_half=paired.half_width if paired else None,
        efficiency_pairs=paired.pairs if paired else None,
        efficiency_batch=paired.batch_size if paired else None,
        **_times(timed, alone),
        sample_shares=_sample_shares(timed),
        peak_memory_bytes=max((run.summary.peak_memory_bytes or 0 for run in runs), default=0) or None,
        target_s=statistics.median(when_reached) if when_reached and is_timed else None,
        target_seeds=len(when_reached),
        target_of_seeds=len(timed),
        target_is_bound=any(reached(recipe, run, model.target, evaluations=1) is not None for run in timed),
        equal_time=equal_time,
        equal_time_is_end=is_end,
        equal_time_epochs=int(median_of("epochs", longer)) if longer else None,
        is_equal_time_disturbed=any(run.is_disturbed for run in (*for_speed(judged), *for_speed(solo))),
        passed=passed_by(recipe, runs) if has_quality else None,
        loss_gap=loss_gap(runs, solo) if has_quality else None,
        trajectories=[run.metrics for run in runs] if has_quality else [],
        folders=[str(run.folder) for run in runs],
        runs=[_facts(run, has_quality) for run in (*runs, *longer)],
    )


def _facts(run: RunRecord, has_quality: bool) -> dict[str, Any]:
    return {
        "seed": run.summary.seed,
        "epochs": run.summary.epochs,
        "quality": run.quality if has_quality else None,
        "train_s": run.summary.train_seconds,
        "is_disturbed": run.is_disturbed,
        "interference": run.summary.interference,
        "runs_at_once": run.summary.runs_at_once,
    }


def _batch(summary: Summary) -> str:
    scale = summary.lr_scale
    lr = f", lr x {scale:g}" if isinstance(scale, int | float) and scale != 1 else ""
    if summary.global_batch_size:
        return f"{summary.global_batch_size} in all{lr}"
    devices = len(summary.devices)
    return f"{f'{devices} x ' if devices > 1 else ''}{summary.batch_size}{lr}"


def _sample_shares(runs: Sequence[RunRecord]) -> list[float]:
    shares = [run.summary.sample_shares for run in runs]
    return [statistics.mean(column) for column in zip(*shares, strict=False)] if len(shares[0]) > 1 else []


def _times(runs: Sequence[RunRecord], alone: Sequence[float]) -> dict[str, Any]:
    """How the runs of a mode spent their time: fields of a ModeReport, from what each tells of itself."""
    found = [times for run in runs if (times := run.times()) is not None]
    rounds = sum(times.rounds for times in found)

    def of_a_round(name: str) -> float | None:
        return sum((getattr(times, name) or 0.0) * times.rounds for times in found) / rounds if rounds else None

    causes = dict.fromkeys(cause for times in found for cause in times.idle_s)
    return {
        "rounds": round(rounds / len(found)) if rounds else None,
        "transfer_ms": of_a_round("communication_ms"),
        "wait_ms": of_a_round("wait_ms"),
        "utilisation": _means([times.utilisation for times in found]),
        "idle_s": {cause: sum(times.idle_s.get(cause, 0.0) for times in found) / len(found) for cause in causes},
        "lost": _means([lost_by_state(times.accounts, alone) for times in found if len(times.seconds) == len(alone)]),
    }


def _means(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """By name, over those that have it."""
    names = dict.fromkeys(name for one in each for name in one)
    return {name: statistics.mean(one[name] for one in each if name in one) for name in names}


def _best(runs: ModelRuns, rows: list[ModeReport]) -> str | None:
    recipe, solo = runs.recipe, runs.solo
    if not solo or solo[0].is_for_speed:
        return None
    sign = 1.0 if recipe.higher_is_better else -1.0
    lowest = sign * mean_quality(solo)
    good = [
        row
        for row in rows
        if row.quality is not None and row.samples_per_s and sign * row.quality - lowest >= -MARGIN[recipe.metric]
    ]
    if any(row.is_disturbed for row in good):  # any of them may be the fastest
        return None
    return max(good, key=lambda row: row.samples_per_s or 0.0).mode if good else None
