"""The runs of this user that are known on this machine, live ones and ended ones, and which of them is meant by a name.

Used by `uneven status`, `stop`, `logs` and `leave`. A live run is found by the file in its private folder that
launch/control/listing.py writes, an ended one by its line in the history, which whoever ends it adds. A run is never
disturbed by that: what cannot be written is left out. No torch in this file.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.files import MARK, home_folder, write_atomically
from uneven.launch.cleanup import live_folders, process_start
from uneven.launch.control.rank_log import FOLDER as LOGS

STATUS = "run.json"  # in the private folder of a run: which run it is, and where
LAST = "last"
MOST_SHOWN = 8  # runs in a message
MOST = 100  # runs that are kept in the history
NAME = "runs.jsonl"
_NUMBERS = ("since", "end", "seconds", "samples")  # of a record, where it has them


@dataclass(frozen=True)
class KnownRun:
    """One run: what it says of itself in its private `folder`, or its line in the history once it has ended."""

    id: str
    record: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def is_live(self) -> bool:
        return self.folder is not None

    @property
    def pid(self) -> int:
        return int(self.record["pid"])

    @property
    def script(self) -> str:
        return Path(str(self.record.get("script") or "fit")).name

    @property
    def leader(self) -> str | None:
        """The machine that leads the run, where this one only takes part."""
        return self.record.get("leader")

    @property
    def is_over(self) -> bool:
        """Whether a live one is off the list by now, or its process is gone."""
        assert self.folder is not None, "a live run"
        start = self.record.get("start")
        return not self.folder.exists() or (start is not None and process_start(self.pid) != start)

    @property
    def log_folders(self) -> list[Path]:
        """Where what it prints may be; it moves from the first to the second when training begins."""
        here = [] if self.folder is None else [self.folder / LOGS]
        out = self.record.get("out")
        return [*here, *([Path(out) / LOGS] if out and self.leader is None else [])]

    def to_json(self) -> dict[str, Any]:
        state = "live" if self.is_live else self.record.get("result")
        return {"id": self.id, "state": state, **{key: value for key, value in self.record.items() if key != "start"}}


def read_status(folder: Path) -> dict[str, Any]:
    """What a run says of itself in its private folder; empty where the folder is for other files, or gone."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / STATUS).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def live_runs() -> list[KnownRun]:
    """Those that are on, the oldest first."""
    found = []
    for folder, pid in live_folders():
        if record := read_status(folder):
            found.append(KnownRun(str(record.get("id") or pid), {**record, "pid": pid}, folder))
    # A launcher that was killed leaves its folder, and its number may be another process's by now.
    return sorted((run for run in found if not run.is_over), key=_since)


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
    if named is None:
        live = _without_joined(run for run in runs if run.is_live)
        if len(live) == 1:
            return live[0]
        what = f"{len(live)} runs of yours are on" if live else "no run of yours is on here"
        raise InputError(f"{what}; {_advice(live or runs)}")
    if named == LAST and runs:
        return max(_without_joined(runs), key=_since)
    for matching in (
        [run for run in runs if run.id == named or (run.is_live and str(run.pid) == named)],
        [run for run in runs if run.leader is None and _is_same_path(named, run.record.get("out"))],
        [run for run in runs if len(named) > 1 and run.id.startswith(named)],
        [run for run in runs if _is_script(run, named)],
    ):
        meant = _without_joined(matching)
        live = [run for run in meant if run.is_live]
        if len(live) > 1:
            raise InputError(f"run {named!r}: {len(live)} runs are meant; {_advice(live)}")
        if meant:
            return (live or meant)[0]  # of several that have ended, the newest
    folder = Path(named)
    if not live_only and ((folder / MARK).is_file() or (folder / LOGS).is_dir()):  # of anybody, at any time
        return KnownRun(folder.name, {"out": str(folder.resolve())})
    raise InputError(f"run {named!r}: there is no such {'live ' if live_only else ''}run; {_advice(runs)}")


def _since(run: KnownRun) -> float:
    return float(run.record.get("since") or 0.0)


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
    return f", pid {run.pid}" if times[run.id] > 1 else ""


def _is_script(run: KnownRun, named: str) -> bool:
    """Whether a run's script is meant: by its name alone, or by any path to it."""
    script = run.record.get("script")
    return named in (script, run.script) or (os.sep in named and _is_same_path(named, script))


def _is_same_path(one: str, other: Any) -> bool:
    with suppress(OSError):  # the current folder was removed
        return bool(other) and os.path.realpath(one) == os.path.realpath(str(other))
    return False


def state_folder() -> Path:
    """Where small files about this user's runs are: $UNEVEN_HOME, else the user's folder for state.

    A ~ in $UNEVEN_HOME is the home folder, as for torch builds (install/builds.py). A relative $XDG_STATE_HOME does not
    count: its specification says so.
    """
    if home := os.environ.get("UNEVEN_HOME"):
        return Path(home).expanduser().absolute()
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else home_folder() / ".local" / "state") / "uneven"


def remember(record: dict[str, Any]) -> None:
    """Add a run that has ended; the oldest ones are forgotten."""
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
        folder = state_folder()
        folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record)
        with (folder / f".{NAME}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / NAME
            lines = [*_lines(path), line][-MOST:]
            write_atomically(path, "".join(f"{one}\n" for one in lines).encode())


def ended_runs() -> list[dict[str, Any]]:
    """Those that are remembered, the newest first. What is no record of a run is left out: a damaged file."""
    found = []
    with suppress(OSError, RuntimeError):
        for line in _lines(state_folder() / NAME):
            with suppress(ValueError, RecursionError):  # a line that was cut off by a full disk
                record = json.loads(line)
                found += [record] if _is_run(record) else []
    return found[::-1]


def _is_run(record: Any) -> bool:
    if not isinstance(record, dict) or "id" not in record:
        return False
    return all(isinstance(record.get(name), int | float | None) for name in _NUMBERS)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        return []
