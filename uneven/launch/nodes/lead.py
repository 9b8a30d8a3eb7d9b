"""`uneven run --nodes`: this machine leads a run over several. It opens the door, waits, starts everybody, watches.

The leader is a machine of the run like the others, with the first ranks. The store lives in this process, at the
door's address. Ranks form their groups by themselves; what goes over the machines' own connections is the start, signs
of life, exit codes and the end. However the run ends, every machine is told, and none keeps a process.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.errors import InputError, MachineError, RefusedError, Terminated
from uneven.hardware.device import Device, parse_device, parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.control.listing import Listing, listed, new_run_id
from uneven.launch.environment import new_member_id
from uneven.launch.find_script import Script
from uneven.launch.local_ranks import Newcomer, RunPlan, local_ranks, own_devices
from uneven.launch.nodes.gathering import Gathering, has_all
from uneven.launch.nodes.remote import AllRanks, RemoteNode, end_sessions
from uneven.launch.script import check_script, refuse_plain_script, run_stoppable, script_order, unused_ranks
from uneven.launch.signals import Stoppable, terminated_while_waiting
from uneven.machines import table
from uneven.machines.addresses import choose_address, host_label, unique_labels
from uneven.machines.code import script_digests
from uneven.machines.door import Door, listen
from uneven.machines.facts import collect_facts
from uneven.machines.file_service import FileService
from uneven.machines.hosts import StartedHosts
from uneven.machines.links import Listener, Peer, judge, reach
from uneven.machines.options import LeadOptions
from uneven.machines.wire import WireError
from uneven.results.progress import Reporter
from uneven.train.requests import Requests

if TYPE_CHECKING:
    from uneven.launch.watch.generations import Generations  # imports torch
    from uneven.train.rank_info import Generation

REACH_S = 20.0
WAITING = "waiting for machines"  # the phase that `uneven status` shows
CHECKED = "all checks are passed; nothing was trained"


def lead_script(
    script: Script, settings: Mapping[str, Any], options: LeadOptions, *, is_check: bool = False
) -> dict[str, Any]:
    """Train the script on this machine and on those that join. Errors and exit codes as `run_script` has them.

    `is_check`: all of it up to the start of the ranks, for `uneven preflight`. Returns what was found about the
    machines, as plain JSON.
    """
    check_script(script, settings)
    refuse_plain_script(script, options.fewest, "machine")
    named = settings.get("devices", "auto")
    names = ("auto",) if named == "auto" else [str(one) for one in parse_devices(named)]
    facts = collect_facts(script_digests(script.path, script.folder, script.package), names)
    devices = own_devices(facts)
    address = choose_address(options.bind)
    reporter = Reporter("lines")
    option = "--ports" if options.port is None else "--port"
    door = Door(listen(address, options.door_ports, option), options.token)
    leader = Leader(script, settings, options, door, facts, reporter)
    gathering = Gathering(door, options, leader.order, facts, lambda line: reporter.say([line]))
    announce = partial(_announce, door, options, devices, reporter)
    with terminated_while_waiting() as waiting:
        if is_check:
            return _lead(leader, gathering, door, options, announce, None)
        with listed(Listing(str(script.path.resolve()), run_id=leader.order["run"])) as listing:
            listing.attach(reporter)
            listing.show({"phase": WAITING})
            train = partial(leader.run, gathering, devices, listing, waiting)
            return _lead(leader, gathering, door, options, announce, train)


def _lead(
    leader: "Leader",
    gathering: Gathering,
    door: Door,
    options: LeadOptions,
    announce: Callable[[], None],
    train: Callable[[], None] | None,
) -> dict[str, Any]:
    """From the open door to the end of the run; `train` when the machines are there, None where that was all."""
    hosts: StartedHosts | None = None
    reason, code = "", 0
    door.open({"node": gathering.receive, "files": FileService(lambda line: leader.reporter.say([line])).handle})
    try:
        announce()
        if options.hosts:
            hosts = StartedHosts(options.hosts, door.place, options.token, options.ssh)
        leader.check(gathering.wait(hosts))
        if train is None:
            reason = CHECKED
        else:
            train()
        return leader.found
    except BaseException as error:
        reason, code = describe_end(error)
        raise
    finally:
        gathering.close()
        end_sessions(gathering.sessions, reason, code)
        door.close()
        if hosts is not None:
            hosts.end()


def describe_end(error: BaseException) -> tuple[str, int]:
    """What the other machines are told: why the run is over, and the exit code that they share with the leader."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", 130
    if isinstance(error, Terminated):
        return "stopped by SIGTERM", 143
    code = error.exit_code if isinstance(error, InputError | MachineError) else 1
    why = str(error).partition("\n\nTraceback")[0]  # which the leader shows
    return why or type(error).__name__, code


