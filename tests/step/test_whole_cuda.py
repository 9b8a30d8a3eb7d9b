"""Two ranks on one GPU over NCCL, every step one graph with the all-reduce inside: right results, no claim of speed.

The ranks are processes of tests/ranks.py; each of their functions returns what the test then compares.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import Silent, on_processes
from tests.step.test_whole import NAN, move_shares
from tests.train.test_gradient_sync import OPTIMIZERS, Net, X, Y, loss_and_count, mean_loss, train
from uneven import TensorData
from uneven.comm.group import Group
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.parallel.buckets import UNLIMITED
from uneven.parallel.reducer import Reducer
from uneven.step.captured import CapturedBackward
from uneven.step.eager import EagerStep
from uneven.step.finite import OwnCheck
from uneven.step.meter import LossMeter
from uneven.step.no_trace import no_trace
from uneven.step.precision import Precision
from uneven.step.whole import WholeStep
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)
# name -> (optimizer, train step, settings)
RUNS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "clipped": ("sgd", mean_loss, {"policy": "sync", "max_grad_norm": 0.1}),
    "adamw": ("adamw", mean_loss, {"policy": "sync", "bucket_mb": 0.0001}),
    "counted": ("sgd", loss_and_count, {"shares": (3, 1)}),
    "accumulated": ("sgd", mean_loss, {"policy": "sync", "batch_size": 4, "accumulate": 3}),
    "no samples": ("sgd", loss_and_count, {"shares": (1, 0)}),
}
TOLERANCE = {"sgd": 1e-7, "adamw": 1e-4}  # a captured step has its rate, and Adam its corrections, in fp32


class Say(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, lines: Any) -> None:
        self.lines += lines


@contextmanager
def replayed() -> Iterator[list[Any]]:
    """The steps that are replays of one graph."""
    keys: list[Any] = []
    call = WholeStep.__call__

    def counted(self: WholeStep, key: Any, *args: Any) -> Any:
        keys.append(key)
        return call(self, key, *args)

    WholeStep.__call__ = counted  # type: ignore[assignment, method-assign]
    yield keys
    WholeStep.__call__ = call  # type: ignore[method-assign]


def run(group: Group, optimizer: str, step: Any, settings: dict[str, Any], x: Any = X) -> dict[str, Any]:
    """A run of this rank; the group stays for the next one."""
    config = resolve({"batch_size": 12, "epochs": 3, "seed": 3, "compile": "graph", "backend": "nccl", **settings})
    task = Task(lambda: Net(torch.float64), OPTIMIZERS[optimizer], step, TensorData(x.double(), Y))
    info, say = RankInfo(group.rank, parse_devices("cuda:0,cuda:0")), Say()
    with replayed() as keys:
        result = Worker(task, config, info, lambda _: group, threading.Event(), say).train()
    params = {name: value.cpu() for name, value in result.state.params.items()}
    history = [entry["train_loss"] for entry in result.run.history]
    found = {"params": params, "loss": history, "log": result.log, "dropped": result.dropped}
    return {**found, "keys": keys, "said": [line for line in say.lines if "NCCL's sum" in line]}


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
        assert not found[0]["said"], found[0]["said"]
        assert found[0]["keys"] == found[1]["keys"], name
        assert len(found[0]["keys"]) == 9, "every step, tails too"


def moving(group: Group) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        move_shares(patch)
        return run(group, "sgd", mean_loss, {"policy": "balanced", "batch_size": 16, "epochs": 5})


def test_graphs_and_eager_sums_take_turns_on_one_communicator(tmp_path: Path) -> None:
    """A split that was not captured takes two graphs, with an all-reduce between them that is not captured either."""
    found = on_processes(2, f"{__name__}:moving", tmp_path, "nccl")
    assert_params(found, train(1, batch_size=32, epochs=5)[0].state.params, 1e-7)
    assert not found[0]["said"], found[0]["said"]
    assert found[0]["keys"] == found[1]["keys"]
    assert len(found[0]["keys"]) == 15 - 2


def spoiled(group: Group) -> dict[str, Any]:
    x = X.clone()
    x[[3, 60]] = NAN
    return {
        compile: run(group, "sgd", loss_and_count, {"policy": "sync", "compile": compile}, x)
        for compile in ("graph", "off")
    }


def test_steps_that_are_not_finite_leave_no_trace(tmp_path: Path) -> None:
    """Found by one rank, skipped by both on the device."""
    ranks = on_processes(2, f"{__name__}:spoiled", tmp_path, "nccl")
    assert_params([rank["graph"] for rank in ranks], ranks[0]["off"]["params"], 1e-7)
    for rank in ranks:
        assert rank["graph"]["dropped"] == rank["off"]["dropped"]
        assert rank["graph"]["loss"] == pytest.approx(rank["off"]["loss"], rel=1e-6)
    assert any(rank["graph"]["dropped"] for rank in ranks)
    assert len(ranks[0]["graph"]["keys"]) == 9


def refused(group: Group) -> dict[str, Any]:
    """On rank 1 the capture fails after the sum was enqueued."""
    total = Reducer.sum_on_device

    def failing(self: Reducer, *args: Any) -> None:
        total(self, *args)
        if group.rank == 1:
            raise RuntimeError("operation not permitted when stream is capturing")

    Reducer.sum_on_device = failing  # type: ignore[assignment, method-assign]
    return run(group, "sgd", mean_loss, {"policy": "sync"})


def test_where_one_rank_cannot_capture_both_take_two_graphs(tmp_path: Path) -> None:
    found = on_processes(2, f"{__name__}:refused", tmp_path, "nccl")
    assert_params(found, train(1, batch_size=24, epochs=3)[0].state.params, 1e-7)
    assert [rank["keys"] for rank in found] == [[], []]
    assert [len(rank["said"]) for rank in found] == [1, 1]
    assert "stream is capturing" in found[1]["said"][0]


def steps_applied(whole: WholeStep) -> int:
    """How many steps the device has applied; also while a step waits for a peer that does not come."""
    found = torch.empty((), dtype=torch.int64, pin_memory=True)
    side = torch.cuda.Stream(CUDA)  # one that waits for nothing
    with torch.cuda.stream(side):
        found.copy_(whole._applied, non_blocking=True)
    side.synchronize()
    return int(found)


def counted(group: Group) -> list[int]:
    """Steps applied on the device: before, while the peer does not come, after it came, and after a bad step."""
    model = nn.Linear(4, 3).to(CUDA)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step: Any = lambda model, batch: model(batch).square().mean()  # noqa: E731
    eager = EagerStep(model, optimizer, step, Precision("fp32", CUDA), LossMeter(CUDA), None)
    captured = CapturedBackward(eager, lambda inputs: inputs)
    eager.reducer = Reducer(model.parameters(), group, UNLIMITED, overlap=False, num_stats=len(OwnCheck._fields) + 2)
    captured.make_whole()
    whole = captured.whole
    assert whole is not None
    inputs, key = [(torch.ones(5, 4, device=CUDA), 5)], ((5, 5), 10)
    with no_trace(eager, CUDA, keep_optimizer_tensors=True):
        whole.capture(key, inputs, 10)
    (found,) = whole._graphs.values()
    graph = found.capture
    seen = [steps_applied(whole)]
    if group.rank == 0:
        graph.replay(inputs)
        seen.append(steps_applied(whole))
    group.all_reduce(torch.zeros(1)).wait()  # on the host
    if group.rank == 1:
        graph.replay(inputs)
        seen.append(0)
    torch.cuda.synchronize()
    seen.append(steps_applied(whole))
    spoilt = [(torch.full((5, 4), NAN, device=CUDA), 5)] if group.rank == 1 else inputs
    graph.replay(spoilt)
    torch.cuda.synchronize()
    seen.append(steps_applied(whole))
    graph.replay(inputs)
    torch.cuda.synchronize()
    seen.append(steps_applied(whole))
    captured.leave_whole()
    return seen


def test_the_device_counts_the_steps_it_has_applied(tmp_path: Path) -> None:
    """Also while a graph waits in its sum: whoever survives a peer knows whether the step was applied."""
    assert on_processes(2, f"{__name__}:counted", tmp_path, "nccl") == [[0, 0, 1, 1, 2]] * 2
