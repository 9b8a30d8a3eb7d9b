"""What ranks tell each other before they train, and where all of them refuse together.

Called by launch/checks/preflight.py and, before a group forms, by launch/membership.py. On one machine only settings
and models are compared: all ranks read the same files on the same system. Every rank raises the same RefusedError,
because all of them judge the same answers.
"""

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uneven.comm.fingerprint import agree, describe_tensors, exchange
from uneven.comm.store import Store
from uneven.config import Precision, RunConfig, Task
from uneven.data.fingerprint import compare_data, describe_data
from uneven.errors import RefusedError
from uneven.hardware.device import Device
from uneven.hardware.roster import Roster
from uneven.launch.environment import LaunchEnvironment
from uneven.machines.code import script_digests
from uneven.machines.facts import collect_facts
from uneven.machines.links import Listener, Peer, judge, reach
from uneven.machines.parity import Difference, compare, notes
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

SHARED_S = 5.0  # between two readings of clocks after an exchange, on a busy machine
CLOSE = 1e-5  # relative: random numbers of two processors differ in their last bits
# Settings that may differ between ranks: only the first rank writes and prints, and the folders that others read may
# have other paths on other machines; what is in them is compared (launch/checks/resume.py `content_lines`).
PER_RANK_SETTINGS = ("out", "overwrite", "progress", "resume", "replay")


@dataclass(frozen=True)
class Among:
    """A rank among those of several machines. `share` posts a value and returns every rank's, in rank order."""

    roster: Roster
    rank: int
    share: Callable[[Any], list[Any]]

    @property
    def local(self) -> tuple[Device, ...]:
        """The devices of this machine."""
        return tuple(self.roster.devices[rank] for rank in self.roster.local_ranks(self.rank))


@dataclass(frozen=True)
class DeviceFormat:
    """What the device of one rank computes natively, and what precision='auto' would choose on it alone."""

    device: str
    auto: Precision
    why: str
    native: tuple[str, ...]
    host: str = ""  # on several machines

    @property
    def label(self) -> str:
        return f"{self.device} on {self.host}" if self.host else self.device


def exchange_devices(own: DeviceFormat, is_crowded: bool, has_nccl: bool, among: Among) -> "Devices":
    """What every rank's device computes, whether ranks of any machine share a GPU, and whether all have NCCL."""
    posted = among.share({"format": asdict(own), "crowded": is_crowded, "nccl": has_nccl})
    formats = [DeviceFormat(**{**one["format"], "host": among.roster.host(r)}) for r, one in enumerate(posted)]
    return Devices(formats, any(one["crowded"] for one in posted), all(one["nccl"] for one in posted))


@dataclass(frozen=True)
class Devices:
    """What is known about the devices of all ranks."""

    formats: Sequence[DeviceFormat]
    is_crowded: bool
    has_nccl: bool


def check_formats(precision: Precision, formats: Sequence[DeviceFormat], skip: Sequence[str] = ()) -> None:
    """RefusedError for a format that some machines compute and others only emulate, many times slower."""
    lacking = [one for one in formats if precision not in one.native]
    if precision in ("auto", "fp32") or "dtype" in skip or not 0 < len(lacking) < len(formats):
        return
    first = lacking[0]
    native = next(one for one in formats if precision in one.native)
    raise RefusedError(
        f"{first.host}: precision={precision!r} on {first.device} is not native ({first.why}), on {native.host} it is; "
        "use precision='auto' (--precision auto) or 'fp32', or leave that device out"
    )


def check_facts(config: RunConfig, among: Among) -> list[str]:
    """RefusedError where a machine does not fit the first one; lines about what differs and may.

    For ranks that torchrun, Slurm or Ray started: where a leader did, it has compared them at its door.
    """
    script = Path(sys.argv[0])
    is_speaker = among.roster.local_ranks(among.rank)[0] == among.rank
    code = script_digests(script, script.resolve().parent) if is_speaker and script.is_file() else {}
    own = collect_facts(code, list(map(str, among.local))) if is_speaker else None
    found = [
        {**facts, "host": among.roster.host(rank)} for rank, facts in enumerate(among.share(own)) if facts is not None
    ]
    clocks = among.share(time.time())  # all have been here a moment ago, so these were read at about the same time
    clocks = [clocks[among.roster.ranks_of(machine)[0]] for machine in range(len(found))]
    leader, *others = ({**facts, "clock": clock} for facts, clock in zip(found, clocks, strict=True))
    skip, precision = config.skipped_checks, config.precision
    for other in others:
        differences = compare(
            leader, other, round_trip_s=SHARED_S, skip=skip, precision=precision, backend=config.backend
        )
        refuse(differences)
    return [f"  note: {note}" for other in others for note in notes(leader, other)]