class Leader:
    """One run over machines: `check` and `run` once each, when they are there."""

    def __init__(
        self,
        script: Script,
        settings: Mapping[str, Any],
        options: LeadOptions,
        door: Door,
        facts: Mapping[str, Any],
        reporter: Reporter,
    ) -> None:
        self._options = options
        self._door = door
        self.reporter = reporter
        self._script = script_order(script, {k: v for k, v in settings.items() if k != "devices"})
        self._own, self._facts = str(facts["host"]), facts
        self.hosts: tuple[str, ...] = ()
        self.found: dict[str, Any] = {}
        where = script.path.resolve()
        is_below = where.is_relative_to(Path.cwd())
        self.order = {
            **self._script,
            "script": where.relative_to(Path.cwd()).as_posix() if is_below else str(where),
            "host": self._own,
            "ports": options.ports,
            "run": new_run_id(),
            "code": facts.get("code", {}),
        }

    def check(self, nodes: Sequence[RemoteNode]) -> None:
        """Reach test, and all that is known about the machines as one table; RefusedError where one is not reached."""
        self.hosts = unique_labels([self._own, *(node.host for node in nodes)])
        for node, host in zip(nodes, self.hosts[1:], strict=True):
            node.host = host
        reports = self._reach_all(nodes, self.hosts)
        facts = [{**self._facts, "host": self._own}, *({**node.facts, "host": node.host} for node in nodes)]
        self.found = {"machines": facts, "links": reports}
        self.reporter.say([f"  {line}" for line in table.lines(facts, reports)])
        self.reporter.say([f"  {line}" for one in facts for line in table.warnings(one)])

    def run(self, gathering: Gathering, own: tuple[Device, ...], listing: Listing, waiting: Stoppable) -> None:
        """Roster, store, start; returns when all ranks have ended well. `waiting` is what signals meant until now."""
        hosts, nodes = self.hosts, gathering.nodes
        counts = [len(own), *(len(node.devices) for node in nodes)]
        machines = tuple(number for number, count in enumerate(counts) for _ in range(count))
        devices = (*own, *(parse_device(name) for node in nodes for name in node.devices))
        roster = Roster(devices, machines, hosts)
        names = "  ".join(f"{host}: {count}" for host, count in zip(hosts, counts, strict=True))
        self.reporter.say([f"  {len(hosts)} machines with {len(devices)} ranks ({names})"])
        self._script["settings"]["devices"] = ",".join(map(str, devices))
        listing.show({})  # nobody is waited for any more
        train = partial(self._train, gathering, roster, listing)
        run_stoppable(train, self._script, len(devices), self.reporter, waiting)

    def _reach_all(self, nodes: Sequence[RemoteNode], hosts: Sequence[str]) -> list[dict[str, Any]]:
        """Every machine to every other, before anything is started; RefusedError where one cannot."""
        listener = Listener(self._door.address, self._options.token, self._options.ports)
        try:
            places = [(self._door.address, listener.port), *((node.session.address, node.port) for node in nodes)]
            peers = [Peer(host, address, port) for host, (address, port) in zip(hosts, places, strict=True)]
            for number, node in enumerate(nodes, 1):
                as_json = [[peer.host, peer.address, peer.port] for peer in peers]
                node.session.send(reach=as_json, machine=number)
            reports = [
                reach(0, peers, listener, self._options.token),
                *(_reached(node, number) for number, node in enumerate(nodes, 1)),
            ]
        finally:
            listener.close()
        if differences := judge(peers, reports, self._options.skip):
            raise RefusedError(str(differences[0]))
        return reports

    def _train(self, gathering: Gathering, roster: Roster, listing: Listing, requests: Requests) -> int:
        """Start all ranks and watch them; returns how many never called uneven."""
        nodes = gathering.nodes
        # The ranks may knock before the store answers: all processes load torch at the same time, this one too.
        listener = listen(self._door.address, self._options.ports)
        members = tuple(
            new_member_id(str(device), roster.hosts[machine])
            for device, machine in zip(roster.devices, roster.machines, strict=True)
        )
        place = (self._door.address, int(listener.getsockname()[1]))
        for machine, node in enumerate(nodes, 1):
            placement = RunPlan(roster, members, place, machine)
            node.place(placement.ranks)
            node.session.send(go=placement.to_json(), settings=self._script["settings"])
        door = (self._door.address, self._door.port, self._options.token)
        own = RunPlan(roster, members, place, 0, door, self._door.address)
        folder = listing.folder
        store: Any = None
        try:
            with local_ranks(folder, own, self._script, self.reporter.say) as processes:
                from uneven.comm.store import open_store  # imports torch
                from uneven.launch.watch.generations import Generations
                from uneven.launch.watch.watch import Watch

                store, _ = open_store(listener)
                for node in nodes:
                    node.watch()
                late = Late(self._options, place, self._script["settings"], self.reporter)
                ranks = AllRanks(processes, nodes, folder, requests, gathering.arrived, late.start)
                gathering.open_again(partial(self._check_late, place))

                def hear(statuses: Sequence[Mapping[str, Any]], generations: "Generations") -> None:
                    if listing.hear(statuses, generations):
                        ranks.tell(listing.last)  # the other machines keep it, too

                generations = Generations(roster, members)
                Watch(ranks, store, folder, generations, self.reporter).wait(requests, hear)
                listing.show_last()
                ranks.tell(listing.last)
                return unused_ranks(folder)
        finally:
            self.reporter.leave_bars()
            listing.clear()
            del store

    def _check_late(self, place: tuple[str, int], node: RemoteNode) -> None:
        """RefusedError where a machine cannot join the current run; on a thread of the door."""
        from uneven.comm.store import reach_store  # imports torch
        from uneven.launch.newcomer import CANNOT_BE_JOINED, why_closed

        if (why := why_closed(reach_store(*place))) is not None:
            raise RefusedError(f"{CANNOT_BE_JOINED}: {why}")
        self._reach_all([node], (self._own, node.host))


