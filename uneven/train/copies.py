"""checkpoint_copies=2: every checkpoint is on a second machine, too, in that machine's own folder of the run.

The *keeper* is the first rank on another machine than rank 0's. When rank 0 has given a checkpoint its name it lets the
leader's file service give it out; the keeper's saver, which has just sent its own part, waits there and copies it. So
nothing else waits: training goes on meanwhile, and the next save begins when the copy is there, as with parts. A copy
is written beside its place, compared with its checksums and renamed. Called by train/saves.py.

Before that, whether ranks on several machines can bring their parts to one folder, and how: where the run has a leader
(`uneven run --nodes`, `uneven join`), rank 0 opens the folder to its file service. Elsewhere (torchrun, Slurm) the
machines need a file system in common: rank 0 leaves a mark with a random name in the folder and the others look for it,
because a folder of the same path may be there on every machine.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from uneven.comm.gather import broadcast_json, gather_bytes, gather_json
from uneven.config import RunConfig
from uneven.errors import InputError, MachineError
from uneven.files import (
    is_closed,
    make_out_folder,
    make_run_folder,
    mark_as_run,
    mark_of_run,
    partial_folder,
    why_not_written,
)
from uneven.machines.transfer import LeaderFiles
from uneven.machines.wire import WireError
from uneven.results.checkpoint import put_in_place
from uneven.results.checkpoint_folders import find_checkpoints, remove_partial, set_aside, slot_of
from uneven.results.record import RECORD, check_files, listed_files, read_record
from uneven.train.rank_info import RankInfo


class Copies:
    """Life cycle: made with the run's saves, `connect` with every group; then the saver's thread calls the rest."""

    def __init__(self) -> None:
        self.run = ""  # its id, by which a keeper knows copies of this run from those of another
        self._is_told = False
        self.folder: Path | None = None  # on the keeper: where the copies are
        self._gives_out = False  # on rank 0: there is a keeper
        self._shared = ""  # the last checkpoint that was given out

    def connect(self, info: RankInfo, config: RunConfig, out: Path, token: str, run: str) -> list[str]:
        """Find the keeper and see that it can keep copies; lines for the user. A collective, after `out` was opened.

        `token` is of this group, `run` the id that rank 0 has known since the first one. By an id of its own a machine
        that had left and come back took its copies for those of another run, and moved or removed them.

        InputError on all ranks where it cannot, before the first step; later that is a line like any other.
        """
        self.folder = None
        self._gives_out = False
        self.run = run
        given = f"checkpoint_copies={config.checkpoint_copies}"
        others = [rank for rank in range(info.world_size) if info.roster.machines[rank] != info.roster.machines[0]]
        if not others:
            return self._once(f"  {given}: there is no other machine, so each checkpoint is on this one alone")
        own = (config.out or out).absolute()
        found = broadcast_json(info.group, self._look(info, config, out, own, token, others[0]), others[0])
        host = info.roster.host(others[0])
        if found["is_same"]:
            return self._once(f"  {given}: {host} sees {out}, too, so there is no copy beside it")
        if found["fault"]:
            why = f"{given}: {host} cannot keep copies: {found['fault']}"
            if info.generation == 0:
                raise InputError(why)
            return [f"  {why}; each checkpoint is on {info.roster.host(0)} alone"]
        self._gives_out = info.rank == 0
        self.folder = own if info.rank == others[0] else None
        return self._once(f"  {given}: each checkpoint is copied to {found['folder']} on {host}")

    def _look(self, info: RankInfo, config: RunConfig, out: Path, own: Path, token: str, keeper: int) -> dict[str, Any]:
        """What the keeper finds; a collective. Rank 0 leaves a mark, since machines may have a folder in common."""
        mark = f".state.partial-{token}"  # a name that the next run removes where this one is killed
        fault = "" if info.leader is not None else "it needs 'uneven run --nodes' and 'uneven join'"
        try:
            if info.rank == 0:
                make_run_folder(out)
                (out / mark).touch()
            gather_bytes(info.group, b"")
            is_same = (own / mark).exists()
            if info.rank == keeper and not is_same and not fault:
                fault = self._prepare(config, own)
            gather_bytes(info.group, b"")
        finally:
            if info.rank == 0:
                (out / mark).unlink(missing_ok=True)
        return {"fault": fault, "is_same": is_same, "folder": str(own)}

    def _prepare(self, config: RunConfig, own: Path) -> str:
        """Make the keeper's folder ready, once in a run; why it cannot be. Other runs' files in it are moved aside."""
        try:
            if mark_of_run(own) == self.run:
                pass  # this machine was the keeper before, by another rank or another process
            elif config.resume is None or is_closed(own):
                make_out_folder(own, config.overwrite)
            else:
                slot = slot_of(config.resume) or 0
                set_aside(own, [folder for folder in find_checkpoints(own) if (slot_of(folder) or 0) > slot])
                make_run_folder(own)
            mark_as_run(own, run_id=self.run)
            remove_partial(own)
        except (InputError, MachineError, OSError) as error:
            return str(error)
        return ""

    def _once(self, line: str) -> list[str]:
        lines, self._is_told = [] if self._is_told else [line], True
        return lines

    def give_out(self, leader: LeaderFiles | None, folder: Path, partial: Path) -> None:
        """On rank 0, when a checkpoint is whole: the keeper may read it, and the one before no longer."""
        if not self._gives_out or leader is None:
            return
        names = [RECORD, *listed_files(read_record(folder))]
        before, self._shared = self._shared, _key(partial)
        leader.share(self._shared, folder, names=names)
        if before:
            leader.withdraw(before)

    def fetch(self, leader: LeaderFiles | None, name: str, partial: Path, is_closing: Callable[[], bool]) -> bool:
        """On the keeper, when its part is sent: copy the checkpoint once it is whole. False where it never will be.

        OSError where it cannot be copied (a WireError, too), InputError where it is damaged; nothing is left then.
        """
        assert self.folder is not None, "called on the keeper"
        if leader is None:
            return False
        draft = partial_folder(self.folder / name, partial.name.rpartition("-")[2])
        try:
            draft.mkdir(parents=True)
            if not leader.get_awaited(_key(partial), partial.name, RECORD, draft, is_closing):
                return False
            record: dict[str, Any] = read_record(draft)
            leader.get(_key(partial), list(listed_files(record)), draft)
            check_files(draft, record)
            put_in_place(draft, self.folder / name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True


def _key(partial: Path) -> str:
    """Under which a checkpoint is given out: the run's token and the number of the save."""
    return partial.name.rpartition("-")[2] + "_whole"


