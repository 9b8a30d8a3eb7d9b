"""What a notebook shows of a trained state."""

from typing import Any

import torch
from torch import nn

from uneven import TensorData, TrainedState, fit


def trained(**settings: Any) -> TrainedState:
    x = torch.randn(32, 4)
    return fit(
        model=lambda: nn.Linear(4, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: model(batch).square().mean(),
        dataset=TensorData(x),
        **{"batch_size": 8, "epochs": 2, "devices": "cpu", **settings},
    )


def test_a_state_is_shown_as_a_short_table() -> None:
    state = trained(progress="off")
    text, table = repr(state), state._repr_html_()
    assert text.startswith(
        "TrainedState(model 5 params in 2 tensors, 0 buffers; trained 64 samples in 8 steps, 2 epochs;"
    )
    assert "tensor(" not in text
    assert len(text) < 400
    for row in ("model", "trained", "last epoch", "devices"):
        assert f">{row}</th>" in table
    assert "train_loss" in table
    assert table.count("<tr>") <= 6
