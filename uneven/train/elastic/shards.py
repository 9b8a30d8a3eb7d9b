"""Settling where params or optimizer state are sharded: those who are left put them together, and divide them anew.

Called by settle.py and settler.py, on all who are left.

[Note: whole state in hand] The whole state (`engine.whole_state`) is on the host of every rank from the moment it was
put together until the first update in the new group begins: then all ranks have divided it. So where yet another rank
is lost, either all of those who are left have it, or none of them has begun to divide it, or all of them have.

Where a shard is lost for good they go back to the newest whole checkpoint, in the same processes. First all of them
read it (`read_newest`, a collective), and nothing has changed yet where another rank is lost meanwhile. Then each goes
back by itself (`go_back`), without a collective, so it has done so entirely or not at all; where only some have, all do
so again. The state that it has read is then the whole state in hand. Ledger, history, learning rate, buffers and random
numbers are those of the checkpoint: what was trained after it does not count, and is trained again.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.comm.gather import broadcast_json, gather_json, gather_rows
from uneven.comm.group import Group
from uneven.errors import InputError, RefusedError
from uneven.files import why_not_written
from uneven.machines.transfer import LeaderFiles
from uneven.parallel.muon_adamw import MuonAdamW
from uneven.parallel.survivors import CanSurvive
from uneven.results.checkpoint import Checkpoint, files_of_ranks, read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints, first_whole
from uneven.results.record import RECORD, crc32_of, listed_files
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo
from uneven.train.resume import Resumed
from uneven.train.run_events import RunEvents


@dataclass(frozen=True)
class Found:
    """A checkpoint that all ranks of a group have read; the same on all of them, but for each one's own part."""

    resumed: Resumed
    name: str
    which: int  # a number that no other checkpoint has
    notes: tuple[str, ...]  # those that were passed over, and why

    @property
    def slot(self) -> int:
        return self.resumed.ledger.trained


def has_muon(engine: Engine) -> bool:
    """Whether a MuonAdamW is divided over the ranks, of which nobody has a copy whatever the settings are."""
    return isinstance(engine.optimizer, MuonAdamW) and not engine.config.is_local


def read_newest(engine: Engine, group: Group, out: Path | None, lost: str) -> Found:
    """The newest whole checkpoint of this run, on every rank; a collective.

    One that is damaged, or that a rank cannot read, is passed over. RefusedError on all where none is left: `lost` says
    what cannot be rebuilt.
    """
    info = engine.rank_info
    left = _candidates(engine, out) if group.rank == 0 else []
    notes: list[str] = []
    while True:
        offer = broadcast_json(group, _offer(info, left, notes) if group.rank == 0 else None)
        notes = list(offer["notes"])
        if offer["folder"] is None:
            passed = f" ({notes[0].strip()})" if notes else ""
            copy = "" if has_muon(engine) else "redundancy=1 keeps a copy of every shard, "
            raise RefusedError(
                f"{lost}, and there is no whole checkpoint to go back to{passed}: {copy}save_every=... with out=... "
                "keeps a checkpoint"
            )
        resumed, fault = _read(info, group, offer)
        faults = gather_json(group, fault)
        if group.rank == 0 and info.leader is not None and offer["key"] is not None:
            info.leader.withdraw(offer["key"])
        if not any(faults):
            assert resumed is not None, "no fault"
            return Found(resumed, Path(offer["folder"]).name, int(offer["crc32"]), tuple(notes))
        notes.append(f"  passed over: {next(fault for fault in faults if fault)}")


def go_back(engine: Engine, events: RunEvents, found: Found) -> None:
    """This rank is where the checkpoint was taken; no collective, and nothing that another rank may wait for."""
    resumed = found.resumed
    engine.keep_whole(resumed.full_state(engine), rolled_back=found.which)
    engine.leave_shards()
    resumed.go_back(engine)
    events.go_back(resumed.own.record["callbacks"])


