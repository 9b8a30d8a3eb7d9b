"""Resume and replay on ranks that others have started: rank 0 chooses, and every machine gets what its ranks read.

The folder to resume from or to repeat is on the machine of rank 0, and need not be on another. Rank 0 alone looks for
the checkpoint and tells its choice through the store. It moves an earlier result aside only when all ranks have read
what they need: one that looked by itself found half of the files (tests/api/test_resume_starts.py, once). Where the run
has a leader, the first rank of each other machine copies what the ranks there need into a private folder
(machines/transfer.py), which is removed after the run; else the machines must see rank 0's folder. Called by
launch/checks/preflight.py, before a group has formed: all ranks exchange whether they can go on, and raise the same
error where one cannot.
"""

import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from uneven.comm.fingerprint import refuse_differences
from uneven.config import RunConfig, Task
from uneven.data.replay import LOG
from uneven.errors import InputError
from uneven.hardware.roster import Roster
from uneven.launch.checks.resume import ResumePlan, follow_plan, plan_resume
from uneven.launch.context import ProcessContext
from uneven.machines.wire import WireError
from uneven.results.checkpoint import files_of_ranks
from uneven.results.record import RECORD, crc32_of, listed_files, read_record
from uneven.results.state import TrainedState


@dataclass(frozen=True)
class _Choice:
    """What rank 0 tells the others: the folder that is read, which files it has, and where the leader shares it."""

    kind: str  # "checkpoint", "result" of a run that is finished, "log" to replay, or "" where a new run begins
    out: str | None = None
    folder: str = ""
    first: str = RECORD  # the file whose checksum says which folder it is
    crc32: int = 0
    names: tuple[str, ...] = ()
    key: str | None = None


def plan_together(task: Task, config: RunConfig, context: ProcessContext, roster: Roster) -> ResumePlan:
    """What `plan_resume` does, on all ranks; InputError on all of them where one cannot go on."""
    rank = context.environment.rank
    settings = [f"{name} is given = {getattr(config, name) is not None}" for name in ("resume", "replay")]
    # One that was given another setting would not come to what follows.
    refuse_differences(context.share(settings), what="was given other settings", where="settings")
    if config.resume is None and config.replay is None:
        return ResumePlan(config, [])
    told: dict[str, Any] = {}
    error: Exception | None = None
    if rank == 0:
        try:
            plan, choice = _choose(task, config, context, len(roster.devices))
            told = asdict(choice)
        except Exception as found:
            told, error = {"fault": str(found)}, found
    told = context.share(told)[0]
    if "fault" in told:
        raise error or InputError(told["fault"])
    choice = _Choice(**{**told, "names": tuple(told["names"])})
    folder = _find_folder(context, roster, choice)
    if rank > 0:
        try:
            plan = _follow(task, config, context, roster, choice, folder)
        except (InputError, OSError) as found:
            error = found
    faults = context.share(None if error is None else str(error))
    if error is not None:
        raise error
    for other, fault in enumerate(faults):
        if fault is not None:
            host = roster.host(other)
            raise InputError(fault if host in fault else f"{host}: {fault}")
    if rank == 0 and choice.key is not None and context.leader is not None:
        context.leader.withdraw(choice.key)
    return plan


def _choose(task: Task, config: RunConfig, context: ProcessContext, ranks: int) -> tuple[ResumePlan, _Choice]:
    """On rank 0: decide what is resumed or repeated, and let the leader share it."""
    plan = ResumePlan(config, [])
    if config.replay is not None:
        kind, first = "log", LOG
        folder, names = config.replay, [LOG]
        if not (folder / LOG).is_file():
            raise InputError(f"replay={str(folder)!r}: there is no {LOG} in it; pass the folder of a finished run")
    else:
        plan = plan_resume(task, config, ranks)
        chosen = plan.config.resume if plan.finished is None else plan.finished.folder
        if chosen is None:
            return plan, _Choice("", None if plan.config.out is None else str(plan.config.out.absolute()))
        kind, first = "checkpoint" if plan.finished is None else "result", RECORD
        folder, names = chosen, [RECORD, *listed_files(read_record(chosen))]
    key = None
    if context.leader is not None:
        key = secrets.token_hex(8)
        try:
            context.leader.share(key, folder, names=names)
        except WireError as error:
            raise InputError(f"the leader does not share {folder} with the other machines: {error}") from error
    out = None if plan.config.out is None else str(plan.config.out.absolute())
    crc32 = crc32_of(folder / first)
    return plan, _Choice(kind, out, str(folder.absolute()), first, crc32, tuple(names), key)


def _find_folder(context: ProcessContext, roster: Roster, choice: _Choice) -> dict[str, str]:
    """Where the ranks of this machine read it: rank 0's folder, or a copy that the first of them has made.

    A fault, where there is none. Called on all ranks.
    """
    rank = context.environment.rank
    first = roster.local_ranks(rank)[0]
    found: dict[str, str] = {}
    if choice.key is not None and roster.machines[rank] != roster.machines[0] and rank == first:
        try:
            found = {"folder": str(_copy(context, roster.local_ranks(rank), choice))}
        except (InputError, OSError) as error:  # a WireError, too
            found = {"fault": str(error)}
    return context.share(found)[first] or {"folder": choice.folder} if choice.kind else {}


def _follow(
    task: Task, config: RunConfig, context: ProcessContext, roster: Roster, choice: _Choice, found: dict[str, str]
) -> ResumePlan:
    """On another rank than 0: the same plan, from the same folder or a copy of it."""
    if config.out is None and choice.out is not None:
        config = replace(config, out=Path(choice.out))
    if not choice.kind:
        return ResumePlan(replace(config, resume=None), [])
    if "fault" in found:
        raise InputError(found["fault"])
    rank, folder = context.environment.rank, Path(found["folder"])
    if not _is_same(folder, choice):
        raise InputError(
            f"{roster.host(rank)} does not see {folder} of {roster.host(0)}, which {_setting(choice)} needs; use a "
            "folder that all machines share, or start with 'uneven run --nodes' and 'uneven join', which need none"
        )
    if choice.kind == "log":
        return ResumePlan(replace(config, replay=folder), [])
    if choice.kind == "result":
        finished = replace(TrainedState.load(folder), folder=Path(choice.folder))
        return ResumePlan(replace(config, resume=None), [], finished)
    return ResumePlan(follow_plan(task, config, len(roster.devices), rank, folder), [])


def _copy(context: ProcessContext, ranks: tuple[int, ...], choice: _Choice) -> Path:
    """The files that these ranks read."""
    leader = context.leader
    if leader is None or choice.key is None:
        raise InputError("this rank was not told how to reach the leader")
    folder = leader.scratch / Path(choice.folder).name
    folder.mkdir()
    leader.get(choice.key, files_of_ranks(choice.names, ranks), folder)
    return folder


def _is_same(folder: Path, choice: _Choice) -> bool:
    """Whether this machine sees rank 0's folder, and not another one of the same path."""
    with suppress(OSError):
        return crc32_of(folder / choice.first) == choice.crc32
    return False


def _setting(choice: _Choice) -> str:
    return "replay=..." if choice.kind == "log" else "resume=..."
