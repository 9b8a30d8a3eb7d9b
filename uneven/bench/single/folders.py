"""Reads run folders, ROOT/MODEL/MODE/seed-S: finished runs as RunRecords, all others as BrokenRuns with a reason.

Used by the report, by comparisons and by sweeps. Invariant: the content of a folder never raises, so that a report can
be made of an interrupted or damaged set of runs.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.files import read_json
from uneven.timeline.timeline import Timeline

SUMMARY_VERSION = 1
NEEDED = ("model", "mode", "seed", "devices", "metric", "quality", "train_seconds", "samples_per_s", "samples")
SWEEP = "sweep.json"  # in the folder of a sweep: its commands, and the modes it left out
FAILURE = "failure.json"  # written by a sweep into the folder of a run that failed


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its folder, summary.json and metrics.jsonl."""

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]  # one entry per epoch

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
    def quality(self) -> float:
        return float(self.summary["quality"][self.summary["metric"]])

    @property
    def is_disturbed(self) -> bool:
        """Whether its speed is marked; its quality is valid all the same."""
        return is_disturbed(self.summary)

    def timeline(self) -> Timeline | None:
        """None if it is missing or cannot be read; the run counts all the same."""
        try:
            return Timeline.from_json(json.loads((self.folder / "timeline.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class BrokenRun:
    """A run folder without a finished run, and the reason."""

    folder: Path
    reason: str


def read_runs(root: Path) -> tuple[list[RunRecord], list[BrokenRun]]:
    """All runs below a folder, or the folder's own if it is a run folder; InputError if it does not exist."""
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: make runs by 'uneven bench sweep --out {root}'")
    folders = [root] if _is_run(root) else sorted(path for path in root.glob("**/seed-*") if _is_run(path))
    runs = [read_run(folder) for folder in folders]
    return [run for run in runs if isinstance(run, RunRecord)], [run for run in runs if isinstance(run, BrokenRun)]


def read_run(folder: Path) -> RunRecord | BrokenRun:
    """The run in a folder, finished or not."""
    failure = read_json(folder / FAILURE)
    summary = read_json(folder / "summary.json")
    if not (folder / "summary.json").is_file():
        if isinstance(failure, dict):
            return BrokenRun(folder, str(failure.get("reason", "failed")))
        return BrokenRun(folder, "not finished: there is no summary.json")
    if not isinstance(summary, dict):
        return BrokenRun(folder, "summary.json cannot be read")
    if summary.get("version") != SUMMARY_VERSION:
        return BrokenRun(folder, f"summary.json is of version {summary.get('version')!r}, this is {SUMMARY_VERSION}")
    missing = [key for key in NEEDED if key not in summary]
    if missing or summary["metric"] not in summary["quality"]:
        return BrokenRun(folder, f"summary.json lacks {', '.join(missing) or summary['metric']}")
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return RunRecord(folder, summary, [json.loads(line) for line in lines])
    except (OSError, ValueError) as error:
        return BrokenRun(folder, f"metrics.jsonl cannot be read ({error})")


def _is_run(path: Path) -> bool:
    # An older run that was moved aside is named seed-0.1 and does not count.
    return path.is_dir() and re.fullmatch(r"seed-\d+", path.name) is not None
