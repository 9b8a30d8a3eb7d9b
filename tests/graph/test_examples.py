"""The examples of graphs train for a few steps; `-m soak` lets them train to the end."""

import dataclasses
import math
import runpy
from pathlib import Path

import pytest

from uneven.data import datasets

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("graph_*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = datasets.load("mnist-mini")
    few = dataclasses.replace(whole, train_images=whole.train_images[:128], train_labels=whole.train_labels[:128])
    monkeypatch.setattr(datasets, "load", lambda name: few)
    history = runpy.run_path(str(path))["state"].history
    assert len(history) > 1
    assert math.isfinite(history[-1]["train_loss"])
    assert history[-1]["train_loss"] < history[0]["train_loss"]
