"""Reads runs, ROOT/MODEL/MODE/seed-S: finished ones as RunRecords, all others as BrokenRuns with a reason.

A run is a folder, or one published file `seed-S.json`, as in docs/results: everything that a report needs and no
weights. Where both are there, the folder counts if a run has ended in it, finished or failed. Runs
at equal time, which bench/sweep/plan.py plans, are below ROOT/equal-time, apart from the others. Used by the report, by
the check and by sweeps. Invariant: what is in them never raises, so that a report can be made of an interrupted or
damaged set of runs.
"""

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench.single.shape import Shape, fits, is_figure, is_number, is_object, is_text, is_whole, optional
from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.files import folder_error, read_json, write_atomically
from uneven.hardware.device import is_lesser_copy, parse_device, parse_devices, takes_turns
from uneven.timeline.idle import OFF_THE_CLOCK, idle_by_cause, mean_sampled, mean_utilisation, sampled_idle
from uneven.timeline.record import Account, Event
from uneven.timeline.timeline import Timeline, rank_rounds

SUMMARY_VERSION = 1
PACKED_VERSION = 1
SWEEP = "sweep.json"  # in the folder of a sweep: its commands, and the modes it left out
EQUAL_TIME = "equal-time"  # in the folder of a sweep: runs with as many epochs as fit the single device's time
EFFICIENCY = "efficiency.json"  # in the folder of a mode: measured by pairs
FAILURE = "failure.json"  # written by a sweep into the folder of a run that failed
NEEDED = (
    *("model", "mode", "seed", "devices", "epochs"),
    *("metric", "quality", "train_seconds", "samples_per_s", "samples"),
)
SUMMARY: dict[str, Shape] = {  # beside the quality, whose name is the metric
    "metric": is_text,
    "train_seconds": is_number,
    "samples_per_s": is_number,
    "samples": is_number,
    "seed": is_whole,
    "epochs": is_whole,
    "devices": lambda names: isinstance(names, list) and len(names) > 0 and all(map(_is_device, names)),
    "asked": optional(is_object),
    "machine": optional(is_object),
    "interference": optional(
        dict.fromkeys(("stolen_share", "foreign_cores", "pressure_share"), optional(is_number)),
    ),
    "peak_memory_bytes": optional(is_number),
    "eval_samples": optional(is_number),
    "runs_at_once": optional(is_number),
    "sample_shares": optional([is_number]),
}
OUTSIDE = "outside training"


@dataclass(frozen=True)
class RunTimes:
    """How a run spent its time, and how its policy settled: what a report needs of a timeline, which has megabytes.

    Made of the timeline, or read from a published file; both give the same report. Rounds are those of rank 0, as all
    ranks pass the same ones.
    """

    seconds: list[dict[str, float]]  # per rank: state -> seconds
    utilisation: dict[str, float]  # "rank: device" -> share of the training time in which it computes
    idle_s: dict[str, float]  # cause -> seconds, all devices together
    rounds: int = 0
    communication_ms: float | None = None  # mean of a round
    wait_ms: float | None = None
    gpus: dict[str, list[float]] = field(default_factory=dict)  # by NVML: [mean percent, seconds below 5 percent]
    calibration: list[dict[str, Any]] = field(default_factory=list)  # per epoch: anchor, counts, shares, lr_scale

    @classmethod
    def of(cls, timeline: Timeline) -> "RunTimes":
        rounds = [one for one in rank_rounds(timeline.events) if one.rank == 0]
        idle: dict[str, float] = {}
        for causes in idle_by_cause(timeline).values():
            for cause, seconds in causes.items():
                name = OUTSIDE if cause in OFF_THE_CLOCK else cause
                idle[name] = idle.get(name, 0.0) + seconds
        return cls(
            seconds=[dict(account.seconds) for account in timeline.accounts],
            utilisation={f"{lane.rank}: {lane.device}": mean_utilisation(lane) for lane in timeline.lanes},
            idle_s=idle,
            rounds=len(rounds),
            communication_ms=sum(one.cost_ms for one in rounds) / len(rounds) if rounds else None,
            wait_ms=sum(one.wait_ms for one in rounds) / len(rounds) if rounds else None,
            gpus=_gpus(timeline),
            calibration=calibration_of(timeline.events),
        )

    @property
    def accounts(self) -> list[Account]:
        return [Account(rank, seconds) for rank, seconds in enumerate(self.seconds)]

    @property
    def anchor(self) -> float | None:
        """Of the last window, in a local policy."""
        known = [entry["anchor"] for entry in self.calibration if "anchor" in entry]
        return float(known[-1]) if known else None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RunTimes":
        """Of a published file, whose checksum `uneven bench check` compares; TypeError where a field is not known."""
        return cls(**{name: value for name, value in record.items() if name != "round_sample"})  # no report needs it


