"""A cluster of threads that train a local policy and may be killed at any operation; the others settle and go on.

Each rank has a real Engine and LocalSGD. The group of a generation is a room of threads. A rank that is killed never
comes back, and where it dies with a sum on its way, some of the others have its result and some have not.
"""

import json
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks import ThreadGroup, _Room
from uneven.comm.collectives import broadcast_params
from uneven.comm.work import Work
from uneven.config import Task, resolve
from uneven.data.tensors import TensorData
from uneven.errors import GroupLostError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.policy.finish import Cost
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.local_sgd import LocalSGD
from uneven.train.rank_info import RankInfo
from uneven.train.round_records import RoundRecords
from uneven.train.run_record import RunRecord
from uneven.train.settle_local import Settled, abandon, hand_over, settle

SAMPLES = 70


class Killed(BaseException):
    """The process is gone."""


class Count(nn.Module):
    """A coordinate per sample: each step adds 1 to those of its samples, and an average weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(2, dtype=torch.float64))


def count_step(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, Count)
    model.seen += 1
    model.level += 1.0
    return -model.w[batch[0]].sum() - 0.0 * model.w.sum()


class Cluster:
    """`kills`: (member, the operation before which it dies), counted from the first slot; negative: with it."""

    def __init__(self, size: int, kills: Sequence[tuple[int, int]] = (), *, seed: int = 0, **settings: Any) -> None:
        self.lock = threading.Condition()
        self.random = random.Random(seed)
        self.kills = dict(kills)
        self.operations = dict.fromkeys(range(size), 0)
        self.dead: set[int] = set()
        self.done: set[int] = set()
        self.rosters: list[tuple[int, ...]] = [tuple(range(size))]
        self.rooms = [_Room(size)]
        self.store = Store()
        given = {"batch_size": 4, "epochs": 2, "policy": "async", "anchor": 2, "lr_scale": 1.0, **settings}
        self.config = resolve(given)
        self.settled: list[tuple[int, Settled]] = []
        self.start, self.started = threading.Barrier(size), set[int]()
        self.last_sums: dict[tuple[int, int], int] = {}  # in which a rank dies

    def run(self) -> "list[Member]":
        """All that are left when every slot is trained."""
        members = [Member(self, number) for number in self.rosters[0]]
        with ThreadPoolExecutor(len(members)) as pool:
            futures = [pool.submit(member.live) for member in members]
        for future in futures:
            future.result()
        return [member for member in members if member.number not in self.dead]

    def operate(self, number: int) -> None:
        """Before anything that another rank may see."""
        with self.lock:
            self.operations[number] += 1
            is_due = number in self.started and self.operations[number] == self.kills.get(number)
            if number in self.dead or is_due:
                self.bury(number)
                raise Killed

    def is_last_sum(self, number: int) -> bool:
        """Whether this rank dies with the sum that it is about to bring: then only some of the others have it."""
        with self.lock:
            return number in self.started and self.operations[number] == -self.kills.get(number, 0)

    def bury(self, number: int) -> None:
        if number not in self.dead:
            self.dead.add(number)
            left = tuple(member for member in self.rosters[-1] if member != number)
            old = self.rooms[-1]
            self.rosters.append(left)
            self.rooms.append(_Room(max(1, len(left))))
            old.fail()
            self.lock.notify_all()

    def await_next(self, generation: int) -> int:
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.rosters) - 1 > generation, 60), "nobody was lost"
            return len(self.rosters) - 1

    def finish(self, number: int, generation: int) -> None:
        """Stay until all have finished."""
        with self.lock:
            self.done.add(number)
            self.lock.notify_all()
            assert self.lock.wait_for(
                lambda: len(self.rosters) - 1 > generation or self.done >= set(self.rosters[-1]), 60
            )
            if len(self.rosters) - 1 > generation and not self.done >= set(self.rosters[-1]):
                self.done.discard(number)
                raise GroupLostError("another rank is gone")


class Store:
    """A store that all ranks reach."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]


class MortalRecords(RoundRecords):
    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(cluster.store, name(number))  # type: ignore[arg-type]
        self._cluster, self._number = cluster, number

    def write(self, *arguments: Any) -> None:
        self._cluster.operate(self._number)
        super().write(*arguments)


class MortalGroup(ThreadGroup):
    """In a room of threads of which one may die: then works are lost, or not, as it happens."""

    def __init__(self, room: _Room, rank: int, cluster: Cluster, number: int) -> None:
        super().__init__(room, rank)
        self._cluster, self._number = cluster, number

    def new_group(self) -> "MortalGroup":
        twin = super().new_group()
        return MortalGroup(twin._room, self.rank, self._cluster, self._number)

    def claim(self, many: int) -> int:
        self._cluster.operate(self._number)
        return super().claim(many)

    def _meet(self, tensor: Tensor, compute: Callable[[list[Tensor]], Tensor], owner: int | None = None) -> Work:
        self._cluster.operate(self._number)
        brought, meeting = tensor.clone(), (id(self._room), self._count)
        if self._cluster.is_last_sum(self._number):
            self._cluster.last_sums[meeting] = self._number
            with suppress(Exception):
                super()._meet(brought, compute, owner).wait()
            with self._cluster.lock:
                self._cluster.bury(self._number)
            raise Killed
        inner = super()._meet(brought, compute, owner)
        return Work(MortalWork(self, inner, brought, tensor, meeting), tensor, self.traffic)


