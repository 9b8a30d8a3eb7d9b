"""The report of a folder of runs: per model and mode, quality over seeds, speed, efficiency, and how time was spent.

Called by cli/bench_results.py. Computes plain data from finished runs; sections.py turns it into text, page.py into a
page. A figure that was not measured is None. Quality is the mean over seeds, speed the median over undisturbed seeds;
if all seeds were disturbed, the speed is marked and no mode is called the best ([Note: disturbed figures] in
undisturbed.py). Ranks that share a GPU without slices take turns on it, so their runs count for quality only.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.interval import interval
from uneven.bench.models.recipe import Recipe
from uneven.bench.report.mode_times import mode_times
from uneven.bench.report.quality import MARGIN, at_time, longer_than, loss_gap, passed, reached, target_of
from uneven.bench.single.folders import (
    EFFICIENCY,
    SWEEP,
    BrokenRun,
    RunRecord,
    for_speed,
    nothing_found,
    read_equal_time,
    read_runs,
    single_device,
    sweep_of,
)
from uneven.bench.single.modes import JOINT, OWN_LOOP
from uneven.bench.single.run_times import is_number
from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.files import folder_error, read_json, write_atomically
from uneven.hardware.yardstick import ddp_bound, gap
from uneven.timeline.verdict import MEASURED, Verdict, verdict

VERSION = 1
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
    anchor: float | None = None  # of the last window, mean over seeds
    gpus: dict[str, list[float]] = field(default_factory=dict)  # by NVML, mean over seeds: percent, seconds below 5 %
    calibration: list[dict[str, Any]] = field(default_factory=list)  # of the first seed, per epoch
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
    hardware: list[dict[str, Any]]
    models: list[ModelReport]
    failed: list[dict[str, str]]  # folder, reason
    skipped: dict[str, str]  # mode -> why the hardware did not allow it
    commands: list[str]  # the sweeps that made the runs
    rule: str = RULE

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build_report(root: Path) -> Report:
    """The report of a folder; InputError if it holds no finished run."""
    records, broken = read_runs(root)
    if not records:
        reasons = "".join(f"\n  {run.folder}: {run.reason}" for run in broken)
        raise InputError(f"{nothing_found(root)}{reasons}")
    names = [name for name in models.NAMES if any(record.model == name for record in records)]
    longer = read_equal_time(root)
    unknown = [BrokenRun(r.folder, f"unknown model {r.model!r}") for r in records if r.model not in models.NAMES]
    return Report(
        VERSION,
        str(root),
        _hardware(records),
        [_model(name, [record for record in records if record.model == name], longer) for name in names],
        [{"folder": str(run.folder), "reason": run.reason} for run in (*broken, *unknown)],
        *_read_sweeps(root),
    )


def _read_sweeps(root: Path) -> tuple[dict[str, str], list[str]]:
    """The modes that sweeps into this folder skipped, and the commands that make the report again."""
    sweeps = read_json(sweep_of(root) / SWEEP)
    if not isinstance(sweeps, dict):
        return {}, []
    skipped, commands = sweeps.get("skipped"), sweeps.get("commands")
    known = [str(line) for line in commands] if isinstance(commands, list) else []
    return dict(skipped) if isinstance(skipped, dict) else {}, [*known, f"uneven bench report {root}"]


def write_report(path: Path, text: str) -> None:
    """MachineError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise folder_error(path.parent, error) from error


