"""Rank 0 shows what the ranks of other machines wrote to the store."""

import re
from functools import partial
from typing import Any

import pytest

from tests.ranks import Silent
from uneven.comm.store import open_store
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.run_status import RankReport, SharedProgress, describe_roster
from uneven.policy.axis import Axis
from uneven.results.progress import Reporter
from uneven.train.rank_info import RankInfo

ROSTER = Roster(parse_devices("cpu,cpu,cpu@0.4"), (0, 1, 1), ("pc-anna", "pc-bert"))
ENTRY = {"epoch": 1, "samples": 10_000, "train_loss": 0.5, "lr": 0.1, "train_seconds": 4.0, "samples_per_s": 2500.0}


def rank_info(rank: int) -> RankInfo:
    return RankInfo(rank, ROSTER.devices, roster=ROSTER)


def show(rank: int, status: RankReport) -> dict[str, Any]:
    place = {"machine": ROSTER.machines[rank], "host": ROSTER.host(rank)}
    return {"phase": "compute", "rounds": {}, **place, **status.figures}


def test_rank_0_draws_the_devices_of_all_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    store, _ = open_store()
    reporter = Reporter("bar", "train.py")
    outputs = [reporter, Silent(), Silent()]
    ranks = [RankReport(str(ROSTER.devices[rank]), outputs[rank]) for rank in range(3)]
    shared = []
    for rank, status in enumerate(ranks):
        status.is_shared = True
        shared.append(SharedProgress(store, rank_info(rank), outputs[rank], partial(show, rank, status)))
        status.started(Axis(10_000, 100, 1), "cpu")
    for rank, own in ((1, 4_000), (2, 1_000), (0, 4_900)):
        ranks[rank].stepped(9_900, own, 4.0, 0.25)
    ranks[0].epoch_done(ENTRY)
    for progress in reversed(shared):
        progress.close()
    reporter.close()
    lines = [line.rstrip() for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert "  2 machines: pc-anna (cpu), pc-bert (cpu, cpu@0.4)" in lines
    whole, *rows = lines[-6:]
    assert "100 %" in whole  # the last steps are in no heartbeat, but the run is over
    names = [re.split("\u2501|share", row)[0].rstrip() for row in rows]
    assert names == ["  pc-anna", "    cpu", "  pc-bert", "    cpu", "    cpu@0.4"]
    assert "share 51 %" in rows[2]


def test_a_store_that_is_gone_ends_no_run() -> None:
    class Gone:
        def set(self, *_: Any) -> None:
            raise RuntimeError("connection reset")

    SharedProgress(Gone(), rank_info(1), Silent(), dict).close()  # type: ignore[arg-type]


def test_the_roster_is_one_line() -> None:
    assert describe_roster(ROSTER) == "  2 machines: pc-anna (cpu), pc-bert (cpu, cpu@0.4)"
