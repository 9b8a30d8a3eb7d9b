"""What the user's functions find in a run of `fit`: random numbers, the modes of the model and of torch, their rank."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.launch.test_run import X, Y, eval_step, make_net, train, train_step
from uneven import Ddp, TensorData


def mixing_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """With random numbers of all three kinds, as mixup has."""
    weight = random.random() + float(np.random.rand()) + torch.rand(())
    return weight * train_step(model, batch)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_the_same_seed_gives_the_same_bits_whatever_the_step_draws_from(devices: str) -> None:
    settings: dict[str, Any] = {"step": mixing_step, "devices": devices, "policy": "sync", "epochs": 1}
    first, second = (train(**settings).params for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_the_callers_random_numbers_go_on_as_if_nothing_was_trained() -> None:
    seed_all()
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    seed_all()
    train(step=mixing_step, epochs=1)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


def test_a_part_of_the_model_in_eval_mode_stays_so() -> None:
    def frozen() -> nn.Module:
        model = make_net()
        model[1].eval()
        return model

    assert train(model=frozen, evaluate=(TensorData(X, Y), eval_step)).buffers["1.num_batches_tracked"] == 0
    assert train(model=lambda: make_net().eval(), epochs=1).buffers["1.num_batches_tracked"] == 7


def test_the_ranks_of_fit_know_their_number(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        (tmp_path / f"rank {Ddp.rank()}").touch()
        return train_step(model, batch)

    train(step=step, devices="cpu,cpu", epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank 0", "rank 1"]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples of the default dtype, wherever they are made."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 2)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_the_script_has_set_for_all_of_torch_holds_in_ranks_and_loader_processes(num_workers: int) -> None:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(6, 2), "dataset": Drawn(), "epochs": 1}
    expected = train(**settings).params
    found = train(**settings, devices="cpu,cpu", global_batch_size=16, num_workers=num_workers).params
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)  # of the same dtype, too
