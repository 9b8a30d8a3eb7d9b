"""Replays on threads of runs in which ranks were lost or joined: for tests with tests/train/clusters.py."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.ranks import Silent, ThreadGroup, _Room
from tests.train.clusters import MemoryStore
from uneven.config import RunConfig, Task
from uneven.data.replay import read_generations
from uneven.data.replay_generations import RecordedGeneration
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.training import collect
from uneven.results.state import TrainedState
from uneven.train.elastic.replay_membership import LeftReplayError, ReplayMembership
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker


def roster_of(recorded: RecordedGeneration) -> Roster:
    return Roster.on_one_machine(parse_devices(["cpu"] * len(recorded.members)))


def replay_on_threads(folder: Path, task: Callable[[], Task], config: RunConfig) -> dict[str, Any]:
    """(state, worker) of every member that is there at the end; each is a thread of its own."""
    recorded = read_generations(folder)
    assert recorded is not None
    rooms = {one.number: _Room(len(one.members)) for one in recorded.generations}
    store = MemoryStore()

    def run(name: str) -> tuple[TrainedState, Worker] | None:
        begun = next(one for one in recorded.generations if name in one.members)
        roster, is_newcomer, rank = roster_of(begun), begun.number > 0, begun.members.index(name)
        info = RankInfo(rank, roster.devices, roster=roster, member=name, is_newcomer=is_newcomer)

        def make_group(generation: Any, rank: int) -> ThreadGroup:
            return ThreadGroup(rooms[generation.number], rank)

        given = (task(), config, info, lambda _: ThreadGroup(rooms[0], rank), threading.Event(), Silent())
        worker = Worker(*given)
        membership = ReplayMembership(recorded, name, store, lambda: store, make_group, roster_of)
        membership.follow(worker.engine, worker.events)
        worker.membership = membership
        try:
            result = worker.train()
            return worker.finish(lambda: collect(worker.group, result, worker.axis)), worker
        except LeftReplayError:
            return None
        except BaseException:
            for room in rooms.values():
                room.fail()
            raise

    with ThreadPoolExecutor(len(recorded.logs)) as pool:
        futures = {name: pool.submit(run, name) for name in recorded.logs}
    failed = [error for future in futures.values() if (error := future.exception()) is not None]
    for error in failed:
        raise error
    return {name: found for name, future in futures.items() if (found := future.result()) is not None}


def assert_same_bits(again: dict[str, Any], found: dict[str, Any]) -> None:
    """Params, buffers and optimizer state of every member that is left."""
    assert set(again) == set(found)
    for name, (state, worker) in again.items():
        first, other = found[name]
        assert worker.engine.log == other.engine.log, name
        assert worker.engine.rounds == other.engine.rounds, name
        for kind in ("params", "buffers", "optimizer"):
            mine, theirs = getattr(state, kind), getattr(first, kind)
            assert mine.keys() == theirs.keys(), (name, kind)
            for key, value in mine.items():
                assert key.startswith("random.") or torch.equal(value, theirs[key]), (name, kind, key)
        assert state.samples == first.samples
