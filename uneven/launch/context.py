"""The process context: which member this process is, how it reaches the others, and how it is asked to stop.

There is one per process, whoever started it: nobody (one device alone), `fit` as one of its rank processes, `uneven
run`, or another launcher: torchrun, Slurm, Kubernetes (external/variables.py). All of api/ and every rank process get
their Worker and group here. A script may train several times: each run has a group and keys in the launcher's store.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from uneven.comm.fingerprint import exchange
from uneven.comm.group import Group, SoloGroup
from uneven.comm.store import Store, get_text
from uneven.config import RunConfig, Task
from uneven.errors import InputError, RefusedError
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.gpus import usable_devices
from uneven.hardware.roster import Roster
from uneven.launch import newcomer
from uneven.launch.checks.parity import describe_order
from uneven.launch.checks.resume import content_lines
from uneven.launch.cleanup import reach_leader
from uneven.launch.environment import ALONE, LaunchEnvironment
from uneven.launch.external.meeting import assemble, await_all, tell_refusal
from uneven.launch.external.placement import Placement, name_devices, take_cores
from uneven.launch.external.variables import read_launcher
from uneven.launch.heartbeat import SIGNAL_KEY, STOP_KEY, Heartbeat, HeartbeatCalls, beat
from uneven.launch.membership import form_first_group, has_crowd
from uneven.launch.rank_place import RankPlace
from uneven.launch.run_status import Output, RunStatus, SharedProgress
from uneven.launch.signals import SIGNALS, RankSignal, Stoppable, first_received
from uneven.launch.visitor import Visitor
from uneven.launch.watch.peers import PeerWatch, watch_peers
from uneven.train.rank_info import RankInfo
from uneven.train.requests import GRACE_S, Requests
from uneven.train.worker import Worker

_contexts: list["ProcessContext"] = []


def process_context() -> "ProcessContext":
    """The context of this process, made on the first call."""
    if not _contexts:
        _contexts.append(make_context(read_launcher()))
    _contexts[0].was_used = True
    return _contexts[0]


def present_context() -> "ProcessContext | None":
    """That of a process which a launcher of ours has placed, or `uneven run` runs its script in; it makes none."""
    return _contexts[0] if _contexts else None


def make_context(
    started: LaunchEnvironment | None, settings: Mapping[str, Any] = MappingProxyType({})
) -> "ProcessContext":
    """The context of a process that another launcher started, or nobody; `settings` are those of `uneven run`."""
    context = ProcessContext(started or LaunchEnvironment(ALONE), settings=settings)
    if started is not None:
        context.handle_signals()
    return context


def set_process_context(context: "ProcessContext") -> None:
    """Called once in a rank process, before the user's script or functions run in it."""
    assert all(known.is_alone for known in _contexts), "a process is one rank"
    _contexts[:] = [context]


def command_line_settings() -> Mapping[str, Any]:
    """The settings `uneven run` was given, which take precedence over the script's; empty in any other process."""
    return process_context().settings


