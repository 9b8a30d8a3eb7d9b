"""The strategies on a GPU: two ranks on one device, over NCCL and by way of the host, against one CPU process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.parity import WRAPS, Case, Outcome, assert_same_state, train_dense, train_on
from tests.parallel.tensor_nets import KINDS, NOISE, dense, train
from tests.ranks import on_processes
from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, loss_and_count
from uneven import TensorData, fit
from uneven.comm.group import Group
from uneven.config import STRATEGIES
from uneven.parallel.strategy import FullState

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(200)]

CASES = [
    Case(2, "unequal", 2, "unused", "adamw"),
    Case(2, "equal", 1, "tied", "sgd"),
    Case(2, "zero", 1, "channels_last", "sgd"),
]
BACKENDS = {
    "nccl": {"devices": "cuda:0,cuda:0", "backend": "nccl"},
    "host": {"devices": "cuda:0,cuda:0", "backend": "cpu"},
    "mixed": {"devices": "cuda:0,cpu", "backend": "cpu"},
}


def everything(group: Group) -> tuple[list[Outcome], list[tuple[FullState, list[float]]]]:
    ours = [train_on(case, wrap, group, device="cuda:0") for case in CASES for wrap in WRAPS.values()]
    cut = [train(group, kind, "sgd", True, (3, 1), device="cuda:0") for kind in KINDS]
    return ours, cut


@pytest.mark.parametrize("backend", ["nccl", "cpu"])
def test_every_strategy(backend: str, tmp_path: Path) -> None:
    expected, norms = dense("sgd", True)
    for ours, cut in on_processes(2, "tests.parallel.test_strategies_cuda:everything", tmp_path, backend):
        for place, outcome in enumerate(ours):
            alone = train_dense(CASES[place // len(WRAPS)])
            assert_same_state(outcome.state, alone.state)
            torch.testing.assert_close(outcome.norms, alone.norms, rtol=1e-10, atol=1e-12)
        for state, clipped in cut:
            assert_same_state(state, expected, NOISE)
            torch.testing.assert_close(clipped, norms, rtol=1e-10, atol=1e-12)


def trained(**changes: Any) -> dict[str, torch.Tensor]:
    common: dict[str, Any] = {"epochs": 2, "seed": 3, "progress": "off", "step": loss_and_count, "max_grad_norm": 0.1}
    data = TensorData(X.double(), Y)
    make_model = partial(Net, torch.float64)
    return fit(model=make_model, optimizer=OPTIMIZERS["adamw"], dataset=data, **{**common, **changes}).params


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "sequence"])
def test_fit_with_a_strategy(backend: str, name: str) -> None:
    ours = trained(strategy=name, batch_size=8, **BACKENDS[backend])
    alone = trained(batch_size=16, devices="cpu")
    for key, value in alone.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activations", ["recompute", "offload", "auto"])
def test_activations_change_no_params(activations: str) -> None:
    ours = trained(activations=activations, batch_size=8, **BACKENDS["host"])
    alone = trained(batch_size=16, devices="cpu")
    for key, value in alone.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-10)