def calibration_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """What rank 0's policy had settled upon at the end of each epoch; without epochs, at the end."""
    known: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        if event.rank != 0:
            continue
        fields = event.fields
        if "anchor" in fields:
            known["anchor"] = round(float(fields["anchor"]), 2)
        if event.kind in ("share", "shares", "counts"):
            shares = fields["counts"] if event.kind == "counts" else fields["shares"]
            known["shares"] = [round(float(share), 4) for share in shares]
        if event.kind == "lr_scale":
            known["lr_scale"] = round(float(fields["scale"]), 4)
        if event.kind == "epoch":
            found.append({"epoch": fields["epoch"], **known})
    return found or ([{"epoch": None, **known}] if known else [])


def _gpus(timeline: Timeline) -> dict[str, list[float]]:
    """While any device trained; empty without NVML."""
    spans = [span for lane in timeline.lanes for span in lane.spans if span[0] == "compute"]
    if not spans:
        return {}
    between = min(start for _, start, _ in spans), max(end for _, _, end in spans)
    mean, idle = mean_sampled(timeline, between), sampled_idle(timeline, between)
    return {name: [round(mean[name], 2), round(idle.get(name, 0.0), 3)] for name in mean if name.startswith("gpu ")}


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its folder, or its packed file, with what is in summary.json and metrics.jsonl."""

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]  # one entry per epoch
    packed: dict[str, Any] | None = None  # the whole file of a packed run

    @property
    def model(self) -> str:
        return str(self.summary["model"])

    @property
    def mode(self) -> str:
        return str(self.summary["mode"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])

    @property
    def key(self) -> tuple[str, str, int]:
        return self.model, self.mode, self.seed

    @property
    def quality(self) -> float:
        return float(self.summary["quality"][self.summary["metric"]])

    @property
    def is_disturbed(self) -> bool:
        """Whether its speed is marked; its quality is valid all the same."""
        return is_disturbed(self.summary)

    @property
    def is_for_speed(self) -> bool:
        """A simulated slow device alone is run for its speed: its quality would repeat another run's."""
        if not self.mode.startswith("solo-"):
            return False
        device = parse_device(self.summary["devices"][0])
        asked = (self.summary.get("asked") or {}).get("devices")
        try:
            return is_lesser_copy(device, parse_devices(asked)) if asked else device.speed < 1.0
        except (InputError, AttributeError, TypeError):  # unlike the device, this record is not checked before
            return False

    @property
    def takes_turns(self) -> bool:
        """Its ranks compute one after the other on one GPU: such a run counts for quality only."""
        return takes_turns([parse_device(name) for name in self.summary["devices"]])

    def times(self) -> RunTimes | None:
        """How it spent its time; None where that is missing or cannot be read."""
        if self.packed is None:
            timeline = read_timeline(self.folder)
            return None if timeline is None else RunTimes.of(timeline)
        try:
            return RunTimes.from_json(self.packed["times"])
        except (KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True)
class BrokenRun:
    """A run folder without a finished run, and the reason."""

    folder: Path
    reason: str


