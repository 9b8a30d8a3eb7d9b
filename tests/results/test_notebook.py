"""A notebook as seen by uneven: a fake IPython that records what is displayed and updated."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.results.heartbeats import ENTRY, pair
from uneven import TensorData, TrainedState, fit
from uneven.results.progress import Reporter, in_notebook


class Cell:
    """What stands below a cell: one text per output."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.updates = 0

    def display(self, shown: Any, display_id: bool) -> Any:
        assert display_id
        place = len(self.outputs)
        self.outputs.append(shown)

        def update(shown: Any) -> None:
            self.updates += 1
            self.outputs[place] = shown

        return SimpleNamespace(update=update)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    found = Cell()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    display.display = found.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return found


def trained(**settings: Any) -> TrainedState:
    x = torch.randn(32, 4)
    return fit(
        model=lambda: nn.Linear(4, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        step=lambda model, batch: model(batch).square().mean(),
        dataset=TensorData(x),
        **{"batch_size": 8, "epochs": 2, "devices": "cpu", **settings},
    )


def test_a_run_is_one_block_that_is_updated(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    (block,) = cell.outputs
    assert cell.updates > 2
    lines = repr(block).splitlines()
    assert lines[0].startswith("uneven ")
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1/2", "2/2"]
    assert sum("100 %" in line and "train" in line for line in lines) == 1
    assert lines[-2].startswith("trained 64 samples") or lines[-3].startswith("trained 64 samples")
    assert block._repr_html_().startswith("<pre")
    assert capsys.readouterr() == ("", "")
    trained(progress="off")
    assert len(cell.outputs) == 1


def test_several_ranks_are_one_block_too(cell: Cell) -> None:
    reporter = Reporter("auto")
    for statuses in (pair(3600, 1400), pair(6900, 2700, history=[ENTRY])):
        reporter.ranks(statuses)
    reporter.close()
    reporter.say(["done <b>"])
    (block,) = cell.outputs
    text = repr(block)
    assert "share 72 %" in text
    assert "share 28 %" in text
    assert text.splitlines()[-1] == "done <b>"
    assert "done &lt;b&gt;" in block._repr_html_()


def test_a_shell_in_a_terminal_is_no_notebook(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_notebook()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
    assert cell.outputs == []


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
