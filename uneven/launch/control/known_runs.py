"""The runs of this user that are known on this machine, live ones and ended ones, and which of them is meant by a name.

Used by `uneven status`, `stop` and `logs`. Live runs are found by their private folders
(launch/control/leave_requests.py), ended ones by the history. No torch in this file.
"""

import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.files import MARK, temporary_folder
from uneven.launch import cleanup
from uneven.launch.control.history import ended_runs
from uneven.launch.control.leave_requests import RunHere, find_runs
from uneven.launch.control.listing import read_status
from uneven.launch.control.rank_log import FOLDER as LOGS

LAST = "last"
MOST_SHOWN = 8  # runs in a message


@dataclass(frozen=True)
class KnownRun:
    """One run. `here` is None for one that has ended; `record` is then its line in the history."""

    id: str
    record: dict[str, Any] = field(default_factory=dict)
    here: RunHere | None = None

    @property
    def is_live(self) -> bool:
        return self.here is not None

    @property
    def script(self) -> str:
        return Path(str(self.record.get("script") or "fit")).name

    @property
    def leader(self) -> str | None:
        """The machine that leads the run, where this one only takes part."""
        return self.record.get("leader")

    @property
    def log_folders(self) -> list[Path]:
        """Where what it prints may be; it moves from the first to the second when training begins."""
        here = [] if self.here is None else [self.here.folder / LOGS]
        out = self.record.get("out")
        return [*here, *([Path(out) / LOGS] if out and self.leader is None else [])]

    def to_json(self) -> dict[str, Any]:
        state = "live" if self.is_live else self.record.get("result")
        return {"id": self.id, "state": state, **{key: value for key, value in self.record.items() if key != "start"}}


def live_runs() -> list[KnownRun]:
    """Those that are on, the oldest first."""
    found = [_live(run) for run in find_runs()]
    return sorted(found, key=lambda run: float(run.record.get("since") or 0.0))


def _live(run: RunHere) -> KnownRun:
    return KnownRun(str(run.about.get("id") or run.pid), {**run.about, "pid": run.pid, **read_status(run.folder)}, run)


def known_runs() -> list[KnownRun]:
    """Live ones first, then those that have ended, the newest first."""
    live = live_runs()
    ended = [KnownRun(str(one["id"]), one) for one in ended_runs()]
    shown = {(run.id, run.leader) for run in live}
    return [*live, *(run for run in ended if (run.id, run.leader) not in shown)]


def choose_known(named: str | None, *, live_only: bool = False) -> KnownRun:
    """The run that is meant: an id or the beginning of one, a process id, a script, `last`, or a run's folder.

    Without a name it is the only live one. Where this machine leads a run and takes part in it by `uneven join`, too,
    the process that leads is meant; the other one goes by its process id. InputError with the known ones where it is
    not clear.
    """
    runs = live_runs() if live_only else known_runs()
    live = _without_joined(run for run in runs if run.is_live)
    if named is None:
        if len(live) == 1:
            return live[0]
        what = f"{len(live)} runs of yours are on" if live else "no run of yours is on here"
        raise InputError(f"{what}; {_advice(live or runs)}")
    if named == LAST and runs:
        return max(_without_joined(runs), key=lambda run: float(run.record.get("since") or 0.0))
    for matching in (
        [run for run in runs if run.id == named or (str(run.record.get("pid")) == named and run.is_live)],
        [run for run in runs if _is_in(run, named)],
        [run for run in runs if len(named) > 1 and run.id.startswith(named)],
        [run for run in runs if _is_script(run, named)],
    ):
        meant = _without_joined(matching)
        live = [run for run in meant if run.is_live]
        if len(live or meant) == 1 or (meant and not live):
            return (live or meant)[0]  # of several that have ended, the newest
        if live:
            raise InputError(f"run {named!r}: {len(live)} runs are meant; {_advice(live)}")
    if not live_only and (folder := _run_folder(Path(named))) is not None:
        return KnownRun(folder.name, {"out": str(folder.resolve())})
    if (owner := _other_owner(named)) is not None:
        raise InputError(f"run {named!r} is of the user {owner}: only they, or root, may look at it or stop it")
    raise InputError(f"run {named!r}: there is no such {'live ' if live_only else ''}run; {_advice(runs)}")


def _without_joined(runs: Iterable[KnownRun]) -> list[KnownRun]:
    """One entry for a run that is led here and has been joined here as well: the one that leads it."""
    found = list(runs)
    led = {(run.id, run.is_live) for run in found if run.leader is None}
    return [run for run in found if run.leader is None or (run.id, run.is_live) not in led]


def _advice(runs: list[KnownRun]) -> str:
    if not runs:
        return "none is known: runs are started by uneven run, or by fit in a script"
    times = Counter(run.id for run in runs if run.is_live)
    shown = ", ".join(f"{run.id} ({run.script}{_mark(run, times)})" for run in runs[:MOST_SHOWN])
    more = f" and {len(runs) - MOST_SHOWN} more" if len(runs) > MOST_SHOWN else ""
    how = "its id" if max(times.values(), default=0) < 2 else "its id, or by its pid where two have the same id"
    return f"known {'is' if len(runs) == 1 else 'are'} {shown}{more}; name one by {how}"


def _mark(run: KnownRun, times: Mapping[str, int]) -> str:
    """What tells a run from others in a message: an ended one, or one of several processes of a run."""
    if not run.is_live:
        return ", ended"
    return f", pid {run.record.get('pid')}" if times[run.id] > 1 else ""


def _is_in(run: KnownRun, named: str) -> bool:
    """Whether a run's folder is meant."""
    out = run.record.get("out")
    return out is not None and run.leader is None and _is_same_path(named, out)


def _is_script(run: KnownRun, named: str) -> bool:
    """Whether a run's script is meant: by its name alone, or by any path to it."""
    script = run.record.get("script")
    if named in (script, run.script):
        return True
    # A relative one is of a run by an older version.
    return bool(script) and os.sep in named and _is_same_path(named, Path(run.record.get("cwd") or "", str(script)))


def _is_same_path(one: str | Path, other: str | Path) -> bool:
    with suppress(OSError):  # the current folder was removed
        return os.path.realpath(one) == os.path.realpath(other)
    return False


def _run_folder(path: Path) -> Path | None:
    """A folder that a run has written to, by anybody and at any time."""
    return path if (path / MARK).is_file() or (path / LOGS).is_dir() else None


def _other_owner(named: str) -> str | None:
    """Whose run has this process id, where it is another user's: their folders can be seen, and not read."""
    if not named.isdecimal():
        return None
    for home in {cleanup.SHARED_MEMORY, temporary_folder()}:
        for folder in home.glob(f"uneven-*-{named}-*"):
            with suppress(OSError, KeyError):
                if re.match(r"uneven-\d+-\d+-", folder.name) and (uid := folder.stat().st_uid) != os.getuid():
                    return pwd.getpwuid(uid).pw_name
    return None
