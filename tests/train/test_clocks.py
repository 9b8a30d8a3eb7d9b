"""A run on three machines whose clocks differ by a minute and drift: the worker reads them through a real store."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from uneven import TensorData
from uneven.comm.store import open_store, reach_store
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.timeline.record import TRAINING, Recorder
from uneven.timeline.timeline import Timeline
from uneven.train import worker as worker_module
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

CLOCKS = ((0.0, 0.0), (60.0, 300.0), (-60.0, -300.0))  # of each machine: seconds off, and ppm


def now(off_s: float, ppm: float) -> int:
    true_ns = time.perf_counter_ns()
    return true_ns + int(off_s * 1e9) + int(true_ns % 10**12 * ppm / 1e6)


def test_a_run_on_three_machines_is_one_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = parse_devices(["cpu"] * 4)
    roster = Roster(devices, (0, 1, 1, 2), ("anna", "bert", "carl"))
    clocks: list[Callable[[], int]] = [partial(now, *CLOCKS[machine]) for machine in roster.machines]
    monkeypatch.setattr(worker_module, "Recorder", lambda rank: Recorder(rank, clock=clocks[rank]))
    config = resolve({"batch_size": 16, "epochs": 2, "seed": 3, "policy": "sync"})
    task = Task(lambda: Net(torch.float64), OPTIMIZERS["sgd"], mean_loss, TensorData(X.double(), Y))
    store, port = open_store()

    def train(group: ThreadGroup) -> tuple[RankResult, dict[str, Any]]:
        info = RankInfo(group.rank, devices, roster=roster)
        info.read_clocks(reach_store("127.0.0.1", port))
        worker = Worker(task, config, info, lambda _: group, Requests(), Silent())
        return worker.train(), worker.show()

    results, shown = zip(*on_threads(4, train), strict=True)
    del store
    assert [len(result.timeline.machines[0].readings) for result in results] == [0, 2, 0, 2]
    assert [status["host"] for status in shown] == ["anna", "bert", "bert", "carl"]
    timeline = Timeline.merge([result.timeline for result in results])
    assert [machine.host for machine in timeline.machines] == ["anna", "bert", "carl"]
    for machine, (off_s, _) in list(zip(timeline.machines, CLOCKS, strict=True))[1:]:
        assert machine.offset_ns == pytest.approx(-off_s * 1e9, abs=1e9)
        assert machine.error_ns is not None
        assert 0 < machine.error_ns < 30e9  # a busy machine may be slow, but never by what the clocks differ
    # Gradients are summed in every step: no rank ends an epoch before all ranks have ended the one before.
    errors = [timeline.machine(lane).error_ns or 0 for lane in timeline.lanes]
    ends = {(event.fields["epoch"], event.rank): event.t_ns for event in timeline.events if event.kind == "epoch"}
    assert len(ends) == 8
    for (epoch, rank), end in ends.items():
        for other in range(4):
            if epoch > 1:
                assert ends[epoch - 1, other] - errors[other] <= end + errors[rank]
    for account in timeline.accounts:
        assert sum(account.shares[state] for state in TRAINING) == pytest.approx(1.0, abs=1e-9)
    traffic = [event.fields for event in timeline.events if event.kind == "traffic"]
    assert all(fields["payload_bytes"] > 0 and fields["steps"] > 0 for fields in traffic)
