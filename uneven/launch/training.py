"""One run as one rank: make the worker, train, collect every rank's results. The same for every kind of process.

Called by launch/run.py (a process alone, or a script's rank), launch/rank.py (a rank process of `fit`) and, for its
collection, api/loop.py. Results travel over the group, never through files: every rank then holds the same state,
which was checked to have trained every sample exactly once. Only a rank process writes it to a folder, for `fit`.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from uneven.comm.gather import gather_bytes
from uneven.comm.group import Group
from uneven.config import RunConfig, Task
from uneven.data.replay import read_parts, read_rounds
from uneven.hardware.device import Device
from uneven.launch.context import ProcessContext
from uneven.launch.run_status import Output
from uneven.policy.axis import Axis
from uneven.results.state import TrainedState, verified_state
from uneven.timeline.timeline import LEFT, LOST, Ended, Timeline
from uneven.train.rank_info import RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

# (worker, folder for files of its own), run in place of `worker.train()`; its result is collected where it has one.
Program = Callable[[Worker, Path], RankResult | None]

SEGMENT = ("slot", "samples", "devices", "why")  # what the log tells of where the run began or was resumed
RESULT = "result"  # in the run's private folder: the name of the folder with its state


def train_as_rank(
    context: ProcessContext,
    task: Task,
    config: RunConfig,
    devices: tuple[Device, ...],
    requests: Requests,
    output: Output,
    run: Callable[[Worker], RankResult | None] = Worker.train,
) -> TrainedState | None:
    """Train this rank's part on the calling thread; the state of the whole run, or None where `run` has no result.

    The caller begins and ends the run. A rank process that failed must not end it: closing a group may wait for the
    other ranks, and the error has to be reported first.
    """
    can_lose = run is Worker.train  # other programs leave a result of every rank
    worker = context.make_worker(task, config, devices, requests, output, can_lose=can_lose)
    result = run(worker)
    return None if result is None else finish(context, worker, result)


def finish(context: ProcessContext, worker: Worker, result: RankResult) -> TrainedState:
    """The state of the whole run, once every rank has it."""
    state = worker.finish(lambda: collect(worker.group, result, worker.axis))
    context.close_run()
    context.status.reached(state)
    return state


def collect(group: Group, result: RankResult, axis: Axis) -> TrainedState:
    """The run's state with every rank's log and timeline, the same on every rank; checked to be exactly once."""
    own = {
        "member": result.member,
        "timeline": result.timeline.to_json(),
        "log": result.log,
        "rounds": result.rounds,
        "dropped": result.dropped,
        # Of ranks that earlier segments and generations of the run had; rank 0's count.
        "earlier_logs": [*result.run.earlier_logs, *result.run.lost_logs],
        "gone": result.read_gone() if group.rank == 0 else [],
    }
    packed = zlib.compress(json.dumps(own).encode(), level=1)
    records = [json.loads(zlib.decompress(data)) for data in gather_bytes(group, packed)]
    logs = [read_parts(record["log"]) for record in records]
    rounds = [read_rounds(record["rounds"]) for record in records]
    timelines = [Timeline.from_json(record["timeline"]) for record in records]
    dropped = [read_parts(record["dropped"]) for record in records]
    logs += [read_parts(earlier["log"]) for earlier in records[0]["earlier_logs"]]
    dropped += [read_parts(earlier["dropped"]) for earlier in records[0]["earlier_logs"]]
    if any(rounds):
        rounds += [read_rounds(earlier.get("rounds", [])) for earlier in records[0]["earlier_logs"]]
    known = [*(record.get("member") for record in records), *(one.get("member") for one in records[0]["earlier_logs"])]
    timelines += _gone_lanes(records[0]["gone"], result.run.segments, known, logs, dropped, timelines)
    run, segments = result.run, [dict(segment) for segment in result.run.segments]
    members: list[str | None] = []
    if any("generation" in segment for segment in segments):
        members = known
    else:  # names are new in every run: without a loss the logs of a run and of its replay are the same
        segments = [{name: value for name, value in one.items() if name in SEGMENT} for one in segments]
    state = replace(result.state, saves=run.saves, stop_rounds=run.stop_rounds, segments=segments, members=members)
    return verified_state(state, axis, logs, rounds, timelines, dropped)


def _gone_lanes(
    gone: Sequence[Mapping[str, Any]],
    segments: Sequence[Mapping[str, Any]],
    members: Sequence[str | None],
    logs: Sequence[Sequence[tuple[int, int, int]]],
    dropped: Sequence[Sequence[tuple[int, int, int]]],
    present: Sequence[Timeline],
) -> list[Timeline]:
    """The lanes of ranks that are gone, numbered as their logs; one of which nothing counts has none."""
    found: list[Timeline] = []
    free = count(len(logs))
    for one in gone:
        rank = members.index(one["member"]) if one["member"] in members else next(free)
        own = 0
        if rank < len(logs):
            own = sum(samples for _, _, samples in logs[rank]) - sum(samples for _, _, samples in dropped[rank])
        found.append(gone_lane(one, rank, own, why_gone(segments, one["member"]), [*present, *found]))
    return found


def write_state(state: TrainedState, folder: Path) -> None:
    """A collected state for another process of this machine; written by the first rank, read by the launcher."""
    assert state.timeline is not None, "collected with its timeline"
    state.save(folder)
    (folder / "timeline.json").write_text(json.dumps(state.timeline.to_json()))
    draft = folder / f".{RESULT}"
    draft.write_text(folder.name)
    draft.rename(folder.parent / RESULT)


def has_result(folder: Path) -> bool:
    """Whether a rank has written the state of the run: from then on no rank is needed any more."""
    return (folder / RESULT).exists()


def read_result(folder: Path) -> TrainedState:
    """The state of the run, from whichever rank was the first one in the end."""
    return read_state(folder / (folder / RESULT).read_text())


def read_state(folder: Path) -> TrainedState:
    """What `write_state` wrote, log and timeline included."""
    timeline = Timeline.from_json(json.loads((folder / "timeline.json").read_text()))
    return replace(TrainedState.load(folder), folder=None, timeline=timeline)


def gone_lane(
    found: Mapping[str, Any], rank: int, counted: int | None, why: str, present: Sequence[Timeline]
) -> Timeline:
    """The timeline of a member that is gone, from what `read` found; `present` are those of the ranks at the end.

    `rank` is the place of its log among all logs, after those of the ranks at the end; `counted` the samples in it.
    """
    timeline = Timeline.from_json(found["timeline"])
    samples = max(0, (counted or 0) - int(found["restored"]))
    ended = Ended(LEFT if found["has_left"] else LOST, why)
    number, machines = _place(timeline, present)
    lanes = [
        replace(
            lane,
            rank=rank,
            machine=number,
            samples=samples,
            redone=max(0, int(found["trained"]) - samples),
            ended=ended,
        )
        for lane in timeline.lanes
    ]
    accounts = [replace(account, rank=rank) for account in timeline.accounts]
    events = [replace(event, rank=rank) for event in timeline.events]
    return replace(timeline, lanes=lanes, accounts=accounts, events=events, machines=machines)


def _place(timeline: Timeline, present: Sequence[Timeline]) -> tuple[int, tuple[Any, ...]]:
    """The number of its machine among those of the run's end: machines are numbered anew when one is gone."""
    (machine,), known = timeline.machines, {one.number: one.host for other in present for one in other.machines}
    others = (number for number, host in known.items() if number > 0 and host == machine.host)
    number = 0 if machine.number == 0 else next(others, max(known, default=0) + 1)
    return number, (replace(machine, number=number),)


def why_gone(segments: Sequence[Mapping[str, Any]], member: str) -> str:
    """What the run said when this member was not among its ranks any more."""
    was_there = False
    for segment in segments:
        is_there = member in segment.get("members", ())
        if was_there and not is_there:
            return str(segment.get("why", ""))
        was_there |= is_there
    return ""
