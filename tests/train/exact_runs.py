"""Runs of exact policies on threads, small enough to be compared with plain PyTorch: nets, data and optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.step.nets import loss_and_count as loss_and_count
from tests.step.nets import mean_loss as mean_loss
from uneven import MuonAdamW
from uneven.config import Evaluation, Task, resolve
from uneven.data.sample_order import prove_exactly_once
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.parallel.tensor_parallel import Columns, Plan, Rows
from uneven.policy.axis import Axis
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.worker import Worker

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def make_muon(params: Any) -> MuonAdamW:
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param in params:
        by_kind[param.dim() == 2 and 3 not in param.shape].append(param)  # the last layer is AdamW's
    return MuonAdamW(
        [
            {"params": by_kind[True], "kind": "muon", "lr": 0.02},
            {"params": by_kind[False], "kind": "adamw", "lr": 1e-2},
        ]
    )


generator = torch.Generator().manual_seed(0)


X = torch.randn(70, 6, generator=generator)


Y = torch.randint(0, 3, (70,), generator=generator)


class Net(nn.Module):
    """Filled from a generator of its own: threads share torch's global one. `unused` never gets a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.unused = nn.Linear(2, 2)
        self.second = nn.Linear(9, 3)
        own = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.3)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def fsdp_units(self) -> list[nn.Module]:
        return [self.first, self.second]

    def tensor_plan(self) -> Plan:
        return {"first": Columns(), "second": Rows()}


def train(
    size: int,
    *,
    optimizer: str = "sgd",
    dtype: torch.dtype = torch.float64,
    step: Any = mean_loss,
    dataset: Any = None,
    scheduler: Any = None,
    evaluation: Evaluation | None = None,
    make_model: Callable[[torch.dtype], nn.Module] = Net,
    **changes: Any,
) -> list[RankResult]:
    config = resolve({"batch_size": 16, "epochs": 2, "seed": 3, **changes})
    data = TensorData(X.to(dtype), Y) if dataset is None else dataset
    task = Task(lambda: make_model(dtype), OPTIMIZERS[optimizer], step, data, scheduler, evaluation)
    devices = parse_devices(["cpu"] * size)

    def rank(group: ThreadGroup) -> RankResult:
        return Worker(task, config, RankInfo(group.rank, devices), lambda _: group, Requests(), Silent()).train()

    results = on_threads(size, rank)
    axis = Axis(len(data), config.slot_size(size), config.epochs)
    prove_exactly_once(axis, [result.log for result in results], axis.total)
    return results


def params(result: RankResult) -> dict[str, torch.Tensor]:
    return result.state.params


def assert_exact(ours: list[RankResult], dense: RankResult, optimizer: str, dtype: torch.dtype) -> None:
    for result in ours[1:]:
        assert all(torch.equal(value, params(ours[0])[name]) for name, value in params(result).items())
    start = {name: param.detach() for name, param in Net(dtype).named_parameters()}
    moved = sum(float(((value - start[name]) ** 2).sum()) for name, value in params(dense).items()) ** 0.5
    apart = sum(float(((value - params(dense)[name]) ** 2).sum()) for name, value in params(ours[0]).items()) ** 0.5
    assert moved > 0.01
    if dtype == torch.float64:
        for name, value in params(ours[0]).items():
            torch.testing.assert_close(value, params(dense)[name], rtol=1e-10, atol=1e-10)
    elif optimizer == "sgd":
        for name, value in params(ours[0]).items():
            torch.testing.assert_close(value, params(dense)[name], rtol=1e-5, atol=1e-6)
    else:
        assert apart / moved <= 1e-4
