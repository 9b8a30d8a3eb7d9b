"""Torch's modes in another process: set where they differ; where not, it costs nothing (test_shape.py)."""

from collections.abc import Callable

import pytest
import torch

from uneven.data.torch_modes import TorchModes


@pytest.fixture
def plain() -> TorchModes:
    return TorchModes.read()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ],
)
def test_every_mode_is_read_and_set(change: Callable[[], object], plain: TorchModes) -> None:
    try:
        change()
        changed = TorchModes.read()
        assert changed != plain
        plain.set()
        assert TorchModes.read() == plain
        changed.set()
        assert TorchModes.read() == changed
    finally:
        plain.set()
