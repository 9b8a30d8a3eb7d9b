"""Activations that are recomputed or kept elsewhere: the same params, and as few as the memory asks for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.exact_runs import OPTIMIZERS, X, Y, mean_loss, params, train
from uneven.config import Task, resolve
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.prepare import activation_budget, choose_activations
from uneven.train.rank_info import RankInfo


@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.parametrize("name", [None, "zero1", "zero2", "fsdp", "tensor"])
def test_activations_change_no_params(name: str | None, activations: str) -> None:
    common: dict[str, Any] = {"optimizer": "adamw", "global_batch_size": 24, "strategy": name}
    if name != "tensor":
        common["shares"] = (5, 2)
    kept = train(2, **common)
    for ours, theirs in zip(train(2, activations=activations, **common), kept, strict=True):
        for key, value in params(theirs).items():
            torch.testing.assert_close(params(ours)[key], value, rtol=1e-12, atol=1e-12)


def test_activations_of_a_local_policy_and_of_one_device() -> None:
    for size, options in ((1, {}), (2, {"policy": "cadence", "anchor": 2, "shares": (1, 1)})):
        kept, ours = train(size, **options), train(size, activations="recompute", **options)  # type: ignore[arg-type]
        for key, value in params(kept[0]).items():
            torch.testing.assert_close(params(ours[0])[key], value, rtol=1e-12, atol=1e-12)


class Deep(nn.Module):
    """Three blocks, of which the second keeps most."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, n), nn.Tanh(), nn.Linear(n, 6)) for n in (8, 64, 16))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_auto_recomputes_the_largest_blocks_until_the_rest_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(budget: float | None) -> tuple[list[int], list[str]]:
        monkeypatch.setattr("uneven.train.prepare.activation_budget", lambda _: budget)
        config = resolve({"batch_size": 32, "epochs": 1, "activations": "auto"})
        task = Task(Deep, OPTIMIZERS["sgd"], mean_loss, TensorData(X.double(), Y))
        engine = Engine(task, config, RankInfo(0, parse_devices(["cpu"])), Recorder(0))
        before = {name: value.clone() for name, value in engine.model.state_dict().items()}
        lines = choose_activations(engine)
        torch.testing.assert_close(dict(engine.model.state_dict()), before, rtol=0, atol=0)
        return [place for place, block in enumerate(engine.model.blocks) if "forward" in vars(block)], lines

    assert chosen(None) == ([], []), "a CPU keeps everything"
    assert chosen(1e9)[0] == []
    # 32 samples of 64 doubles are 16 KiB.
    found, (line,) = chosen(16_000)
    assert found == [1]
    assert line.endswith("recomputes blocks.1")
    assert chosen(0)[0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("strategy", "held"),
    [(None, 4 * 400 + 2000), ("zero1", 2.5 * 400 + 2000), ("zero2", 1.75 * 400 + 2000), ("fsdp", 0.25 * (1600 + 2000))],
)
def test_the_budget_counts_no_gradients_and_no_state_of_frozen_params(
    strategy: str | None, held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uneven.train.prepare.room_bytes", lambda device, ranks: 10_000.0 / ranks)
    settings = {"batch_size": 4, "epochs": 1, "strategy": strategy}
    config = resolve(settings if strategy is None else {**settings, "memory_shares": (3, 1), "policy": "sync"})
    model = nn.Sequential(nn.Linear(100, 1, bias=False), nn.Linear(500, 1, bias=False).requires_grad_(False))
    info = RankInfo(1, parse_devices(["cuda:0", "cuda:1"]))
    engine: Any = SimpleNamespace(device=torch.device("cuda:1"), config=config, rank_info=info, model=model)
    assert activation_budget(engine) == 10_000 - held
