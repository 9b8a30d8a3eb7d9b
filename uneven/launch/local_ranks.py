"""The ranks of this machine: their place among all ranks of a run, and their processes. No torch in this file.

Used by launch/launcher.py where all ranks are here, and by launch/nodes/lead.py and launch/nodes/node.py where each
machine starts its own. A node's launcher never loads torch: its ranks do.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from uneven.errors import MachineError
from uneven.hardware.cores import CorePlan, assign_cores, available_cores, check_count
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.mps import check_slices, oversubscribed, sliced
from uneven.hardware.preflight import check_device
from uneven.hardware.roster import Roster
from uneven.launch.cleanup import end_session, process_state
from uneven.launch.environment import BegunWithout, new_member_id
from uneven.machines.addresses import interface_of

if TYPE_CHECKING:
    from uneven.train.rank_info import Generation  # imports torch

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # where the launcher is lost, torch's store warns with frames of its own C++
# `-m` puts the current folder before all others. Where modules there are named like those beside the user's script, the
# ranks trained with the wrong ones. Before Python 3.11 launch/rank.py takes it away itself.
OWN_PATH = ["-P"] if sys.version_info >= (3, 11) else []


@dataclass(frozen=True)
class RunPlan:
    """All ranks of a run, and which of them are on this machine."""

    roster: Roster
    members: tuple[str, ...]  # one identity per rank
    store: tuple[str, int]
    machine: int = 0
    door: tuple[str, int, str] | None = None  # address, port and token of the leader's door
    address: str | None = None  # this machine's own, where there are several: Gloo and NCCL use its interface alone
    joins: int | None = None  # its ranks join a run in progress: the generation that they were added to
    without: BegunWithout | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.roster.ranks_of(self.machine)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(self.roster.devices[rank] for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """For a plan, or for a node: which knows the token and its own interface by itself."""
        return {
            **self.roster.to_json(),
            "members": list(self.members),
            "store": list(self.store),
            "machine": self.machine,
            "joins": self.joins,
        }

    @classmethod
    def from_json(
        cls, found: Mapping[str, Any], door: tuple[str, int, str] | None = None, address: str | None = None
    ) -> "RunPlan":
        host, port = found["store"]
        return cls(
            Roster.from_json(found),
            tuple(found["members"]),
            (host, port),
            found["machine"],
            door,
            address,
            found["joins"],
        )


@dataclass(frozen=True)
class Newcomer:
    """A process that was started to join a run: its identity, its device, and its machine's name in the roster."""

    member: str
    device: Device
    host: str


def own_devices(facts: Mapping[str, Any]) -> tuple[Device, ...]:
    """The devices in the facts of this machine; InputError or MachineError where one is not there or cannot train."""
    devices = parse_devices([str(device["device"]) for device in facts["devices"]])
    for device in devices:
        check_device(device)
    check_slices(devices)
    check_count(devices, available_cores())
    return devices


@dataclass(frozen=True)
class _Place:
    """Where a rank runs; one that is started again has that of the process that was lost."""

    device: Device
    cores: tuple[int, ...]
    threads: int
    began_as: int  # the process that had it at the start
    variables: Mapping[str, str]  # of its environment, beside those that every rank needs


