"""Fixtures of runs on threads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from uneven.policy.finish import Cost


@pytest.fixture
def equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank may look so slow that there are too few rounds."""
    monkeypatch.setattr("uneven.train.worker.measure", lambda _: Cost(0.0, 1.0))


@pytest.fixture
def muon_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch orthogonalises in bf16, where the last bit of a gradient decides: exact parity needs exact numbers."""

    def polar(grad: Tensor, *_: Any) -> Tensor:
        left, _, right = torch.linalg.svd(grad, full_matrices=False)
        return left @ right

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", polar)
