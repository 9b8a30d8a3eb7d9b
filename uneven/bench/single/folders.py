"""Run folders: finished ones as records, all others by name with what is wrong.

Below a root lie MODEL/MODE/seed-S. Invariant: nothing here raises because of a folder's content, so that a report can
be made of whatever a night of runs has left.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.bench.undisturbed import is_disturbed
from uneven.errors import InputError
from uneven.timeline.timeline import Timeline

SUMMARY_VERSION = 1
NEEDED = ("model", "mode", "seed", "devices", "metric", "quality", "train_seconds", "samples_per_s", "samples")
SWEEP = "sweep.json"  # in the folder of a sweep: its commands, and the modes it left out
FAILURE = "failure.json"  # what a sweep leaves in place of a run that failed


@dataclass(frozen=True)
class RunRecord:
    """A finished run."""

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
        """Whether its speed is marked; its quality is not touched by that."""
        return is_disturbed(self.summary)

    def timeline(self) -> Timeline | None:
        """None where it is missing or cannot be read; the run counts without it."""
        try:
            return Timeline.from_json(json.loads((self.folder / "timeline.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class BrokenRun:
    """A folder that is no finished run."""

    folder: Path
    reason: str


def read_runs(root: Path) -> tuple[list[RunRecord], list[BrokenRun]]:
    """All runs below a folder, or the one that the folder is; InputError where there is no such folder."""
    if not root.is_dir():
        raise InputError(f"there is no folder {root}: make runs by 'uneven bench sweep --out {root}'")
    places = [root] if _is_run(root) else sorted(path for path in root.glob("**/seed-*") if _is_run(path))
    found = [read_run(place) for place in places]
    return [run for run in found if isinstance(run, RunRecord)], [run for run in found if isinstance(run, BrokenRun)]


def read_run(folder: Path) -> RunRecord | BrokenRun:
    """What a run folder holds."""
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
    # An older run that was moved aside is seed-0.1, and counts no more.
    return path.is_dir() and re.fullmatch(r"seed-\d+", path.name) is not None


def read_json(path: Path) -> Any:
    """A file's content; None where it is missing or no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
