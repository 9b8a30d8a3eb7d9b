"""A rank process of a replay of a run in which ranks were lost or joined.

A replay starts as many processes as ranks trained at once, so that each has the cores that its rank had. A process is
one of the run's members after the other: where a member was lost, its process waits for the next one that joined, if
there is one, and takes its place. See train/elastic/replay_membership.py for what a member does.
"""

from collections.abc import Callable
from dataclasses import replace

from uneven.comm.group import Group
from uneven.comm.store import Store
from uneven.config import RunConfig, Task
from uneven.data.replay_generations import RecordedGeneration, RecordedGenerations
from uneven.hardware.device import Device
from uneven.hardware.roster import Roster
from uneven.launch.context import ProcessContext
from uneven.launch.membership import form_ranks, has_crowd
from uneven.launch.requests import Requests
from uneven.results.state import TrainedState
from uneven.train.elastic.membership import Generation
from uneven.train.elastic.replay_membership import LeftReplayError, ReplayMembership
from uneven.train.rank_info import RankInfo, Report
from uneven.train.worker import Worker

PREFIX = "replay"  # of the keys in the launcher's store


def train_members(
    context: ProcessContext,
    task: Task,
    config: RunConfig,
    devices: tuple[Device, ...],
    requests: Requests,
    report: Report,
    recorded: RecordedGenerations,
    train: Callable[[Worker], TrainedState | None],
) -> TrainedState | None:
    """The state of the whole run, or None where the last member that this process is was lost before the end."""
    roles = recorded.roles()
    places = {name: place for place, names in enumerate(roles) for name in names}

    def roster_of(generation: RecordedGeneration) -> Roster:
        return Roster.on_one_machine(tuple(devices[places[name]] for name in generation.members))

    def record_store() -> Store:
        return context.environment.connect(f"{PREFIX}/records")

    number = context.environment.rank
    for name in roles[number] if number < len(roles) else ():
        begun = next(one for one in recorded.generations if name in one.members)
        roster, is_newcomer = roster_of(begun), begun.number > 0
        info = RankInfo(begun.members.index(name), roster.devices, roster=roster, member=name, is_newcomer=is_newcomer)
        own = with_slot_size(config, len(recorded.generations[0].members)) if is_newcomer else config
        worker = context.make_worker(task, own, devices, requests, report, can_lose=False, info=info)

        def make_group(generation: Generation, rank: int, info: RankInfo = info) -> Group:
            context._rank_info = info  # as after a change of generation
            store, crowd = context.environment.connect(f"{PREFIX}/{generation.number}"), has_crowd(generation.roster)
            return form_ranks(store, generation.roster, rank, config, crowd, generation=generation.number)

        store = context.environment.connect(PREFIX)
        membership = ReplayMembership(recorded, name, store, record_store, make_group, roster_of)
        membership.follow(worker.engine, worker.events)
        worker.membership = membership
        try:
            return train(worker)
        except LeftReplayError:
            context.leave_group()
    return None


def with_slot_size(config: RunConfig, ranks: int) -> RunConfig:
    """The samples of a step are those of the start, also for whoever joined."""
    if config.is_local or config.global_batch_size is not None:
        return config
    return replace(config, global_batch_size=config.slot_size(ranks), max_global_batch_size=None)