class LocalRanks:
    """The rank processes of one run on this machine, by their numbers. `end()` leaves none behind.

    They are numbered from 0 in rank order; one that is started again (launch/watch/turnover.py) gets the number that
    its launcher chooses. Each is a command, not a fork or a spawned function: it works from an unguarded script, from
    `python -c`, from pytest and from a notebook.
    """

    def __init__(
        self,
        folder: Path,
        placement: RunPlan,
        cores: CorePlan,
        script: Mapping[str, Any] | None,
        variables: Sequence[Mapping[str, str]],
    ) -> None:
        """`variables` go into the environment of each rank's process."""
        self._folder, self._placement = folder, placement
        self._script = script
        self._places: dict[int, _Place] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        numbers = range(len(variables))
        places = map(_Place, placement.devices, cores.cores, cores.threads, numbers, variables)
        try:
            for number, (rank, place) in enumerate(zip(placement.ranks, places, strict=True)):
                self._start(number, placement, rank, place)
        except BaseException:
            self.end()
            raise

    def restart(self, lost: int, number: int, present: "Generation") -> Newcomer | None:
        """Start a lost process again, as another member that is to join; None where it is not of this machine."""
        if lost not in self._places:
            return None
        device, host = self._places[lost].device, present.roster.hosts[0]
        member = new_member_id(str(device), None if len(present.roster.hosts) == 1 else host)
        roster, members = present.roster.with_rank(device, host), (*present.members, member)
        plan = replace(self._placement, roster=roster, members=members, joins=present.number)
        self._start(number, plan, len(members) - 1, self._places[lost])
        self._remove_files(lost)
        return Newcomer(member, device, host)

    def _start(self, number: int, placement: RunPlan, rank: int, place: _Place) -> None:
        self._places[number] = place
        plan = {
            **placement.to_json(),
            "rank": rank,
            "door": placement.door,
            "address": placement.address,
            "without": None if placement.without is None else asdict(placement.without),
            "launcher_pid": os.getpid(),
            "cores": place.cores,
            "threads": place.threads,
            "began_as": place.began_as,
            "script": self._script,
        }
        (self._folder / f"plan-{number}.json").write_text(json.dumps(plan))
        # The user's modules must be found there as here; "" stands for the current folder.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # OpenMP reads its variables once, when torch is loaded.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(place.threads))
        env = {**QUIET, **os.environ, "PYTHONPATH": paths, **threads, **place.variables}
        command = [sys.executable, *OWN_PATH, "-m", "uneven.launch.rank", str(self._folder), str(number)]
        # A session of its own: the terminal's Ctrl-C is the launcher's to interpret.
        try:
            self._processes[number] = subprocess.Popen(command, env=env, start_new_session=True)
        except OSError as error:  # EAGAIN, ENOMEM
            raise MachineError(
                f"the process of rank {number} does not start ({error.strerror}): allow more processes ('ulimit -u', a "
                "container's --pids-limit), or use fewer devices"
            ) from error

    def _remove_files(self, number: int) -> None:
        """Of a process that was given up: a long run with many restarts must not fill the shared memory."""
        for name in (f"plan-{number}.json", f"pid-{number}", f"error-{number}.json", f"result-{number}"):
            path = self._folder / name
            rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    @property
    def numbers(self) -> list[int]:
        return list(self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def exit_codes(self) -> list[int | None]:
        """In the order of their numbers; None for one that runs."""
        return [self._look(process) for process in self._processes.values()]

    def stopped(self) -> set[int]:
        """Those that a signal has stopped: in code of the user's own a rank may be silent, but not like that."""
        return {number for number, process in self._processes.items() if process_state(process.pid) == "T"}

    def give_up(self, number: int) -> None:
        """End this one alone, also where it is stopped; its exit code follows."""
        process = self._processes[number]
        if self._look(process) is None:
            end_session(process.pid)
            process.kill()  # it may not lead a session of its own yet

    def end(self) -> None:
        for number in self._processes:
            self.give_up(number)
        for process in self._processes.values():
            process.wait()

    def _look(self, process: "subprocess.Popen[bytes]") -> int | None:
        was_running = process.returncode is None
        code = process.poll()
        if was_running and code is not None:
            end_session(process.pid)  # a dead rank's loader processes would wait for it
        return code


@contextmanager
def local_ranks(
    folder: Path, placement: RunPlan, script: Mapping[str, Any] | None, say: Callable[[list[str]], None]
) -> Iterator[LocalRanks]:
    """Start the ranks of this machine, in a private folder; when the block ends none of them is left."""
    devices = placement.devices
    cores = assign_cores(devices, available_cores())
    say([f"  {note}" for note in (cores.note, oversubscribed(devices)) if note])
    network = interface_variables(placement)
    for name, chosen in network.items():
        if (given := os.environ.get(name, chosen)).removeprefix("=") != chosen.removeprefix("="):
            say([f"  {name}={given} is not used: {chosen.removeprefix('=')} is on the way to the other machines"])
    with sliced(devices) as slices:
        processes = LocalRanks(folder, placement, cores, script, [network | own for own in slices])
        try:
            yield processes
        finally:
            processes.end()


def interface_variables(placement: RunPlan) -> dict[str, str]:
    """Gloo and NCCL stay on the interface that reached the leader, whatever the machine's name resolves to."""
    if placement.address is None:
        return {}
    name = interface_of(placement.address)
    family = "AF_INET6" if ":" in placement.address else "AF_INET"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "NCCL_SOCKET_FAMILY": family}
