"""Whether ranks on several machines can bring their parts of a checkpoint to one folder, and by which way.

Where the run has a leader (`uneven run --nodes`, `uneven join`), rank 0 opens the folder to its file service. Elsewhere
(torchrun, Slurm) the machines need a file system in common: rank 0 leaves a mark with a random name in the folder and
the others look for it, because a folder of the same path may be there on every machine. Called by train/saves.py.
"""

from contextlib import suppress
from pathlib import Path

from uneven.comm.gather import broadcast_json, gather_json
from uneven.files import make_run_folder, why_not_written
from uneven.machines.wire import WireError
from uneven.train.rank_info import RankInfo


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
