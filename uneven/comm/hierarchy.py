"""The group of ranks on several machines: those of a machine sum among themselves, and one of them uses the network.

Formed by comm/form.py. The first rank of every machine is its speaker. A sum has three stages:

- up: the ranks of a machine sum at their speaker, through shared memory in rank order, or over Gloo where they cannot
  share it;
- network: the speakers sum over Gloo, whose ring sums each element at one place and hands the result on, so that all
  speakers get the same bits, and the same in every run on the same machines;
- down: the speaker copies its bits to the ranks of its machine; nothing is added again.

So all ranks hold the same bits, and the bytes on the network do not grow with the ranks of a machine.

[Note: stages] Nothing blocks before `wait`: a collective goes on to its next stage inside later calls of whatever rank
waits, starts or asks, in any of the groups that were formed together. Up, network and down are groups of their own, in
each of which all ranks must start collectives in one order: so a collective begins a stage only after all earlier ones
have begun it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from uneven.comm.exchange import Sizes, on_stream
from uneven.comm.group import Group
from uneven.comm.lost import SLICE_S, Lost
from uneven.comm.shared_memory import share
from uneven.comm.store import Forming, Store, under
from uneven.comm.torch_group import GlooGroup
from uneven.comm.work import GlooWork, Traffic, Work
from uneven.errors import GroupLostError

BUSY_SLICE_S = 0.002  # asleep at a time where something else is in flight that may have come further meanwhile
UP, NETWORK, DOWN, DONE = range(4)

Start = Callable[[Tensor, Group], Work]
Stage = tuple[Start, Group] | None  # None: this rank has no part in it


class _Collective:
    """A collective that was started, for `Work`; `stage` is the one it is in or has to begin."""

    def __init__(self, group: "HierarchicalGroup", tensor: Tensor, stages: Sequence[Stage]) -> None:
        self._group = group
        self._tensor = tensor
        self._stages = stages
        values = tensor.detach()
        self._flat = values.contiguous()
        self._back = None if values.is_contiguous() else values
        self.stage = UP
        self._running: Work | None = None
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self._done: torch.cuda.Event | None = None

    @property
    def begun(self) -> int:
        """The last stage that has begun."""
        return self.stage if self._running is not None or self.stage == DONE else self.stage - 1

    def advance(self, until: int) -> bool:
        """Begin and end stages, none after `until`, as far as possible without waiting; whether there were any."""
        before = self.begun
        with on_stream(self._stream):
            while self.stage < DONE and self._passes(until):
                self.stage += 1
                if self.stage == DONE:
                    self._end()
        return self.begun != before

    def sleep(self, seconds: float) -> None:
        """Until the stage has ended; over Gloo at most so long."""
        with on_stream(self._stream):
            if isinstance(self._running, GlooWork):
                self._running.wait_for(seconds)
            elif self._running is not None:
                self._running.wait()

    def wait(self) -> None:
        self._group.finish(self)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._tensor.device)
            if current != self._stream and self._done is not None:
                current.wait_event(self._done)

    def is_completed(self) -> bool:
        """Also when it has failed, which `wait` raises."""
        self._group.progress()
        if self.stage < DONE:
            return self._group.has_failed
        return self._done is None or self._done.query()

    def _passes(self, until: int) -> bool:
        """Whether the stage is over."""
        stage = self._stages[self.stage]
        if stage is None:
            return self.stage <= until
        if self._running is None:
            if self.stage > until:
                return False
            start, group = stage
            self._running = start(self._flat, group)
        if not self._running.is_completed():
            return False
        self._running.wait()  # the stream goes on where that of Gloo ends; raises what the stage has failed with
        self._running = None
        return True

    def _end(self) -> None:
        if self._back is not None:
            self._back.copy_(self._flat)
        if self._stream is not None:
            self._done = torch.cuda.Event()
            self._done.record(self._stream)


class HierarchicalGroup:
    """Collectives of host and CUDA tensors over several machines, at least one of which has several ranks.

    Life cycle: `join_machines` on all ranks at once, then `close`, which closes the groups made by `new_group` too. Any
    thread may call it, one at a time. When a collective has failed, all later ones fail.
    """

    backend = "cpu"
    has_cheap_host_sums = False

    def __init__(self, family: "_Family", up: Group | None, down: Group | None, network: GlooGroup | None) -> None:
        """`up` and `down`: None where this rank is alone on its machine. `network`: of a speaker alone."""
        self.rank = family.world.rank
        self.world_size = len(family.machines)
        self.generation = family.world.generation
        self.machines = list(family.machines)  # of the ranks: the order of sums, which a replay must have
        self.traffic = Traffic()
        self.network = network
        self._family = family
        self._up, self._down = up, down
        self._queue: deque[_Collective] = deque()
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._start(tensor, lambda t, up: up.reduce(t, 0), lambda t, net: net.all_reduce(t), _from_speaker)

    def all_reduce_max(self, tensor: Tensor) -> Work:
        return self._start(tensor, _max, _max, _from_speaker)

    def broadcast(self, tensor: Tensor, owner: int = 0) -> Work:
        machine, place = self._family.place(owner)
        is_here = machine == self._family.machine
        return self._start(
            tensor,
            (lambda t, up: up.broadcast(t, place)) if is_here else None,
            lambda t, net: net.broadcast(t, machine),
            None if is_here else _from_speaker,
        )

    def reduce(self, tensor: Tensor, owner: int) -> Work:
        machine, place = self._family.place(owner)
        is_here = machine == self._family.machine
        return self._start(
            tensor,
            lambda t, up: up.reduce(t, 0),
            lambda t, net: net.reduce(t, machine),
            _from_speaker if is_here and place else None,
        )

    def is_nccl(self, tensor: Tensor) -> bool:
        del tensor
        return False

    def new_group(self) -> "HierarchicalGroup":
        return self._family.form()

    def claim(self, count: int) -> int:
        return self._family.world.claim(count)

    def abort(self, why: str) -> None:
        self._family.abort(why)

    def close(self) -> None:
        self._family.close()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def outstanding(self) -> int:
        return len(self._queue)

    def finish(self, collective: _Collective) -> None:
        """Wait for a collective; those before it come first."""
        with self._lock:
            while collective.stage < DONE:
                self._family.lost.check()
                if self._error is not None:
                    raise self._error
                if not self._advance():
                    self._family.progress()  # [Note: stages]
                    self._sleep()

    def progress(self) -> None:
        """Whatever can be done without waiting; nothing where a thread is at it. What fails is raised by `wait`."""
        if self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()

    def _start(self, tensor: Tensor, up: Start | None, network: Start, down: Start | None) -> Work:
        stages = ((up, self._up), (network, self.network), (down, self._down))
        has_part = tensor.numel() > 0
        parts: list[Stage] = [
            (start, group) if has_part and start is not None and group is not None else None for start, group in stages
        ]
        collective = _Collective(self, tensor, parts)
        with self._lock:
            self._family.lost.check()
            self._queue.append(collective)
            self._advance()
        return Work(collective, tensor, self.traffic, self._family.lost)

    def _advance(self) -> bool:
        """Take all collectives as far as they come; whether that changed anything."""
        if self._error is not None or self._family.lost.error is not None:
            return False
        has_moved, until = False, DONE
        try:
            for collective in self._queue:
                has_moved |= collective.advance(until)
                until = min(until, collective.begun)
        except Exception as error:
            self._fail(error)
            return True
        while self._queue and self._queue[0].stage == DONE:
            self._queue.popleft()
        return has_moved

    def _sleep(self) -> None:
        try:
            self._queue[0].sleep(BUSY_SLICE_S if self._family.outstanding > 1 else SLICE_S)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """A lost rank is missing in all groups that were formed together: none of them waits for it."""
        self._error = self._error or error
        if isinstance(error, GroupLostError):
            self._family.lost.has_lost_peer = True
            self._family.lost.abort(str(error))


def _max(tensor: Tensor, group: Group) -> Work:
    return group.all_reduce_max(tensor)


def _from_speaker(tensor: Tensor, down: Group) -> Work:
    return down.broadcast(tensor, 0)


@dataclass
class _Family:
    """What the groups of one set of ranks have in common; `form` forms one more, on all ranks at once."""

    world: Group
    store: Store
    device: torch.device
    machines: tuple[int, ...]
    verify: bool
    sizes: Sizes | None
    forming: Forming
    lost: Lost
    local: Group | None = None  # the first group of this machine's ranks that was formed
    groups: list[HierarchicalGroup] = field(default_factory=list)

    @cached_property
    def ranks(self) -> list[list[int]]:
        """Of each machine."""
        numbers = dict.fromkeys(self.machines)
        return [[rank for rank, of in enumerate(self.machines) if of == number] for number in numbers]

    @cached_property
    def machine(self) -> int:
        """This rank's."""
        return self.place(self.world.rank)[0]

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's machine, and its number there; both counted from 0 in the order of ranks."""
        return next((machine, ranks.index(rank)) for machine, ranks in enumerate(self.ranks) if rank in ranks)

    @property
    def outstanding(self) -> int:
        """Collectives of this rank that are under way, in all groups."""
        return sum(group.outstanding for group in self.groups)

    def progress(self) -> None:
        for group in self.groups:
            group.progress()

    def form(self) -> HierarchicalGroup:
        self.lost.check()
        is_alone = len(self.ranks[self.machine]) == 1
        up, down = (None, None) if is_alone else (self._form_local(), self._form_local())
        network = None
        if self.world.rank == self.ranks[self.machine][0]:
            keys = under(f"hierarchy/network/{len(self.groups)}", self.store)
            network = GlooGroup(keys, self.machine, len(self.ranks), self.world.generation, self.forming)
            network.connect()
        group = HierarchicalGroup(self, up, down, network)
        self.groups.append(group)
        return group

    def abort(self, why: str) -> None:
        self.lost.abort(why)
        for group in self.groups:
            if group.network is not None:
                group.network.abort(why)
        if self.local is not None:
            self.local.abort(why)
        self.world.abort(why)

    def close(self) -> None:
        """A thread that waits in a group raises a moment later."""
        if self.lost.has_lost_peer:
            self.abort("a peer is gone")
        self.lost.close()
        for group in self.groups:
            if group.network is not None:
                group.network.close()
        self.groups.clear()
        if self.local is not None:
            self.local.close()
        self.world.close()

    def _form_local(self) -> Group:
        """One more group of the ranks of this machine."""
        if self.local is not None:
            return self.local.new_group()
        ranks = self.ranks[self.machine]
        keys = under(f"hierarchy/machine/{self.machine}", self.store)
        self.local = share(
            GlooGroup(keys, ranks.index(self.world.rank), len(ranks), self.world.generation, self.forming),
            keys,
            self.device,
            self.verify,
            self.sizes,
            ranks=ranks,
            meanwhile=self.progress,
            forming=self.forming,
        )
        if isinstance(self.local, GlooGroup):
            self.local.connect()
        return self.local


def join_machines(
    world: Group,
    store: Store,
    device: torch.device,
    machines: Sequence[int],
    verify: bool = False,
    sizes: Sizes | None = None,
    forming: Forming | None = None,
) -> HierarchicalGroup:
    """The group over several machines. `world` is one of all ranks, for claims, and closed with it.

    `machines` has each rank's machine, `device` is this rank's own. `verify`: messages through shared memory carry
    checksums.
    """
    lost = Lost()
    forming = (forming or Forming()).unless(lost)
    family = _Family(world, store, device, tuple(machines), verify, sizes, forming, lost)
    try:
        return family.form()
    except GroupLostError:
        family.close()
        raise