class MortalWork:
    def __init__(
        self, group: MortalGroup, inner: Work, brought: Tensor, tensor: Tensor, meeting: tuple[int, int]
    ) -> None:
        self._group, self._inner, self._brought, self._tensor = group, inner, brought, tensor
        self._meeting = meeting

    def wait(self) -> None:
        group, cluster = self._group, self._group._cluster
        try:
            self._inner.wait()
        except Exception as error:
            raise GroupLostError("a peer is gone") from error
        cluster.operate(group._number)
        with cluster.lock:
            if (dying := cluster.last_sums.get(self._meeting)) is not None:
                assert cluster.lock.wait_for(lambda: dying in cluster.dead, 60)
            is_lost = group._room.is_broken and cluster.random.random() < 0.5
        if is_lost:
            self._tensor.fill_(-7)  # half of it has come
            raise GroupLostError("a peer is gone")
        self._tensor.copy_(self._brought)

    def is_completed(self) -> bool:
        return self._inner.is_completed()


def name(number: int) -> str:
    return f"member {number}"


class Member:
    """The loop of one rank: train, or settle with who is left."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number, self.generation = cluster, number, 0
        self.history: list[tuple[int, int, float]] = []
        self.run = RunRecord()
        self.is_alone = False

    def live(self) -> None:
        try:
            self._start()
            while not self._is_finished():
                self._settle()
        except Killed:
            return

    def _start(self) -> None:
        cluster = self.cluster
        data = TensorData(torch.arange(SAMPLES), torch.zeros(SAMPLES))
        task = Task(Count, lambda params: torch.optim.SGD(params, lr=1.0), count_step, data)
        self.info = RankInfo(self.number, parse_devices(["cpu"] * len(cluster.rosters[0])), member=name(self.number))
        self.info.records = MortalRecords(cluster, self.number)
        self.engine = Engine(task, cluster.config, self.info, Recorder(self.number))
        self.local = LocalSGD(self.engine, lambda: False, self._end_epoch)
        self.info.join(MortalGroup(cluster.rooms[0], self.number, cluster, self.number))
        broadcast_params(self.info.group, self.engine.model.parameters())
        self.local.initialize([Cost(0.0, 1.0 + rank) for rank in range(self.info.world_size)])
        cluster.start.wait(60)
        cluster.operations[self.number] = 0
        cluster.started.add(self.number)

    def _end_epoch(self, epoch: int, loss: float, *, first: int, until: int, step: int | None = None) -> bool:
        if not self.is_alone:
            self.local.average_buffers()
            told = torch.full((1,), float(self.info.rank == 0), dtype=torch.float64)
            assert self.info.group.all_reduce(told).wait().item() == 1.0
        self.history.append((epoch, until, loss))
        return False

    def _is_finished(self) -> bool:
        """Train all that is left; False where a rank is lost before every rank has finished."""
        cluster, engine, local = self.cluster, self.engine, self.local
        try:
            if self.is_alone:
                local.epochs.run()
                self._finish_alone()
            else:
                local.epochs.run()
                local.reset_timer()
                for part, micros in engine.feed.stream(local.parts()):
                    cluster.operate(self.number)
                    local.train(part, micros)
                local.finalize()
            cluster.finish(self.number, self.generation)
        except GroupLostError:
            return False
        return True

    def _finish_alone(self) -> None:
        engine = self.engine
        for part, micros in engine.feed.stream(engine_parts(engine)):
            self.cluster.operate(self.number)
            verdict = engine.local_step(part, engine.open(micros), 0)
            engine.record_part(part, verdict, engine.trained + 1)
            if engine.trained == engine.axis.epoch_end(self.local.epochs.epoch):
                self.local.epochs.epoch += 1
                self.history.append((self.local.epochs.epoch - 1, engine.trained, 0.0))

    def _settle(self) -> None:
        cluster, local = self.cluster, self.local
        try:
            if self.is_alone:
                raise Killed
            abandon(local)
            generation = cluster.await_next(max(self.generation, self._tried))
            self._tried = generation
            roster = cluster.rosters[generation]
            rank = roster.index(self.number)
            group = MortalGroup(cluster.rooms[generation], rank, cluster, self.number)
            members = tuple(name(number) for number in roster)
            rest = json.dumps(self.history)
            found = settle(local, group, generation, members, events=len(self.history), rest=rest)
            self.generation = generation
            self.history = [(epoch, until, loss) for epoch, until, loss in json.loads(found.state.rest)]
            found.keep_logs(self.run)
            cluster.settled.append((self.number, found))
            self.info.rejoin(generation, Roster.on_one_machine(parse_devices(["cpu"] * len(roster))), rank, group)
            if len(roster) > 1:
                local.initialize(found.costs)
            else:
                hand_over(local)
                self.is_alone = True
        except GroupLostError:
            self._settle()

    _tried = 0


def engine_parts(engine: Engine) -> Any:
    from uneven.policy.axis import Part

    for slot in engine.slots_left():
        yield Part(slot, slot.first, slot.samples, engine.micro_batch_size(slot.samples))
