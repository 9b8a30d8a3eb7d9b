"""The side of `uneven leave`: which run of this user is meant, and what its launcher answers. No torch in this file."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from uneven.errors import InputError, RankError
from uneven.launch.control.leave_requests import Asked, RunHere, find_runs
from uneven.launch.external.engines import read_engine

POLL_S = 0.05
NO_RUN = "no run of yours is on here that a rank could leave (uneven run, uneven join, or fit on several devices)"


def choose_run(named: str | None) -> RunHere:
    """The run that is meant; InputError where it is not clear which, RankError where there is none."""
    runs = find_runs()
    if not runs:
        engine = engine_here()
        raise RankError(NO_RUN if engine is None else engine)
    matching = runs if named is None else [run for run in runs if _is_named(run, named)]
    shown = ", ".join(run.name for run in runs)
    if not matching:
        raise InputError(f"run {named!r}: on here {'is' if len(runs) == 1 else 'are'} {shown}")
    if len(matching) > 1:
        raise InputError(f"{len(matching)} runs are on here: {shown}; name one by its id: uneven leave {runs[0].pid}")
    return matching[0]


def _is_named(run: RunHere, named: str) -> bool:
    script = str(run.about.get("script") or "")
    run_id = str(run.about.get("id") or "")
    return named in (str(run.pid), script, Path(script).name) or (len(named) > 1 and run_id.startswith(named))


def ask_to_leave(run: RunHere, ranks: Sequence[int] | None, wait_s: float) -> Mapping[str, Any]:
    """What the launcher answers: {"left": one line} or {"refused": why}."""
    try:
        asked = Asked(run, None if ranks is None else tuple(ranks))
    except OSError as error:
        raise RankError(f"run {run.name} has just ended") from error
    end_s = time.monotonic() + wait_s
    try:
        while time.monotonic() < end_s:
            if (answer := asked.answer()) is not None:
                return answer
            if asked.is_run_over:
                return {"left": f"run {run.name} has ended"}
            time.sleep(POLL_S)
    finally:
        asked.close()
    return {"refused": f"they have not left within {wait_s:g} s (--wait), and were told to stay"}


def engine_here(root: Path = Path("/proc")) -> str | None:
    """Why nobody can leave, where an engine such as torchrun or Slurm has started processes of this user here."""
    for folder in root.glob("[0-9]*"):
        with suppress(OSError, ValueError):  # of another user, or gone
            if folder.stat().st_uid != os.getuid():
                continue
            lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environ = dict(line.split("=", 1) for line in lines if "=" in line)
            engine = read_engine(environ)
            if engine is not None and engine.world_size > 1:
                return (
                    f"process {folder.name} is rank {engine.rank} of {engine.world_size} that {engine.launcher} "
                    f"started: {engine.launcher} ends its job when a rank goes, so none can leave; stop the job (it "
                    "saves at SIGTERM), or start it by uneven run and uneven join"
                )
    return None