def read_timeline(folder: Path) -> Timeline | None:
    """Of a run's folder; None if it is missing or cannot be read: speed and quality are known all the same."""
    try:
        return Timeline.from_json(read_json(folder / "timeline.json"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_file(path: Path, text: str) -> None:
    """Also its folder; MachineError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise folder_error(path.parent, error) from error


def for_speed(runs: Sequence[RunRecord]) -> Sequence[RunRecord]:
    """The undisturbed runs; all of them if every run was disturbed."""
    return [run for run in runs if not run.is_disturbed] or runs


def median_of(name: str, runs: Sequence[RunRecord]) -> float:
    """Of a figure in the runs' summaries."""
    return float(statistics.median(run.summary[name] for run in runs))


def single_device(by_mode: Mapping[str, Sequence[RunRecord]]) -> str | None:
    """The mode of the fastest device alone, of those whose quality counts; None without any."""
    alone = {
        mode: median_of("samples_per_s", for_speed(runs))
        for mode, runs in by_mode.items()
        if mode.startswith("solo-") and not any(run.is_for_speed for run in runs)
    }
    return max(alone, key=lambda mode: alone[mode]) if alone else None


def read_efficiency(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The paired measurement beside the runs of a mode; None if there is none that can be read."""
    paired = read_json(runs[0].folder.parent / EFFICIENCY)
    shape: Shape = dict.fromkeys(("efficiency", "half_width", "pairs"), is_number)
    return paired if fits(paired, shape) else None


def read_runs(root: Path) -> tuple[list[RunRecord], list[BrokenRun]]:
    """The runs of a sweep's folder; InputError if it does not exist.

    Those at equal time are left out, but for the broken ones. Sweeps in folders of their own below this one are other
    runs.
    """
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: make runs by 'uneven bench sweep --out {root}'")
    records, broken = _sorted_out(_read_below(root))
    broken = [*broken, *_sorted_out(_read_below(root / EQUAL_TIME))[1]]
    for path in sorted(root.glob(f"*/*/{FAILURE}")):  # of a measurement of efficiency, which has no run's folder
        failure = read_json(path)
        if not _is_run(path.parent) and isinstance(failure, dict):
            broken.append(BrokenRun(path.parent, f"efficiency: {failure.get('reason', 'failed')}"))
    return records, broken


def read_equal_time(root: Path) -> list[RunRecord]:
    """The finished runs at equal time of a sweep."""
    return _sorted_out(_read_below(root / EQUAL_TIME))[0]


def _sorted_out(runs: Sequence[RunRecord | BrokenRun]) -> tuple[list[RunRecord], list[BrokenRun]]:
    """Every seed of a mode once, and the others: a seed that counted twice would make the interval too narrow."""
    first: dict[tuple[str, str, int], RunRecord] = {}
    broken = [run for run in runs if isinstance(run, BrokenRun)]
    for run in runs:
        if isinstance(run, RunRecord) and (known := first.setdefault(run.key, run)) is not run:
            what = f"{run.model} {run.mode} seed {run.seed}"
            broken.append(BrokenRun(run.folder, f"holds {what}, as {known.folder} does: it was copied or moved"))
    return list(first.values()), broken


def sweeps_in(root: Path) -> list[Path]:
    """The folder itself if it has runs, else the folders of runs in it; the folder itself also without any.

    One without sweep.json counts, too: that of `uneven demo`, or a published one whose missing file `uneven bench
    check` reports.
    """
    if not root.is_dir() or _run_paths(root):
        return [root]

    def is_sweep(path: Path) -> bool:
        record = read_json(path / SWEEP)
        is_packed = isinstance(record, dict) and bool(record.get("files"))
        return is_packed or (path.name != EQUAL_TIME and len(_run_paths(path)) > 0)

    return [path for path in sorted(root.iterdir()) if path.is_dir() and is_sweep(path)] or [root]


def nothing_found(root: Path) -> InputError:
    """There is no finished run in the folder; says where there are some."""
    deeper = next((path for path in sorted(root.glob("*/*/*/seed-*")) if _is_run(path)), None)
    places = [*(deeper.parents[2:3] if deeper else ()), *root.absolute().parents[:3]]
    known = [f"there are some in {place}" for place in places if _run_paths(place)]
    return InputError(f"no finished run in {root}: {[*known, f'make some by uneven bench sweep --out {root}'][0]}")


def _read_below(root: Path) -> list[RunRecord | BrokenRun]:
    return [read_run(folder) for folder in sorted({folder_of(path) for path in _run_paths(root)})]


def _run_paths(root: Path) -> list[Path]:
    """The folders and packed files of runs, ROOT/MODEL/MODE/seed-S; those at equal time lie deeper."""
    return [path for path in root.glob("*/*/seed-*") if _is_run(path)]


def _is_run(path: Path) -> bool:
    # An older run that was moved aside is named seed-0.1 and does not count.
    name = r"seed-\d+\.json" if path.is_file() else r"seed-\d+"
    return path.exists() and re.fullmatch(name, path.name) is not None


def folder_of(path: Path) -> Path:
    """The folder of a run, whether it is there or packed in a file."""
    return path.with_suffix("") if path.is_file() else path


def read_run(folder: Path) -> RunRecord | BrokenRun:
    """The run in a folder or in its packed file, finished or not."""
    packed = folder.with_name(f"{folder.name}.json")
    has_ended = any((folder / name).is_file() for name in ("summary.json", FAILURE))
    return read_packed(packed) if packed.is_file() and not has_ended else _read_folder(folder)


def _read_folder(folder: Path) -> RunRecord | BrokenRun:
    failure, summary = read_json(folder / FAILURE), read_json(folder / "summary.json")
    if isinstance(failure, dict):  # a run that ends well takes it away: it is newer than a summary beside it
        return BrokenRun(folder, str(failure.get("reason", "failed")))
    if not (folder / "summary.json").is_file():
        return BrokenRun(folder, "not finished: there is no summary.json")
    if (fault := _fault(summary)) is not None:
        return BrokenRun(folder, f"summary.json {fault}")
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        return BrokenRun(folder, f"metrics.jsonl cannot be read ({error})")
    if (metrics := _epochs(lines, summary["metric"])) is None:
        return BrokenRun(folder, "metrics.jsonl cannot be read (a line is no entry of an epoch)")
    return RunRecord(folder, summary, metrics)


def read_packed(path: Path) -> RunRecord | BrokenRun:
    """The run in a packed file, whole or not."""
    packed = read_json(path)
    if not isinstance(packed, dict) or packed.get("version") != PACKED_VERSION:
        return BrokenRun(path, f"is no packed run of version {PACKED_VERSION}")
    if (fault := _fault(packed.get("summary"))) is not None:
        return BrokenRun(path, f"its summary {fault}")
    try:
        columns, rows = packed["metrics"]["columns"], packed["metrics"]["rows"]
        metrics = _epochs([dict(zip(columns, row, strict=True)) for row in rows], packed["summary"]["metric"])
    except (KeyError, TypeError, ValueError) as error:
        return BrokenRun(path, f"its metrics cannot be read ({error})")
    if metrics is None:
        return BrokenRun(path, "its metrics cannot be read (a row is no entry of an epoch)")
    run = RunRecord(path, packed["summary"], metrics, packed)
    if (run.model, run.mode, f"seed-{run.seed}.json") != path.absolute().parts[-3:]:
        return BrokenRun(path, f"holds {run.model} {run.mode} seed {run.seed}: it was changed, copied or moved")
    return run


def _fault(summary: Any) -> str | None:
    """Why nothing can be told of a run with this summary; None if it is whole."""
    if not isinstance(summary, dict):
        return "cannot be read"
    if summary.get("version") != SUMMARY_VERSION:
        return f"is of version {summary.get('version')!r}, this is {SUMMARY_VERSION}"
    missing = [key for key in NEEDED if key not in summary]
    if missing:
        return f"lacks {', '.join(missing)}"
    wrong = [name for name, shape in SUMMARY.items() if not fits(summary.get(name), shape)]
    if wrong:
        return f"has no usable {', '.join(wrong)}"
    return None if fits(summary["quality"], {summary["metric"]: is_number}) else f"lacks {summary['metric']}"


def _is_device(name: Any) -> bool:
    try:
        return isinstance(name, str) and parse_device(name) is not None
    except InputError:
        return False


def _epochs(entries: Sequence[Any], metric: str) -> list[dict[str, Any]] | None:
    """The epochs of a history, each without what it does not know; None where one lacks what every figure needs."""
    needed: dict[str, Shape] = dict.fromkeys(("epoch", "samples", "train_seconds"), is_number)
    if not fits(entries, [{**needed, "train_loss": optional(is_figure), metric: optional(is_figure)}]):
        return None
    return [{key: value for key, value in entry.items() if value is not None} for entry in entries]
