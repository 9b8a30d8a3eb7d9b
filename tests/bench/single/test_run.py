import json
from pathlib import Path
from typing import Any

import pytest
import torch

from uneven import InputError, TrainedState
from uneven.bench import models
from uneven.bench.models.sets import load_set
from uneven.bench.orders import Order
from uneven.bench.single.run import measure_quality, run_single
from uneven.files import finite


def order(out: Path, **changes: Any) -> Order:
    settings = {"model": "logistic", "data": "mnist-mini", "epochs": 2, "samples": 640, "devices": "cpu"}
    return Order(**{**settings, "out": out, "progress": "off", "repeat": False, **changes})


@pytest.mark.parametrize("mode", ["solo-0", pytest.param("sync", marks=pytest.mark.soak)])
def test_a_run_folder_is_complete_and_its_quality_is_that_of_the_saved_state(tmp_path: Path, mode: str) -> None:
    summary = run_single(order(tmp_path, mode=mode))
    folder = tmp_path / "logistic" / mode / "seed-0"
    assert {path.name for path in folder.iterdir()} == {
        ".uneven",  # the folder is a run's own
        "config.json",
        "log.json",
        "metrics.jsonl",
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
        "summary.json",
        "timeline.csv",
        "timeline.html",
        "timeline.json",
        "trace.json",
    }
    assert json.loads((folder / "summary.json").read_text()) == finite(summary)
    assert summary.samples == 1280
    assert (summary.mode, summary.devices) == (mode, ["cpu"])
    assert [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").open()] == [1, 2]
    recipe = models.get("logistic")
    again = measure_quality(
        TrainedState.load(folder), recipe, recipe.make_model, load_set("mnist-mini").test, torch.device("cpu")
    )
    assert again == summary.quality
    assert again["accuracy"] > 0.5


def test_a_second_run_keeps_the_first(tmp_path: Path) -> None:
    first, second = run_single(order(tmp_path)), run_single(order(tmp_path))
    assert first.quality == second.quality
    assert (tmp_path / "logistic" / "solo-0" / "seed-0.1" / "summary.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "lenet5"}, ("'lenet5'", "lenet", "uneven bench list")),
        ({"mode": "fast"}, ("'fast'", "solo-N", "uneven bench list")),
        ({"mode": "solo-1"}, ("'solo-1'", "--devices")),
        ({"mode": "cpu-sync"}, ("'cpu-sync'", "--devices cpu,cpu@0.4")),
        ({"mode": "sync", "eval_every": 2}, ("--eval-every 2", "'sync'", "after training", "'cpu-sync'")),
        ({"mode": "sync", "compile": "graph"}, ("compile='graph'", "'default'")),
        ({"mode": "sync", "devices": "cpu,cuda:9"}, ("cuda:9", "uneven devices")),
        ({"samples": 0}, ("--samples 0", "at least 1")),
        ({"batch_size": 0}, ("batch_size=0", "at least 1")),
        ({"model": "resnet-20"}, ("cifar10", "mnist-mini")),
        ({"data": "imagenet"}, ("'imagenet'", "uneven data list")),
        ({"devices": "cuda:9"}, ("cuda:9", "uneven devices")),
    ],
)
def test_bad_orders_name_value_choices_and_next_command(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        run_single(order(tmp_path / "out", **changes))
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "out").exists()
