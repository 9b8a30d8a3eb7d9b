"""The ranks of one strategy as fresh processes, which end with the process that started them.

Not by launch/launcher.py: a rank of the launcher makes a Worker, with a model, an optimizer and a feed of its own. Here
every byte that a process holds is counted against the formula of the strategy, so its processes hold nothing else.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from uneven.bench.single.process import Ended
from uneven.bench.strategies.task import StrategyTask
from uneven.comm.store import open_store
from uneven.errors import RankError
from uneven.launch.lifeline import LIFELINE

LOOK_S = 0.05
GRACE_S = 5.0  # for the other ranks to notice that one has failed


def run_ranks(task: StrategyTask, folder: Path) -> list[dict[str, Any]]:
    """Every rank's results, in rank order; RankError with the cause where one failed. This process holds the store."""
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(asdict(task)))
    store, port = open_store()
    lifeline, held = os.pipe()
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.extend(_start(task, folder, rank, port, lifeline) for rank in range(task.ranks))
        codes = _wait(running)
    finally:
        for process in running:
            process.kill()
            process.wait()
        os.close(lifeline)
        os.close(held)
        del store
    return _results(codes, folder)


def _start(task: StrategyTask, folder: Path, rank: int, port: int, lifeline: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "uneven.bench.strategies.rank", str(folder), str(rank), str(port)]
    environment = {**os.environ, LIFELINE: "1", "OMP_NUM_THREADS": str(task.threads[rank])}
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(command, stdin=lifeline, stdout=log, stderr=log, env=environment)


def _wait(running: Sequence["subprocess.Popen[bytes]"]) -> list[int | None]:
    """Their exit codes; once one has failed the others get a moment, and those that still run have None."""
    last = math.inf
    while True:
        codes = [process.poll() for process in running]
        now = time.monotonic()
        if None not in codes or now > last:
            return codes
        if any(codes):
            last = min(last, now + GRACE_S)
        time.sleep(LOOK_S)


def _results(codes: Sequence[int | None], folder: Path) -> list[dict[str, Any]]:
    """RankError with the cause: the last line of a rank that was killed, or the error of the first that failed."""
    places = [folder / f"rank-{rank}.json" for rank in range(len(codes))]
    found = [json.loads(place.read_text()) if place.exists() else None for place in places]
    for rank, (code, result) in enumerate(zip(codes, found, strict=True)):
        if code is not None and result is None:
            log = (folder / f"rank-{rank}.log").read_text(errors="replace")
            raise RankError(f"rank {rank}: {Ended(code, '', log).message}")
    failed = [
        (result["failed_at"], rank, result["cause"])
        for rank, result in enumerate(found)
        if result is not None and "cause" in result
    ]
    if failed:
        _, rank, cause = min(failed)
        raise RankError(f"rank {rank}: {cause}")
    return [result for result in found if result is not None]
