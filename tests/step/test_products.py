"""A slice that multiplies wrong in half precision is refused by name. Real slices: tests/launch/test_ranks_cuda.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.exact_runs import Net, X, Y, mean_loss
from uneven.config import Task, resolve
from uneven.data.tensors import TensorData
from uneven.errors import MachineError
from uneven.hardware.device import parse_device
from uneven.hardware.mps import PERCENTAGE, name_slice
from uneven.step.precision import HALF, check_products, check_slice
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo

CPU = torch.device("cpu")


def rounded(left: Tensor, right: Tensor) -> Tensor:
    """As a right product in half precision, in less time than a CPU without such instructions takes."""
    return (left.float() @ right.float()).to(left.dtype)


def one_block_wrong(left: Tensor, right: Tensor) -> Tensor:
    product = rounded(left, right)
    if left.dtype != torch.float32:
        product[:64, :64] = 0
    return product


def not_a_number(left: Tensor, right: Tensor) -> Tensor:
    return rounded(left, right) * (1 if left.dtype == torch.float32 else torch.nan)


@pytest.mark.parametrize("precision", HALF)
def test_a_right_product_passes(precision: str) -> None:
    check_products("cuda:0%24", CPU, [precision], rounded)


@pytest.mark.parametrize("product", [one_block_wrong, not_a_number])
@pytest.mark.parametrize("precision", HALF)
def test_a_wrong_product_names_slice_type_and_what_to_do(product: Any, precision: str) -> None:
    with pytest.raises(MachineError, match="wrong numbers") as caught:
        check_products("cuda:0%40", CPU, [precision], product)
    for part in ("cuda:0%40", precision, "plain PyTorch", "50 or 24", "precision='fp32'"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_random_number_of_the_run_is_drawn() -> None:
    before = torch.get_rng_state()
    check_products("cuda:0%24", CPU, ["bf16"], rounded)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("device", "percentage", "named"),
    [
        ("cuda:1%40", None, "cuda:1%40"),
        ("cuda:1%40", "40", "cuda:1%40"),
        ("cuda:0", "40", f"cuda:0 ({PERCENTAGE}=40)"),
        ("cuda:0", None, None),
        ("cpu", "40", None),
    ],
)
def test_slices_are_the_launchers_and_those_of_the_users_own_daemon(
    monkeypatch: pytest.MonkeyPatch, device: str, percentage: str | None, named: str | None
) -> None:
    monkeypatch.delenv(PERCENTAGE, raising=False)
    if percentage is not None:
        monkeypatch.setenv(PERCENTAGE, percentage)
    assert name_slice(parse_device(device)) == named


@pytest.mark.parametrize(
    ("device", "precision", "dtype", "refused"),
    [
        ("cuda:0%40", "bf16", torch.float32, "bf16"),
        ("cuda:0%40", "fp16", torch.float32, "fp16"),
        ("cuda:0%40", "fp32", torch.bfloat16, "bf16"),
        ("cuda:0%40", "fp32", torch.float32, None),
        ("cuda:0", "bf16", torch.float32, None),
    ],
)
def test_only_slices_and_the_types_that_are_used_are_tried(
    monkeypatch: pytest.MonkeyPatch, device: str, precision: str, dtype: torch.dtype, refused: str | None
) -> None:
    monkeypatch.delenv(PERCENTAGE, raising=False)
    monkeypatch.setattr(torch, "mm", one_block_wrong)
    model = nn.Linear(2, 2, dtype=dtype)
    if refused is None:
        check_slice(parse_device(device), precision, model)
        return
    with pytest.raises(MachineError, match=f"in {refused} on this slice"):
        check_slice(parse_device(device), precision, model)


def test_every_engine_tries_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that says that it is one."""
    monkeypatch.setattr("uneven.step.precision.name_slice", lambda device: "cuda:0%40")
    monkeypatch.setattr(torch, "mm", one_block_wrong)
    task = Task(
        lambda: Net(torch.float32),
        lambda params: torch.optim.SGD(params, lr=0.1),
        mean_loss,
        TensorData(X, Y),
        is_own_loop=True,
    )
    info, config = RankInfo(0, (parse_device("cpu"),)), {"batch_size": 8, "epochs": 1}
    Engine(task, resolve(config), info, Recorder(0))
    with pytest.raises(MachineError, match="cuda:0%40"):
        Engine(task, resolve({**config, "precision": "bf16"}), info, Recorder(0))
