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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.files import folder_error, read_as, read_json, write_atomically
from uneven.hardware.device import is_lesser_copy, parse_device, parse_devices, takes_turns
from uneven.timeline.idle import OFF_THE_CLOCK, idle_by_cause, mean_utilisation
from uneven.timeline.record import Account
from uneven.timeline.timeline import Timeline, rank_rounds

SUMMARY_VERSION = 1
PACKED_VERSION = 1
SWEEP = "sweep.json"  # in the folder of a sweep: its commands, and the modes it left out
EQUAL_TIME = "equal-time"  # in the folder of a sweep: runs with as many epochs as fit the single device's time
EFFICIENCY = "efficiency.json"  # in the folder of a mode: measured by pairs
FAILURE = "failure.json"  # written by a sweep into the folder of a run that failed
OUTSIDE = "outside training"


@dataclass(frozen=True)
class MachineFacts:
    """Where a run was made."""

    processor: str = "unknown CPU"
    torch: str = "?"
    uneven: str = "?"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is to know about a run: summary.json."""

    version: int = SUMMARY_VERSION
    model: str
    mode: str
    data: str = ""
    devices: list[str]
    seed: int
    epochs: int
    batch_size: int = 0
    global_batch_size: int | str | None = None
    precision: str = "fp32"
    compile: str = "off"
    lr_scale: float | str | None = None
    eval_samples: int | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    metric: str
    quality: dict[str, float]
    published: float | None = None
    samples: int
    dropped: int = 0
    train_seconds: float
    samples_per_s: float
    wall_seconds: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    sample_shares: list[float] = field(default_factory=list)
    backend: str | None = None
    peak_memory_bytes: int | None = None
    machine: MachineFacts = MachineFacts()
    interference: dict[str, float | bool | None] | None = None  # by other programs, while the run was on
    is_disturbed: bool = False
    runs_at_once: int = 1  # of a sweep with --jobs

    def __post_init__(self) -> None:
        if not self.devices:
            raise TypeError("has no usable devices")
        for name in self.devices:
            parse_device(name)
        if self.metric not in self.quality:
            raise TypeError(f"lacks {self.metric}")


@dataclass(frozen=True)
class Epoch:
    """What every entry of a history has; each has its metrics, too."""

    epoch: int
    samples: int
    train_seconds: float


@dataclass(frozen=True)
class RunTimes:
    """How a run spent its time: what a report needs of a timeline, which has megabytes.

    Made of the timeline, or read from a published file; both give the same report. Rounds are those of rank 0, as all
    ranks pass the same ones.
    """

    seconds: list[dict[str, float]]  # per rank: state -> seconds
    utilisation: dict[str, float]  # "rank: device" -> share of the training time in which it computes
    idle_s: dict[str, float]  # cause -> seconds, all devices together
    rounds: int = 0
    communication_ms: float | None = None  # mean of a round
    wait_ms: float | None = None

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
        )

    @property
    def accounts(self) -> list[Account]:
        return [Account(rank, seconds) for rank, seconds in enumerate(self.seconds)]


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its folder, or its packed file, with what is in summary.json and metrics.jsonl."""

    folder: Path
    summary: Summary
    metrics: list[dict[str, Any]]  # one entry per epoch
    packed: dict[str, Any] | None = None  # the whole file of a packed run

    @property
    def key(self) -> tuple[str, str, int]:
        return self.summary.model, self.summary.mode, self.summary.seed

    @property
    def name(self) -> str:
        return "{} {} seed {}".format(*self.key)

    @property
    def model(self) -> str:
        return self.summary.model

    @property
    def mode(self) -> str:
        return self.summary.mode

    @property
    def quality(self) -> float:
        return self.summary.quality[self.summary.metric]

    @property
    def is_disturbed(self) -> bool:
        """Whether its speed is marked; its quality is valid all the same."""
        return self.summary.is_disturbed

    @property
    def is_for_speed(self) -> bool:
        """A simulated slow device alone is run for its speed: its quality would repeat another run's."""
        if not self.mode.startswith("solo-"):
            return False
        device, asked = parse_device(self.summary.devices[0]), self.summary.asked.get("devices")
        try:
            return is_lesser_copy(device, parse_devices(asked)) if asked else device.speed < 1.0
        except (InputError, AttributeError, TypeError):  # unlike the device, this record is not checked before
            return False

    @property
    def takes_turns(self) -> bool:
        """Its ranks compute one after the other on one GPU: such a run counts for quality only."""
        return takes_turns([parse_device(name) for name in self.summary.devices])

    def times(self) -> RunTimes | None:
        """How it spent its time; None where that is missing or cannot be read."""
        if self.packed is None:
            timeline = read_timeline(self.folder)
            return None if timeline is None else RunTimes.of(timeline)
        try:
            times: RunTimes = read_as(RunTimes, self.packed.get("times"))
            return times
        except TypeError:
            return None