def _candidates(engine: Engine, out: Path | None) -> list[Path]:
    """On rank 0, newest first: of this run's folder, and the one from which the run was resumed."""
    found = [] if out is None else find_checkpoints(out)
    first = engine.config.resume
    return [*found, *([first] if first is not None and first not in found else [])]


def _offer(info: RankInfo, left: list[Path], notes: list[str]) -> dict[str, Any]:
    """On rank 0: the first of those that are left which is whole; what the others need to read it, too."""

    def one_after_the_other() -> Iterator[Path]:
        while left:
            yield left.pop(0)

    found, faults = first_whole(one_after_the_other(), _read_whole)
    told = {"notes": [*notes, *(f"  passed over: {fault}" for fault in faults)], "folder": None}
    if found is None:
        return told
    names = [RECORD, *listed_files(found.record)]
    key = None
    if not info.roster.is_one_machine and info.leader is not None:
        key = secrets.token_hex(8)
        with suppress(OSError):  # then the others say that they do not get it
            info.leader.share(key, found.folder, names=names)
    folder = found.folder.absolute()
    return {**told, "folder": str(folder), "names": names, "key": key, "crc32": crc32_of(folder / RECORD)}


def _read_whole(folder: Path) -> Checkpoint:
    try:
        return read_checkpoint(folder)
    except OSError as error:
        raise InputError(f"checkpoint {folder} cannot be read: {error.strerror or error}") from error


def _read(info: RankInfo, group: Group, offer: dict[str, Any]) -> tuple[Resumed | None, str]:
    """What this rank reads of the checkpoint, or why it cannot; a collective."""
    folder, fault = Path(offer["folder"]), ""
    if not info.roster.is_one_machine:  # the first rank of each other machine copies it for all ranks there
        ranks = info.roster.local_ranks(info.rank)
        copied = ""
        if not info.is_with_first and ranks[0] == info.rank:
            try:
                copied = str(copy_checkpoint(info.leader, ranks, offer))
            except (InputError, OSError) as error:
                fault = _reason(error)
        copies = gather_json(group, copied)
        if not info.is_with_first:
            folder = Path(copies[ranks[0]])
            if not copies[ranks[0]]:
                return None, fault
    try:
        return Resumed(folder, info), ""
    except (InputError, OSError) as error:
        return None, _reason(error)


def copy_checkpoint(leader: LeaderFiles | None, ranks: tuple[int, ...], offer: dict[str, Any]) -> Path:
    """The files that these ranks read, from the leader's machine into a private folder; OSError where it fails."""
    if leader is None or offer["key"] is None:
        raise InputError("this rank was not told how to reach the leader")
    folder = leader.scratch / f"{Path(offer['folder']).name}-{offer['key']}"
    folder.mkdir()
    leader.get(offer["key"], files_of_ranks(offer["names"], ranks), folder)
    return folder


def _reason(error: Exception) -> str:
    return why_not_written(error) if isinstance(error, OSError) and error.errno is not None else str(error)


def settle_shards(engine: Engine, group: Group, before: Sequence[str], members: Sequence[str]) -> bool:
    """Put the whole state together, of the furthest step; a collective. False on all where a shard is lost.

    `before` are the members whose ranks hold the shards, `members` those who are left, each in rank order.
    """
    strategy = engine.strategy
    assert isinstance(strategy, CanSurvive), "see why_not in settle.py"
    rows = gather_rows(group, [float(engine.whole_state is not None), float(engine.rolled_back)])
    rolled_back = {which for _, which in rows if which}
    whole = engine.whole_state
    if not all(has for has, _ in rows):  # [Note: whole state in hand]
        survived = None
        if not rolled_back:
            survived = strategy.surviving_state(group, [list(before).index(member) for member in members])
        if survived is None:
            return False
        whole = survived.state
    elif len(rolled_back) > 1:
        return False
    assert whole is not None, "it was just put together, or everybody has it"
    engine.keep_whole(whole)
    return True
