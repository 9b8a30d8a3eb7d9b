"""What a plan predicted for a run, and what the run then achieved: one line, and plan.json in the run's folder.

A plan is the JSON object that uneven/plan/plan.py makes. `uneven run --policy auto` hands it down to the ranks of the
script, whose first run takes it; `fit(policy="auto")` passes its own to launch/run.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uneven.files import write_atomically
from uneven.results.state import TrainedState
from uneven.timeline.timeline import Timeline

PLAN = "plan.json"
_handed: list[Mapping[str, Any]] = []


def hand_down(plan: Mapping[str, Any] | None) -> None:
    """For the first run of the script that this process is about to execute."""
    _handed[:] = [] if plan is None else [plan]


def take_handed() -> Mapping[str, Any] | None:
    """The plan of the run that begins here, where one was handed down; once."""
    return _handed.pop() if _handed else None


def achieved(plan: Mapping[str, Any], state: TrainedState, timeline: Timeline) -> dict[str, Any] | None:
    """What the run reached since its last start, beside what was predicted; None where it trained nothing."""
    predicted = plan["predicted"]
    samples, speed = state.samples_since_start, timeline.samples_per_s
    if not speed:
        return None
    per_epoch = timeline.training_s * predicted["samples_per_epoch"] / samples
    return {
        "seconds_per_epoch": per_epoch,
        "samples_per_s": speed,
        "efficiency": speed / predicted["sum_of_speeds"],
        "epochs": samples / predicted["samples_per_epoch"],
        "error": predicted["seconds_per_epoch"] / per_epoch - 1.0,
    }


def record_outcome(
    plan: Mapping[str, Any] | None, state: TrainedState, timeline: Timeline, out: Path | None
) -> list[str]:
    """Write the plan with what was achieved into the run's folder, where there is one; returns the line to print."""
    if plan is None:
        return []
    found = achieved(plan, state, timeline)
    if out is not None:
        write_atomically(out / PLAN, json.dumps({**plan, "achieved": found}, indent=1).encode())
    if found is None:
        return []
    predicted = plan["predicted"]
    return [
        f"  plan: predicted {predicted['seconds_per_epoch']:.2f} s per epoch at efficiency "
        f"{predicted['efficiency']:.2f}, achieved {found['seconds_per_epoch']:.2f} s at {found['efficiency']:.2f} "
        f"({found['error']:+.0%})"
    ]
