"""Starts the rank processes of one strategy and collects their results; they end if this process ends.

Called by measure.py. launch/launcher.py is not used: its ranks make a Worker with a model, an optimizer and a feed of
its own, and here every byte of a rank is compared with the strategy's formula.
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

POLL_S = 0.05
GRACE_S = 5.0  # for the other ranks to notice that one has failed


def run_ranks(task: StrategyTask, folder: Path) -> list[dict[str, Any]]:
    """Every rank's results, in rank order; RankError with the cause if one failed. This process hosts the store."""
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
    """Exit codes, once all processes have ended or GRACE_S after the first failure; None for one that still runs."""
    deadline = math.inf
    while True:
        codes = [process.poll() for process in running]
        now = time.monotonic()
        if None not in codes or now > deadline:
            return codes
        if any(codes):
            deadline = min(deadline, now + GRACE_S)
        time.sleep(POLL_S)


def _results(codes: Sequence[int | None], folder: Path) -> list[dict[str, Any]]:
    """RankError with the cause: the last line of a rank that was killed, or the error of the rank that failed first."""
    files = [folder / f"rank-{rank}.json" for rank in range(len(codes))]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    for rank, (code, result) in enumerate(zip(codes, results, strict=True)):
        if code is not None and result is None:
            log = (folder / f"rank-{rank}.log").read_text(errors="replace")
            raise RankError(f"rank {rank}: {Ended(code, '', log).message}")
    failed = [
        (result["failed_at"], rank, result["cause"])
        for rank, result in enumerate(results)
        if result is not None and "cause" in result
    ]
    if failed:
        _, rank, cause = min(failed)
        raise RankError(f"rank {rank}: {cause}")
    return [result for result in results if result is not None]