class Late:
    """Machines that join a run in progress; `start` is called by the watch's thread (launch/nodes/remote.py)."""

    def __init__(
        self, options: LeadOptions, place: tuple[str, int], settings: Mapping[str, Any], reporter: Reporter
    ) -> None:
        self._options = options
        self._place = place
        self._settings = settings
        self._reporter = reporter
        self._nodes: list[RemoteNode] = []

    def start(self, node: RemoteNode, number: int, present: "Generation") -> list[Newcomer]:
        """Have its ranks started, as processes from this number on; none where the run has machines enough."""
        waiting = [other.host for other in self._nodes if other.has_place]
        labels = list(dict.fromkeys([*present.roster.hosts, *waiting]))
        if len(labels) >= self._options.most:
            node.session.send(refused=has_all(self._options.most))
            self._reporter.say([f"  {node.name} was refused: {has_all(self._options.most)}"])
            return []
        node.host = unique_labels([*labels, node.host])[-1]
        roster, newcomers = present.roster, list[Newcomer]()
        for device in parse_devices(list(node.devices)):
            roster = roster.with_rank(device, node.host)
            newcomers.append(Newcomer(new_member_id(str(device), node.host), device, node.host))
        members = (*present.members, *(newcomer.member for newcomer in newcomers))
        plan = RunPlan(roster, members, self._place, roster.machines[-1], joins=present.number)
        node.place(range(number, number + len(newcomers)))
        node.session.send(go=plan.to_json(), settings=self._settings)
        node.watch()
        self._nodes.append(node)
        self._reporter.say([f"  {node.name} is here with {','.join(node.devices)}, and joins when it is ready"])
        return newcomers


def _reached(node: RemoteNode, number: int) -> dict[str, Any]:
    """What it says about its links; it speaks for no other machine."""
    try:
        return {**node.session.expect("reached", timeout_s=REACH_S)["reached"], "machine": number}
    except WireError as error:
        raise RefusedError(f"{node.name} was lost before the start: {error}") from error


def _announce(door: Door, options: LeadOptions, devices: Sequence[Device], reporter: Reporter) -> None:
    """The one line for the other machines. A token that the user gave is known to the user, and is not repeated; one
    that was made is printed, and in no log."""
    token = f" --token {options.token}" if options.shows_token else ""
    lines = [f"uneven: {host_label()} leads with {','.join(map(str, devices))} at {door.address}"]
    if not options.hosts:
        known = "" if options.shows_token else " (with the token that was given here)"
        lines += [f"on {options.others}, in the script's folder{known}:", f"  uneven join {door.place}{token}"]
    reporter.say(
        lines, [line.removesuffix(token) + " --token ..." * line.endswith(token) for line in lines] if token else None
    )