def check_links(config: RunConfig, among: Among, environment: LaunchEnvironment) -> None:
    """RefusedError where two machines do not reach each other, both ways: Gloo would wait for half an hour, in silence.

    For ranks that another launcher started, as `check_facts`.
    """
    if "links" in config.skipped_checks:
        return
    roster, rank = among.roster, among.rank
    speakers = [roster.ranks_of(machine)[0] for machine in range(len(roster.hosts))]
    token = str(among.share(secrets.token_hex(16) if rank == 0 else None)[0])
    address = environment.address
    listener = Listener(address, token) if rank in speakers else None
    try:
        ports = among.share(None if listener is None else [address, listener.port])
        peers = []
        for speaker in speakers:
            place, port = ports[speaker]
            peers.append(Peer(roster.host(speaker), place, port))
        report = None if listener is None else reach(roster.machines[rank], peers, listener, token)
        reports = among.share(report)  # nobody closes before all have tried
    finally:
        if listener is not None:
            listener.close()
    found = judge(peers, [reports[speaker] for speaker in speakers], config.skipped_checks)
    if found and (doubts := list(filter(None, among.share(environment.doubt)))):
        raise RefusedError(doubts[0])
    refuse(found)


def check_data_parity(task: Task, config: RunConfig, among: Among) -> list[str]:
    """RefusedError where a machine has other data than rank 0's; lines about what could not be compared.

    One rank of each machine reads it.
    """
    if "data" in config.skipped_checks:
        return []
    roster, rank = among.roster, among.rank
    is_speaker = roster.local_ranks(rank)[0] == rank
    described = among.share(describe_sets(task) if is_speaker else None)
    lines = []
    for machine in range(len(roster.hosts)):
        other = roster.ranks_of(machine)[0]
        lines += compare_sets(roster.host(other), described[0], described[other])
    return lines


def describe_sets(task: Task) -> dict[str, Any]:
    """The data set and the test set of a run, each by its name, as plain JSON."""
    sets = {"the data set": task.dataset}
    if task.evaluation is not None:
        sets["the test set"] = task.evaluation.dataset
    return {what: _describe(dataset) for what, dataset in sets.items()}


def compare_sets(host: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """RefusedError where a machine has other data than rank 0's; lines about what could not be compared."""
    lines = []
    for what in ours:
        if "failed" in theirs[what]:
            lines.append(f"  {what} of {host} could not be compared: {theirs[what]['failed']}")
        elif "failed" in ours[what]:
            continue
        elif (found := compare_data(host, what, ours[what], theirs[what])) is not None:
            raise RefusedError(str(found))
    return lines


def _describe(dataset: Any) -> dict[str, Any]:
    try:
        return describe_data(dataset)
    except Exception as error:  # an attribute of the user's class that raises: no reason to refuse a run
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def refuse(differences: Sequence[Difference]) -> None:
    """RefusedError with the first of them, which is the gravest."""
    if differences:
        more = f" ({len(differences) - 1} more)" if len(differences) > 1 else ""
        raise RefusedError(f"{differences[0]}{more}")


def initial_norms(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, float]]:
    """The norm of every initial param and buffer, by name."""
    with torch.no_grad():
        plain = [(name, torch.view_as_real(t) if t.is_complex() else t) for name, t in tensors]
        return [(name, float(tensor.detach().double().norm())) for name, tensor in plain]


def describe_initial(norms: Sequence[Sequence[Sequence[Any]]], roster: Roster) -> list[str]:
    """Lines about ranks that began with other values than rank 0, whose values all of them take.

    No refusal: the values are overwritten, so that a factory need not be seeded. It is told because another file of
    weights on one machine shows here, and nowhere else.
    """
    for rank, own in enumerate(norms):
        for (name, ours), (_, theirs) in zip(norms[0], own, strict=True):
            if abs(ours - theirs) > CLOSE * max(abs(ours), abs(theirs)):
                return [
                    f"  rank {rank} on {roster.host(rank)} built {name} with other initial values than rank 0; "
                    "rank 0's are used on all ranks"
                ]
    return []


def check_agreement(
    store: Store,
    rank_info: RankInfo,
    model: nn.Module,
    config: RunConfig | None,
    data: Sequence[str],
    say: Callable[[Sequence[str]], None],
) -> None:
    """InputError on every rank where settings, `data` (lines that describe it) or the model's tensors differ.

    Initial values may differ, since rank 0's are taken; over machines `say` then prints that they do.
    """
    rank, world_size = rank_info.rank, rank_info.world_size
    roster = rank_info.roster
    lines = list(data)
    settings = {} if config is None else config.to_json()
    lines += [f"{name} = {value}" for name, value in settings.items() if name not in PER_RANK_SETTINGS]
    named = [*model.named_parameters(), *model.named_buffers()]
    hosts = () if roster.is_one_machine else [roster.host(other) for other in range(world_size)]
    agree(store, rank, world_size, lines, what="was given other settings", where="settings", hosts=hosts)
    agree(store, rank, world_size, describe_tensors(named), hosts=hosts)
    if hosts:
        norms = exchange(store, "initial", rank, range(world_size), initial_norms(named))
        say(describe_initial(norms, roster) if rank == 0 else ())


def describe_order(worker: Worker) -> list[str]:
    """Lines about the data that are the same on all ranks."""
    axis, order = worker.engine.axis, worker.engine.order
    return [f"samples = {axis.samples}", f"order of samples = {order.fingerprint(worker.config.epochs):08x}"]
