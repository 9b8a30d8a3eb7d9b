"""How `uneven run --json` learns what was trained: the first rank adds a line to a file that the command has named.

The ranks are other processes, and the trained states stay in them. No torch in this file.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict

from uneven.config import results_of
from uneven.launch.cleanup import make_private_folder, remove

if TYPE_CHECKING:
    from uneven.results.state import TrainedState
    from uneven.timeline.timeline import Lane, Timeline

VARIABLE = "UNEVEN_RESULTS_FILE"


class TookPart(TypedDict):
    """A device that took part, also one that is gone: when and why."""

    device: str
    samples: int | None
    ended: dict[str, Any] | None


class RunResult(TypedDict):
    """One run of the script."""

    policy: str | None
    devices: str | None
    finished: bool
    stopped: str | None  # why it ended before its end
    epochs: int
    steps: int
    samples: int
    rank_samples: list[int]
    train_seconds: float
    samples_since_start: int  # without those before a resume
    samples_per_s: float | None
    disturbed: bool | None  # by other programs
    took_part: list[TookPart]
    metrics: dict[str, float | None]
    out: str | None


def tell_result(state: "TrainedState", timeline: "Timeline | None") -> None:
    """Called by the first rank at the end of each run, a stopped one too; without a timeline it was over before."""
    if (path := os.environ.get(VARIABLE)) is None:
        return
    seconds = 0.0 if timeline is None else timeline.training_s
    last = state.history[-1] if state.history else {}
    result: RunResult = {
        "policy": state.config.get("policy"),
        "devices": state.config.get("devices"),
        "finished": state.finished,
        "stopped": state.stopped,
        "epochs": sum(not entry.get("is_inside_epoch") for entry in state.history),
        "steps": state.slot,
        "samples": state.samples,
        "rank_samples": state.rank_samples,
        "train_seconds": round(seconds, 3),
        "samples_since_start": state.samples_since_start,
        "samples_per_s": None if timeline is None else timeline.samples_per_s,
        "disturbed": None if timeline is None else timeline.run.is_disturbed,
        "took_part": [] if timeline is None else [_lane(timeline, lane) for lane in timeline.lanes],
        "metrics": {name: value for name, value in results_of(last).items() if isinstance(value, int | float)},
        "out": state.config.get("out"),
    }
    with suppress(OSError), open(path, "a") as file:  # the command has ended without waiting
        file.write(json.dumps(result) + "\n")


def _lane(timeline: "Timeline", lane: "Lane") -> TookPart:
    ended = None if lane.ended is None else {"s": round(lane.end_ns / 1e9, 3), **asdict(lane.ended)}
    return {"device": timeline.name(lane), "samples": lane.samples, "ended": ended}


@contextmanager
def collected_results() -> Iterator[list[RunResult]]:
    """Around a run whose own stdout is not wanted: it goes to stderr, and the list is filled at the end.

    The file is in a private folder, which goes also where a second signal ends this process (launch/cleanup.py).
    """
    results: list[RunResult] = []
    folder = make_private_folder()
    path = folder / "results"
    os.environ[VARIABLE] = str(path)
    try:
        with stdout_to_stderr():
            yield results
    finally:
        del os.environ[VARIABLE]
        if path.exists():
            results += [json.loads(line) for line in path.read_text().splitlines()]
        remove(folder)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """For this process and those that it starts, which inherit the descriptor."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
