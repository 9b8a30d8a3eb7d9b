"""Torch's modes in another process: set where they differ, and free of cost where they do not."""

import subprocess
import sys
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


def test_where_nothing_differs_torchs_compiler_is_not_imported() -> None:
    """It takes two seconds in every rank and every loader process."""
    code = (
        "import sys; from uneven.data.torch_modes import TorchModes; TorchModes.read().set(); "
        "print([name for name in sys.modules if name.startswith(('torch._inductor', 'torch._dynamo'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