class ProcessContext:
    """Life cycle: one per process, to its end. A run is `begin_run`, `make_worker`, training, `end_run`.

    One run at a time, except in a process alone, where runs share nothing.
    """

    def __init__(
        self,
        environment: LaunchEnvironment,
        roster: Roster | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
        *,
        joins: int | None = None,
    ) -> None:
        """`roster` is given where the launcher has placed the ranks already; `settings` by `uneven run`.

        `joins`: the generation of a run in progress that this process was added to, in `roster`.
        """
        self.ranks = RankPlace(environment, roster, joins=joins)
        self.settings = settings
        self.visitor = Visitor()  # sees what the script is about to train
        self.stop_requested = threading.Event()
        self.is_terminated = False  # the stop request is a SIGTERM
        self.signals: dict[int, RankSignal] = {}  # in a rank process of ours
        self.was_used = False  # whether the script has called uneven: every entry point asks for the context
        self.notes: list[str] = []  # about the cores and the network of this rank
        self.status = RunStatus()  # the figures of the current run
        self._placement: Placement | None = None  # under another launcher, once its ranks have met
        self._is_placed = roster is not None
        self._rank_info: RankInfo | None = None  # of the current run
        self._worker: Worker | None = None
        self._requests: Requests | None = None  # to the current run
        self.leader = reach_leader(environment.door)
        self._runs = self._shared = 0  # runs, and values that the ranks have told each other outside of them
        self._heartbeat: Heartbeat | None = None
        self._peers: PeerWatch | None = None  # under another launcher
        self._output: Output | None = None  # of the current run, where it is over several machines
        self._progress: SharedProgress | None = None

    @contextmanager
    def shown_to(self, visitor: Visitor) -> Iterator[None]:
        """What a script is about to train inside is shown to this visitor, which leaves it there."""
        before, self.visitor = self.visitor, visitor
        try:
            yield
        finally:
            self.visitor = before

    @property
    def is_alone(self) -> bool:
        """Whether nobody started this process as a rank: it may start ranks itself."""
        return self.environment.launcher == ALONE

    @property
    def tree_pid(self) -> int:
        """The process whose descendants belong to the run: this one alone, else the launcher of all ranks."""
        # In a container the rank may be the first process.
        return os.getpid() if self.is_alone or os.getppid() <= 1 else os.getppid()

    @property
    def environment(self) -> LaunchEnvironment:
        return self.ranks.environment

    @property
    def member(self) -> str:
        return self.environment.member

    @property
    def rank(self) -> int:
        """In the current run; before the first one as the launcher numbered the processes."""
        return self.environment.rank if self._rank_info is None else self._rank_info.rank

    def devices(self, setting: str) -> tuple[Device, ...]:
        """One device per rank, in rank order. Under another launcher 'auto' is what each finds on its own machine."""
        if self.ranks.roster is not None:
            if self._rank_info is None and self._heartbeat is not None:
                self.ranks.catch_up()
            return self.ranks.roster.devices
        if self.is_alone:
            return tuple(usable_devices()) if setting == "auto" else parse_devices(setting)
        named = () if setting == "auto" else name_devices(setting, self.environment)
        devices = named or self.placement.auto_devices()
        self._place(devices)
        return devices

    @property
    def placement(self) -> Placement:
        """Under another launcher: who is where. The ranks meet when it is first asked for, and agree how they speak."""
        if self._placement is None:
            environment, self._placement, notes = assemble(self.environment)
            self.ranks.met(environment)
            self.notes += notes
        return self._placement

    def of_this_machine(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Those of `devices` that belong to ranks of this machine."""
        return tuple(devices[rank] for rank in self.roster_of(devices).local_ranks(self.environment.rank))

    def roster_of(self, devices: tuple[Device, ...]) -> Roster:
        """On which machines these devices, one per rank, are."""
        if self.ranks.roster is not None and self.ranks.roster.devices == devices:
            return self.ranks.roster
        return self.placement.roster(devices) if self.environment.is_external else Roster.on_one_machine(devices)

    def is_crowded(self, devices: tuple[Device, ...]) -> bool:
        """Whether two ranks of any machine have the same GPU; all ranks come to the same answer."""
        if self.environment.is_external:
            return self.placement.is_crowded(devices)
        return has_crowd(self.roster_of(devices))

    def begin_run(self, requests: Requests) -> None:
        """From now on a stop request goes to `requests`; without a run it interrupts the script."""
        self._refuse_second_group()
        self._requests = requests
        self.ranks.begin_run()
        beat(self._heartbeat)
        if self.stop_requested.is_set():
            requests.terminate() if self.is_terminated else requests.stop.set()

    def make_worker(
        self,
        task: Task,
        config: RunConfig,
        devices: tuple[Device, ...],
        requests: Requests,
        output: Output,
        *,
        can_lose: bool = True,
    ) -> Worker:
        """The Worker of this rank; its group forms when it joins. `can_lose`: it can go on where others are lost."""
        config = self.settings_of_run(config)
        rank_info = self.make_rank_info(devices)
        report = self.status.begin(output, rank_info, config.out, is_newcomer=self.ranks.is_newcomer)
        self._output = output if report.is_shared else None

        def join(model: nn.Module) -> Group:
            return self.join(model, rank_info, config, [*describe_order(worker), *content_lines(config)], report.say)

        def enter() -> None:
            self._runs, self._rank_info = self._runs + 1, rank_info

        worker = self._worker = Worker(task, config, rank_info, join, requests, report)
        if can_lose and config.on_fault == "go-on" and self._has_watch(rank_info):
            run = self._runs + 1
            membership = self.ranks.join(
                run,
                rank_info,
                config,
                output,
                facts=newcomer.describe_run(self.environment, run, worker, self._shared),
                before_enter=partial(newcomer.check_newcomer, self.environment, worker),
                on_entered=enter,
            )
            worker.use_membership(membership)
        return worker

    def settings_of_run(self, config: RunConfig) -> RunConfig:
        """Those of the run for a process that joins it, once it has begun, or RefusedError; else `config` itself."""
        if self.ranks.is_newcomer:
            facts = newcomer.await_facts(self.environment.connect(""))
            self._shared = facts["shared"]
            return newcomer.adopt_settings(config, facts)
        return config

    def _has_watch(self, rank_info: RankInfo) -> bool:
        """Whether a launcher of ours watches over several ranks, or over one that others may join by its door."""
        return self.environment.is_launched and (rank_info.world_size > 1 or self.environment.door is not None)

    def close_run(self) -> None:
        """The run has its result: nobody can join it any more."""
        self.ranks.note_result()
        if self._rank_info is not None and self._has_watch(self._rank_info) and self.rank == 0:
            self.environment.write("", lambda store: newcomer.announce_run(store, self._runs, newcomer.OVER))

    def make_rank_info(self, devices: tuple[Device, ...] | None = None) -> RankInfo:
        """This member's place in the next run; without `devices` (training by hand) on CPUs or as placed."""
        placed = None if self.ranks.roster is None else self.ranks.roster.devices
        devices = devices or placed or (Device("cpu"),) * self.environment.world_size
        roster = self.roster_of(devices)
        info = RankInfo(
            self.environment.rank,
            devices,
            roster=roster,
            member=self.member,
            leader=self.leader,
            is_newcomer=self.ranks.is_newcomer,
        )
        without = None if self._runs else self.environment.without  # of its later runs that is past
        info.begin_in(self.ranks.generation, "" if without is None else without.why)
        return info

    def join(
        self,
        model: nn.Module,
        rank_info: RankInfo,
        config: RunConfig | None = None,
        data: Sequence[str] = (),
        say: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> Group:
        """Compare settings, data and model with the other ranks, then form the group, which `rank_info` holds.

        InputError on every rank where they differ. Without `config` the model is trained by hand, through host memory.
        `say` prints what differs although it may."""
        self._refuse_second_group()
        if self.ranks.is_newcomer:
            raise RefusedError(f"{newcomer.CANNOT_BE_JOINED}: {newcomer.BY_HAND}")
        self._runs += 1
        is_single, is_crowded = rank_info.world_size == 1, config is not None and self.is_crowded(rank_info.devices)
        if self.environment.is_external and not is_single:
            await_all(self.environment.connect(f"run/{self._runs}"), rank_info.rank, rank_info.world_size)
            self._peers = watch_peers(self.environment, self._runs, rank_info, self.show)
        first = (self.environment, self._runs, rank_info, model, config, data, say, is_crowded)
        has_watch = self._has_watch(rank_info)
        rank_info.join(SoloGroup() if is_single and not has_watch else form_first_group(*first))
        if rank_info.rank == 0 and has_watch:
            why_not = newcomer.why_not_joined(config, self._worker)
            newcomer.announce_run(self.environment.connect(""), self._runs, why_not)
        if not rank_info.roster.is_one_machine:
            store = self.environment.connect(f"run/{self._runs}/clock")
            rank_info.read_clocks(store)
        if self._output is not None:
            store = self.environment.connect(f"run/{self._runs}/progress")
            self._progress = SharedProgress(store, rank_info, self._output, self.show)
        self._rank_info = rank_info
        if self.ranks.membership is not None:
            self.ranks.membership.joined(rank_info.group)
        return rank_info.group

    def share(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. All ranks call it at the same points of the script; values are JSON."""
        self._shared += 1
        rank, size = self.environment.rank, self.environment.world_size
        store = self.environment.connect(f"share/{self._shared}")
        if self.environment.is_launched:
            self.ranks.await_peers(store)
        await_all(store, rank, size, self.environment.connect(f"run/{self._runs + 1}"))  # where tell_failure writes
        return exchange(store, "value", rank, range(size), value)

    def _refuse_second_group(self) -> None:
        if self._rank_info is not None and not self.is_alone:
            raise InputError(
                "another group of this process is still open: call finish() on the loop, or close() on what Ddp.wrap "
                "gave, before the next one starts"
            )

    def end_run(self) -> None:
        """The run is over or has failed: close its group, if it has one."""
        self.leave_group()
        self.end_saving(self._requests)

    def leave_group(self) -> None:
        """Training is over. A stop request still goes to the run until its results are saved, and `end_saving` says so:
        a rank stops with its peers, and hears of the request up to a heartbeat later."""
        for connection in (self._peers, self.leader, self._progress):
            if connection is not None:
                connection.close()
        self._peers = self._progress = self._output = None
        self.status.leave(self._worker)
        rank_info, self._rank_info = self._rank_info, None
        worker, self._worker = self._worker, None
        self.ranks.leave_run(worker, has_formed=rank_info is not None)
        if rank_info is not None:
            rank_info.group.close()

    def end_saving(self, requests: Requests | None) -> None:
        """The run of these requests has saved its results, or failed."""
        if self._requests is requests:
            self._requests = None
            beat(self._heartbeat)

    def start_heartbeat(self, read_status: Callable[[], dict[str, Any]], on_orphaned: Callable[[], None]) -> None:
        """Send this rank's status to the launcher, and obey its stop request; `read_status` adds to what is sent."""
        calls = HeartbeatCalls(
            read_status=lambda: {**self.show(), **read_status()},
            on_stop=self.request_stop,
            on_orphaned=on_orphaned,
            on_save=self.request_save,
            read_signal=lambda: first_received(self.signals),
            on_generation=self.ranks.hear,
            on_leave=self.ranks.leave,
        )
        store = self.environment.connect("")
        self._heartbeat = Heartbeat(store, self.member, calls, is_guest=self.ranks.is_guest)

    def show(self) -> dict[str, Any]:
        """Who this rank is and where; called from a heartbeat's thread at any moment."""
        worker = self._worker
        where = {**self.status.last(), **self.ranks.show()} if worker is None else self.status.show(worker)
        known = {"member": self.member, "rank": self.rank, "has_trained": self.has_trained}
        return {**known, "in_run": self._requests is not None, **where}

    @property
    def has_trained(self) -> bool:
        """Whether the script has trained a step since this process began; by hand as soon as it may have."""
        if self._worker is None:
            return self.ranks.has_trained or self._rank_info is not None
        return self.ranks.has_trained or self._worker.has_trained

    @property
    def slot(self) -> int:
        """The last one that was trained, in this run or the one before."""
        return self.ranks.slot if self._worker is None else self._worker.engine.state.trained

    def close_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()

    def is_stop_requested(self) -> bool:
        """Asks the store too: the launcher's request may not have reached this rank's heartbeat yet."""
        return self.stop_requested.is_set() or get_text(self.environment.connect(""), STOP_KEY) is not None

    def request_stop(self, is_terminated: bool = False) -> None:
        """The current run ends after its step; without one the script is interrupted. On a heartbeat's thread."""
        self.is_terminated |= is_terminated
        self.stop_requested.set()
        if (requests := self._requests) is not None:
            requests.terminate() if is_terminated else requests.stop.set()
        elif (own := self.signals.get(signal.SIGTERM if is_terminated else signal.SIGINT)) is not None:
            own.interrupt()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # no flag: it ends a sleep or read

    def request_save(self) -> None:
        """A checkpoint of the current run, as `Run.checkpoint` asks for it in the launcher."""
        if (requests := self._requests) is not None and self.rank == 0:  # one rank's wish is enough
            requests.save.set()

    def handle_signals(self) -> None:
        """Under another launcher, to the end of the process: while no run is on, a signal ends the script."""
        between_runs = Stoppable(lambda: GRACE_S, lambda _: None, lambda: True, is_cut_by_second=False)
        SIGNALS.add(between_runs, signal.SIGTERM, signal.SIGINT)

    def stoppable(self, requests: Requests, may_leave: Callable[[], bool] = lambda: False) -> Stoppable:
        """A run of this process, for the signals that it gets: alone, or under another launcher."""

        def stop(number: int) -> None:
            if not self.is_alone:
                if number == signal.SIGTERM:
                    # Before this rank stops: where the others look when the run is over, there is why.
                    self._write("", lambda store: store.set(SIGNAL_KEY, str(int(number))))
                self.is_terminated |= number == signal.SIGTERM
                self.stop_requested.set()
            requests.signalled(number)

        return Stoppable(lambda: requests.grace, stop, may_leave, is_cut_by_second=self.is_alone)

    @property
    def gets_signals(self) -> bool:
        """Whether signals to this process are its own to handle. Those to our rank processes are the launcher's."""
        return self.is_alone or self.environment.is_external

    def tell_failure(self, error: BaseException) -> None:
        """This rank's run has failed: ranks that wait for it at the start of the run end with the same words."""
        if self._rank_info is None and isinstance(error, Exception):
            rank = self.environment.rank
            host = "" if self._placement is None else self._placement.hosts[self._placement.machines[rank]]
            self._write(f"run/{self._runs + 1}", lambda store: tell_refusal(store, rank, host, error))

    def _write(self, name: str, write: Callable[[Store], None]) -> None:
        """Write to the store that the ranks share, if they have met."""
        if self._placement is not None and self.environment.world_size > 1:
            self.environment.write(name, write)

    def _place(self, devices: tuple[Device, ...]) -> None:
        """Another launcher gives every rank all cores and one thread: take this rank's own cores instead."""
        if self._is_placed:
            return
        self._is_placed = True
        self.notes += take_cores(self.placement, self.environment.rank, devices)