def open_to_machines(info: RankInfo, folder: Path, token: str) -> str | None:
    """None where all ranks can bring parts to this folder of rank 0's, else why not, the same on all; a collective."""
    if info.roster.is_one_machine:
        return None
    if info.leader is not None:
        return _open_at_leader(info, folder, token)
    mark = folder / f".state.partial-{token}"  # a name that the next run removes where this one is killed
    fault = ""
    if info.rank == 0:
        try:
            make_run_folder(folder)
            mark.touch()
        except OSError as error:
            fault = f"cannot write to {folder}: {why_not_written(error)}"
    if fault := broadcast_json(info.group, fault):
        return str(fault)
    seen = gather_json(info.group, mark.exists())
    if info.rank == 0:
        mark.unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty where it is in use
            folder.rmdir() if not all(seen) else None
    hosts = dict.fromkeys(info.roster.host(rank) for rank, is_seen in enumerate(seen) if not is_seen)
    if not hosts:
        return None
    verb = "does" if len(hosts) == 1 else "do"
    return (
        f"{', '.join(hosts)} {verb} not see {folder.absolute()} of {info.roster.host(0)}, where every rank writes its "
        "part of a checkpoint; pass as out=... a folder that all machines share, or start with 'uneven run --nodes' "
        "and 'uneven join', which need none"
    )


def _open_at_leader(info: RankInfo, folder: Path, token: str) -> str | None:
    fault = ""
    if info.rank == 0 and info.leader is not None:
        try:
            info.leader.share(token, folder, places=info.places)
        except (WireError, OSError) as error:
            fault = f"the leader does not take the parts of other machines: {error}"
    return broadcast_json(info.group, fault) or None