@dataclass(frozen=True)
class BrokenRun:
    """A run folder without a finished run, and the reason."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class PairedFigures:
    """What a report needs of a measurement by pairs (bench/efficiency.py)."""

    efficiency: float
    half_width: float
    pairs: int
    batch_size: int | None = None
    solo_samples_per_s: list[float] = field(default_factory=list)
    joint_samples_per_s: float = 0.0
    ratios: list[float] = field(default_factory=list)
    is_disturbed: bool = False


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
    return float(statistics.median(getattr(run.summary, name) for run in runs))


def single_device(by_mode: Mapping[str, Sequence[RunRecord]]) -> str | None:
    """The mode of the fastest device alone, of those whose quality counts; None without any."""
    alone = {
        mode: median_of("samples_per_s", for_speed(runs))
        for mode, runs in by_mode.items()
        if mode.startswith("solo-") and not any(run.is_for_speed for run in runs)
    }
    return max(alone, key=lambda mode: alone[mode]) if alone else None


def read_efficiency(runs: Sequence[RunRecord]) -> PairedFigures | None:
    """The paired measurement beside the runs of a mode; None if there is none that can be read."""
    try:
        found: PairedFigures = read_as(PairedFigures, read_json(runs[0].folder.parent / EFFICIENCY))
        return found
    except TypeError:
        return None


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
            why = f"holds {run.name}, as {known.folder} does: it was copied or moved"
            broken.append(BrokenRun(run.folder, why))
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
    try:
        return _read_packed(packed) if packed.is_file() and not has_ended else _read_folder(folder)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        return BrokenRun(packed if packed.is_file() and not has_ended else folder, str(error))


def _read_folder(folder: Path) -> RunRecord | BrokenRun:
    failure = read_json(folder / FAILURE)
    if isinstance(failure, dict):  # a run that ends well takes it away: it is newer than a summary beside it
        return BrokenRun(folder, str(failure.get("reason", "failed")))
    if not (folder / "summary.json").is_file():
        return BrokenRun(folder, "not finished: there is no summary.json")
    summary = _read_summary(read_json(folder / "summary.json"), "summary.json")
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return RunRecord(folder, summary, _epochs(lines, summary.metric))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return BrokenRun(folder, f"metrics.jsonl cannot be read ({error})")


def _read_packed(path: Path) -> RunRecord | BrokenRun:
    """The run in a packed file, whole or not."""
    packed = read_json(path)
    if not isinstance(packed, dict) or packed.get("version") != PACKED_VERSION:
        return BrokenRun(path, f"is no packed run of version {PACKED_VERSION}")
    summary = _read_summary(packed.get("summary"), "its summary")
    columns, rows = packed["metrics"]["columns"], packed["metrics"]["rows"]
    metrics = _epochs([dict(zip(columns, row, strict=True)) for row in rows], summary.metric)
    run = RunRecord(path, summary, metrics, packed)
    if (run.model, run.mode, f"seed-{summary.seed}.json") != path.absolute().parts[-3:]:
        return BrokenRun(path, f"holds {run.name}: it was changed, copied or moved")
    return run


def _read_summary(found: Any, what: str) -> Summary:
    """TypeError says why nothing can be told of a run with this summary."""
    if not isinstance(found, dict):
        raise TypeError(f"{what} cannot be read")
    if found.get("version") != SUMMARY_VERSION:
        raise TypeError(f"{what} is of version {found.get('version')!r}, this is {SUMMARY_VERSION}")
    try:
        summary: Summary = read_as(Summary, {name: one for name, one in found.items() if one is not None})
        return summary
    except (TypeError, InputError) as error:
        raise TypeError(f"{what} {error}") from None


def _epochs(entries: Sequence[Any], metric: str) -> list[dict[str, Any]]:
    """The epochs of a history, each without what it does not know; TypeError where one lacks what figures need."""
    for entry in entries:
        read_as(Epoch, entry)
        for name in ("train_loss", metric):  # those of a run that has diverged are NaN
            if not isinstance(value := entry.get(name), int | float | None) or isinstance(value, bool):
                raise TypeError(f"{name} {value!r} is no number")
    return [{key: value for key, value in entry.items() if value is not None} for entry in entries]
