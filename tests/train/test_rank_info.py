"""What a rank tells about itself while it trains, and before its group has formed."""

import threading
from typing import Any

import pytest
import torch

from tests import ranks
from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from uneven import TensorData
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker


def test_a_rank_tells_which_collective_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a hang in one is told apart from long work of the user's own, which the same phases have."""
    workers: dict[int, Worker] = {}
    told: list[dict[str, Any]] = []
    wait = ranks._ThreadWork.wait

    def asked(work: Any) -> None:
        told.append(workers[threading.get_ident()].show())
        wait(work)

    monkeypatch.setattr(ranks._ThreadWork, "wait", asked)
    config = resolve({"batch_size": 16, "epochs": 1, "policy": "sync", "strategy": "fsdp"})
    task = Task(lambda: Net(torch.float64), OPTIMIZERS["sgd"], mean_loss, TensorData(X.double(), Y))

    def train(group: ThreadGroup) -> None:
        info = RankInfo(group.rank, parse_devices(["cpu", "cpu"]))
        worker = Worker(task, config, info, lambda _: group, Requests(), Silent())
        workers[threading.get_ident()] = worker
        assert "collective" not in worker.show()
        worker.train()
        assert "collective" not in worker.show()

    on_threads(2, train)
    assert any("number" in status["collective"] for status in told if status["phase"] == "compute")
