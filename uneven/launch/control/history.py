"""The runs of this user that have ended: one line of JSON each, the newest last. No torch in this file.

Written by whoever ends a run (launch/control/listing.py), read by `uneven status --all`, `uneven stop` and `uneven
logs`. A run is never disturbed by it: what cannot be written is left out.
"""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from uneven.files import home_folder

MOST = 100  # runs that are kept
NAME = "runs.jsonl"
_NUMBERS = ("since", "end", "seconds", "samples")  # of a record, where it has them


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
            lines = [*_lines(path), line]
            if len(lines) <= MOST:
                with path.open("a") as file:
                    file.write(line + "\n")
            else:
                draft = folder / f".{NAME}.draft"
                draft.write_text("".join(f"{one}\n" for one in lines[-MOST:]))
                draft.rename(path)


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
