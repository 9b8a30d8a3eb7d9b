"""Two ranks on one GPU over NCCL, every step two graphs with the all-reduce between them: right results, no speeds.

The ranks are processes of tests/ranks.py; each of their functions returns what the test then compares.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Silent, on_processes
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, loss_and_count, mean_loss, train
from uneven import TensorData
from uneven.comm.group import Group
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.policy.exact import Balanced
from uneven.step.captured import CapturedStep
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

NAN = float("nan")
# name -> (optimizer, train step, settings)
RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "clipped": ("sgd", mean_loss, {"policy": "sync", "max_grad_norm": 0.1}),
    "adamw": ("adamw", mean_loss, {"policy": "sync", "bucket_mb": 0.0001}),
    "counted": ("sgd", loss_and_count, {"shares": (3, 1)}),
    "accumulated": ("sgd", mean_loss, {"policy": "sync", "batch_size": 4, "accumulate": 3}),
    "no samples": ("sgd", loss_and_count, {"shares": (1, 0)}),
}
TOLERANCE = {"sgd": 1e-7, "adamw": 1e-4}  # a captured step has its rate, and Adam its corrections, in fp32


@contextmanager
def replayed() -> Iterator[list[int]]:
    """The samples of the slots whose first half was a replay of a graph."""
    samples: list[int] = []
    forward_backward = CapturedStep.forward_backward

    def counted(self: CapturedStep, inputs: Any, slot_samples: int, stats: Any) -> Any:
        found = forward_backward(self, inputs, slot_samples, stats)
        assert self.reducer is not None
        if self.is_replayed and self.reducer._group.world_size > 1:  # not in the rehearsal
            samples.append(slot_samples)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedStep, "forward_backward", counted)
        yield samples


def run(group: Group, optimizer: str, step: Any, settings: dict[str, Any], x: Any = X) -> dict[str, Any]:
    """A run of this rank; the group stays for the next one."""
    config = resolve({"batch_size": 12, "epochs": 3, "seed": 3, "compile": "graph", "backend": "nccl", **settings})
    task = Task(lambda: Net(torch.float64), OPTIMIZERS[optimizer], step, TensorData(x.double(), Y))
    info = RankInfo(group.rank, parse_devices("cuda:0,cuda:0"))
    with replayed() as replays:
        result = Worker(task, config, info, lambda _: group, Requests(), Silent()).train()
    params = {name: value.cpu() for name, value in result.state.params.items()}
    history = [entry["train_loss"] for entry in result.run.history]
    return {"params": params, "loss": history, "dropped": result.dropped, "replays": replays}


def assert_params(found: list[dict[str, Any]], right: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in right.items():
        assert torch.equal(found[0]["params"][name], found[1]["params"][name]), name
        torch.testing.assert_close(found[0]["params"][name], value, rtol=tolerance, atol=tolerance)


def all_runs(group: Group) -> dict[str, Any]:
    return {name: run(group, *options) for name, options in RUNS.items()}


def test_runs_equal_one_process(tmp_path: Path) -> None:
    """Tail slots, an unused layer, weight decay, clipping, counts, micro-batches, several buckets, no samples."""
    ranks = on_processes(2, f"{__name__}:all_runs", tmp_path, "nccl")
    for name, (optimizer, step, settings) in RUNS.items():
        found = [rank[name] for rank in ranks]
        dense = train(
            1,
            optimizer=optimizer,
            step=step,
            global_batch_size=24,
            epochs=3,
            max_grad_norm=settings.get("max_grad_norm"),
        )[0]
        assert_params(found, dense.state.params, TOLERANCE[optimizer])
        assert found[0]["loss"] == pytest.approx([entry["train_loss"] for entry in dense.run.history], rel=1e-4)
        assert len(found[0]["replays"]) == 9, "every step, tails too"


def move_shares(patch: pytest.MonkeyPatch) -> None:
    """Slots of 32, 32 and 6 samples in every epoch; shares move in the middle of one, to a split that was captured
    ahead, and twice to one that was not."""
    plan = {0: (16, 16), 4: (20, 12), 7: (24, 8), 10: (3, 29)}

    def shares(self: Balanced, slot: int, samples: int) -> tuple[int, ...]:
        return next(plan[start] for start in sorted(plan, reverse=True) if start <= slot) if samples == 32 else (6, 0)

    patch.setattr(Balanced, "shares", shares)
    patch.setattr(Balanced, "note", lambda *_: None)


def moving(group: Group) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        move_shares(patch)
        return run(group, "sgd", mean_loss, {"policy": "balanced", "batch_size": 16, "epochs": 5})


def test_graphs_and_eager_sums_take_turns_on_one_communicator(tmp_path: Path) -> None:
    """Sizes that come for the first time run without a graph, beside a rank that replays one."""
    found = on_processes(2, f"{__name__}:moving", tmp_path, "nccl")
    assert_params(found, train(1, batch_size=32, epochs=5)[0].state.params, 1e-7)
    assert 9 <= len(found[0]["replays"]) < 15


def spoiled(group: Group) -> dict[str, Any]:
    x = X.clone()
    x[[3, 60]] = NAN
    return {
        compile: run(group, "sgd", loss_and_count, {"policy": "sync", "compile": compile}, x)
        for compile in ("graph", "off")
    }


def test_steps_that_are_not_finite_leave_no_trace(tmp_path: Path) -> None:
    """Found by one rank, skipped by both."""
    ranks = on_processes(2, f"{__name__}:spoiled", tmp_path, "nccl")
    assert_params([rank["graph"] for rank in ranks], ranks[0]["off"]["params"], 1e-7)
    for rank in ranks:
        assert rank["graph"]["dropped"] == rank["off"]["dropped"]
        assert rank["graph"]["loss"] == pytest.approx(rank["off"]["loss"], rel=1e-6)
    assert any(rank["graph"]["dropped"] for rank in ranks)
    assert len(ranks[0]["graph"]["replays"]) == 9
