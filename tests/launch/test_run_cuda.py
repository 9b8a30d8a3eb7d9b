"""Solo training on a CUDA device, end to end."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.step.graph_runs import assert_same, make_data, train, train_step
from uneven import TensorData
from uneven.data import feed
from uneven.data.sample_order import sample_keys
from uneven.data.tensors import crop_and_flip

pytestmark = pytest.mark.cuda


def test_augmentation_is_the_same_on_both_devices() -> None:
    images = torch.randint(0, 256, (300, 3, 32, 32), dtype=torch.uint8)
    keys = torch.from_numpy(sample_keys(3, 1, 300))
    assert torch.equal(crop_and_flip(images, keys), crop_and_flip(images.cuda(), keys.cuda()).cpu())


@pytest.mark.parametrize("compile", ["off", "graph"])
def test_a_set_too_large_for_the_device_trains_the_same_from_host_memory(
    monkeypatch: pytest.MonkeyPatch, compile: str
) -> None:
    resident = train(compile)
    monkeypatch.setattr(feed, "RESIDENT_FRACTION", 0.0)
    assert_same(resident, train(compile), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compile", ["off", "graph"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_map_style_set_trains_the_same(compile: str, num_workers: int) -> None:
    data = make_data()
    plain = [(2 * x, y) for x, y in zip(*data.tensors, strict=True)]
    assert_same(train(compile), train(compile, dataset=plain, num_workers=num_workers), rtol=1e-12, atol=1e-12)


def test_evaluation_between_captured_steps_does_not_disturb_them() -> None:
    def eval_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], int]:
        return {"loss": train_step(model, batch) * len(batch[1])}, len(batch[1])

    state = train("graph", evaluate=(make_data(), eval_step))
    assert_same(state, train("graph"), rtol=1e-12, atol=1e-12)
    assert state.history[-1]["loss"] < state.history[0]["loss"]


def test_a_simulated_slower_gpu_trains_the_same() -> None:
    assert_same(train("graph", devices="cuda:0@0.5"), train("graph"), rtol=1e-12, atol=1e-12)


def test_the_accounting_sums_to_one_and_other_is_small() -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorData(torch.randn(20_000, 10, generator=generator).double(), torch.zeros(20_000, dtype=torch.int64))
    state = train("graph", dataset=data, epochs=10)
    assert state.timeline is not None
    account = state.timeline.accounts[0]
    assert sum(account.shares.values()) == pytest.approx(1)
    assert account.shares["compute"] > 0.5
    assert any(sample.gpus for sample in state.timeline.samples)
    assert account.seconds["compile"] > 0


def test_torch_compile_trains_close_to_eager() -> None:
    assert_same(train("default", "sgd"), train("off", "sgd"), rtol=1e-6, atol=1e-7)
