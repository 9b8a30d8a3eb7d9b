"""What a rank times of its own steps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from uneven import TensorData
from uneven.config import Task, resolve
from uneven.hardware.device import parse_devices
from uneven.plan.ranks import _Own
from uneven.policy.axis import Part
from uneven.step.eager import DerivedStep
from uneven.timeline.record import Recorder
from uneven.train.engine import Engine
from uneven.train.rank_info import RankInfo

DATA = TensorData(torch.randn(40, 4), torch.randint(0, 3, (40,)))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def test_every_size_has_a_captured_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the samples ran eagerly: they seemed to take as long as all, and sync on a GPU pair was 27 % too short."""
    steps: list[tuple[int, int]] = []  # (size of the captured step, samples that it was given)

    class Captured(DerivedStep):
        def is_prepared(self, sizes: Sequence[int], slot_samples: int) -> bool:
            return tuple(sizes) in prepared

        def start_alone(self, inputs: Any, slot_samples: int) -> Any:
            steps.append((prepared[tuple(samples for _, samples in inputs)], slot_samples))
            return lambda: None

    prepared: dict[tuple[int, ...], int] = {}  # sizes of the captured steps, and their samples

    def capture(engine: Engine, part: Part) -> None:
        prepared[tuple(part.sizes)] = part.samples
        engine.use_step(Captured(engine.step))

    monkeypatch.setattr("uneven.plan.ranks.capture", capture)
    task = Task(lambda: nn.Linear(4, 3), lambda params: torch.optim.SGD(params, 0.1), loss, DATA, None, None)
    worker: Any = SimpleNamespace(
        task=task,
        config=resolve({"batch_size": 8, "epochs": 1}),
        recorder=Recorder(0),
        rank_info=RankInfo(0, parse_devices("cpu")),
    )
    monkeypatch.setattr("uneven.plan.ranks.warm_up", lambda engine: capture(engine, Part(engine.axis.slot(0), 0, 8, 8)))
    own = _Own(worker)
    for samples in (8, 4, 8, 4):
        own._time(samples, 0.0)
    assert set(steps) == {(8, 8), (4, 4)}