def _hardware(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    machines = {json.dumps(record.summary.get("machine") or {}, sort_keys=True) for record in records}
    return [json.loads(machine) for machine in sorted(machines)]


def _model(name: str, records: list[RunRecord], longer: Sequence[RunRecord]) -> ModelReport:
    """`longer` are the runs of all models at equal time."""
    recipe = models.get(name)
    by_mode: dict[str, list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        by_mode.setdefault(record.mode, []).append(record)
    alone = _solo_speeds(by_mode)
    is_solo_disturbed = any(
        all(run.is_disturbed for run in runs) for mode, runs in by_mode.items() if mode.startswith("solo-")
    )
    single = single_device(by_mode)
    solo = by_mode[single] if single is not None else []
    target = target_of(recipe, solo)
    rows = [
        _row(
            recipe,
            mode,
            runs,
            alone,
            solo,
            target,
            is_solo_disturbed,
            [run for run in longer if (run.model, run.mode) == (name, mode)],
        )
        for mode, runs in sorted(by_mode.items(), key=_order)
    ]
    first, best = records[0].summary, _best(recipe, rows, single)
    return ModelReport(
        model=name,
        title=recipe.title,
        metric=recipe.metric,
        higher_is_better=recipe.higher_is_better,
        published=recipe.published.value if recipe.published else None,
        source=recipe.published.source if recipe.published else None,
        recipe_epochs=recipe.epochs,
        settings={key: first.get(key) for key in ("data", "epochs", "devices", "precision", "compile", "eval_samples")},
        gap=gap(alone) if alone and not is_solo_disturbed else None,
        sync_bound=ddp_bound(alone) if alone and not is_solo_disturbed else None,
        target=target,
        rows=rows,
        best=best,
        is_solo_disturbed=is_solo_disturbed,
        verdict=_verdict(recipe, rows, by_mode, alone, best, is_solo_disturbed),
    )


def _verdict(
    recipe: Recipe,
    rows: list[ModeReport],
    by_mode: dict[str, list[RunRecord]],
    alone: list[float],
    best: str | None,
    is_solo_disturbed: bool,
) -> Verdict | None:
    """Of the best mode, or of the fastest one on several devices where the best is a device alone or not known."""
    joint = [row for row in rows if row.mode in (*OWN_LOOP, *JOINT) and row.samples_per_s]
    title = recipe.title[:1].upper() + recipe.title[1:]
    if not joint:
        return None
    timed = [row for row in joint if not row.is_disturbed]
    if not timed or is_solo_disturbed:
        return Verdict(f"{title}: no verdict, since other programs disturbed the runs that it needs.")
    row = next((row for row in timed if row.mode == best), max(timed, key=lambda row: row.samples_per_s or 0.0))
    assert row.samples_per_s is not None, "chosen by it"
    # Speeds that were measured in turn are nearer the truth than those of whole runs, between which a machine drifts.
    paired = None if row.is_efficiency_disturbed else _pair_speeds(by_mode[row.mode])
    owned, speed = paired if paired is not None and alone else (alone, row.samples_per_s)
    lost = {cause: loss * sum(owned) / sum(alone) for cause, loss in row.lost.items()} if alone else {}
    return verdict(owned, speed, lost, MEASURED, f"{title} by {row.mode}")


def _pair_speeds(runs: Sequence[RunRecord]) -> tuple[list[float], float] | None:
    """Samples/s of each device alone and of all together, from the pairs of a mode; None if they do not tell."""
    paired = read_efficiency(runs) or {}
    alone, joint = paired.get("solo_samples_per_s"), paired.get("joint_samples_per_s")
    if not isinstance(alone, list) or len(alone) != len(runs[0].summary["devices"]):
        return None
    speeds = [float(speed) for speed in (*alone, joint) if is_number(speed) and speed > 0.0]
    return (speeds[:-1], speeds[-1]) if len(speeds) == len(alone) + 1 else None


def _order(entry: tuple[str, Any]) -> tuple[int, str]:
    """Sort key: each device alone, then PyTorch's DDP, then our modes in their order."""
    mode = entry[0]
    if mode.startswith("solo-"):
        return 0, mode
    ours = [*OWN_LOOP, *JOINT]
    return (1 if mode == "torch-ddp" else 2 + ours.index(mode) if mode in ours else 99), mode


def _solo_speeds(by_mode: dict[str, list[RunRecord]]) -> list[float]:
    """Samples/s of every device alone, in order; empty if there are fewer than two or one is missing."""
    speeds: list[float] = []
    while f"solo-{len(speeds)}" in by_mode:
        runs = by_mode[f"solo-{len(speeds)}"]
        speeds.append(statistics.median(run.summary["samples_per_s"] for run in for_speed(runs)))
    num_devices = max((len(run.summary["devices"]) for runs in by_mode.values() for run in runs), default=1)
    return speeds if len(speeds) >= max(2, num_devices) else []


def _row(
    recipe: Recipe,
    mode: str,
    runs: list[RunRecord],
    alone: list[float],
    solo: list[RunRecord],
    target: float | None,
    is_solo_disturbed: bool,
    longer: list[RunRecord],
) -> ModeReport:
    is_for_speed = runs[0].is_for_speed
    has_speed = not runs[0].takes_turns
    mean, half = interval([run.quality for run in runs])
    timed = for_speed(runs)
    is_marked = all(run.is_disturbed for run in runs)
    speed = statistics.median(run.summary["samples_per_s"] for run in timed) if has_speed else None
    seconds = statistics.median(run.summary["train_seconds"] for run in timed)
    when_reached = [when for run in timed if (when := reached(recipe, run, target)) is not None]
    longer = longer_than(longer, runs)
    judged = longer or runs
    equal_time, is_end = (None, False) if is_for_speed or not has_speed else at_time(recipe, judged, solo)
    paired = read_efficiency(runs)
    estimate = speed / sum(alone) if speed and alone and len(runs[0].summary["devices"]) > 1 else None
    published = recipe.published.value if recipe.published else None
    known = [run.summary["samples_per_s"] for run in for_speed(solo)]  # where not every device was run alone
    fastest = max(alone) if alone else statistics.median(known) if known else None
    return ModeReport(
        mode=mode,
        seeds=len(runs),
        batch=_batch(runs[0].summary),
        is_for_speed=is_for_speed,
        has_speed=has_speed,
        is_disturbed=is_marked,
        is_efficiency_disturbed=is_disturbed(paired) if paired else is_marked or is_solo_disturbed,
        quality=None if is_for_speed else mean,
        quality_half=None if is_for_speed or len(runs) < 2 else half,
        vs_published=None if is_for_speed or published is None else mean - published,
        train_s=None if is_for_speed or not has_speed else seconds,
        samples_per_s=speed,
        speedup=speed / fastest if speed and fastest else None,
        efficiency=(paired["efficiency"] if paired else estimate) if has_speed else None,
        efficiency_half=paired["half_width"] if paired and has_speed else None,
        efficiency_pairs=paired["pairs"] if paired and has_speed else None,
        efficiency_batch=paired.get("batch_size") if paired and has_speed else None,
        **mode_times(timed, alone),
        sample_shares=_sample_shares(timed),
        peak_memory_bytes=max((run.summary.get("peak_memory_bytes") or 0 for run in runs), default=0) or None,
        target_s=statistics.median(when_reached) if when_reached and has_speed and not is_for_speed else None,
        target_seeds=len(when_reached),
        target_of_seeds=len(timed),
        target_is_bound=any(reached(recipe, run, target, evaluations=1) is not None for run in timed),
        equal_time=equal_time,
        equal_time_is_end=is_end,
        equal_time_epochs=int(statistics.median(run.summary["epochs"] for run in longer)) if longer else None,
        is_equal_time_disturbed=any(run.is_disturbed for run in (*for_speed(judged), *for_speed(solo))),
        passed=None if is_for_speed else passed(recipe, runs),
        loss_gap=None if is_for_speed else loss_gap(runs, solo),
        trajectories=[] if is_for_speed else [run.metrics for run in runs],
        folders=[str(run.folder) for run in runs],
        runs=[_facts(run, is_for_speed) for run in (*runs, *longer)],
    )


def _facts(run: RunRecord, is_for_speed: bool) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "epochs": run.summary.get("epochs"),
        "quality": None if is_for_speed else run.quality,
        "train_s": run.summary["train_seconds"],
        "is_disturbed": run.is_disturbed,
        "interference": run.summary.get("interference"),
        "runs_at_once": run.summary.get("runs_at_once") or 1,
    }


def _batch(summary: dict[str, Any]) -> str:
    scale = summary.get("lr_scale")
    lr = f", lr x {scale:g}" if isinstance(scale, int | float) and scale != 1 else ""
    if summary.get("global_batch_size"):
        return f"{summary['global_batch_size']} in all{lr}"
    num_devices = len(summary["devices"])
    per_device = str(summary.get("batch_size", ""))
    return (f"{num_devices} x {per_device}" if num_devices > 1 and per_device else per_device) + lr


def _sample_shares(runs: Sequence[RunRecord]) -> list[float]:
    shares = [run.summary.get("sample_shares") or [] for run in runs]
    return [statistics.mean(column) for column in zip(*shares, strict=False)] if len(shares[0]) > 1 else []


def read_efficiency(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The paired measurement beside the runs of a mode; None if there is none that can be read."""
    paired = read_json(runs[0].folder.parent / EFFICIENCY)
    if not isinstance(paired, dict):
        return None
    figures = [paired.get(name) for name in ("efficiency", "half_width", "pairs")]
    return paired if all(map(is_number, figures)) else None


def _best(recipe: Recipe, rows: list[ModeReport], single: str | None) -> str | None:
    solo = next((row for row in rows if row.mode == single), None)
    if solo is None or solo.quality is None:
        return None
    sign = 1.0 if recipe.higher_is_better else -1.0
    margin = MARGIN.get(recipe.metric, 0.0)
    good = [
        row
        for row in rows
        if row.quality is not None and row.samples_per_s and sign * (row.quality - solo.quality) >= -margin
    ]
    if any(row.is_disturbed for row in good):  # any of them may be the fastest
        return None
    return max(good, key=lambda row: row.samples_per_s or 0.0).mode if good else None
