from typing import Any

import pytest
import torch
from torch import nn

from uneven import InputError
from uneven.config import Task, check_task, resolve


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, ("batch_size=0", "at least 1")),
        ({"batch_size": 2.5}, ("batch_size=2.5", "whole number")),
        ({"batch_size": True}, ("batch_size=True",)),
        ({"epochs": -1}, ("epochs=-1", "at least 1")),
        ({"accumulate": 0}, ("accumulate=0",)),
        ({"workers": -1}, ("workers=-1", "at least 0")),
        ({"seed": -3}, ("seed=-3",)),
        ({"policy": "fast"}, ("policy='fast'", "sync, balanced, cadence, async")),
        ({"backend": "mpi"}, ("backend='mpi'", "auto, nccl, cpu")),
        ({"precision": "int8"}, ("precision='int8'", "fp32, bf16, fp16, auto")),
        ({"compile": "yes"}, ("compile='yes'", "off, default, graph")),
        ({"progress": "loud"}, ("progress='loud'", "auto, bar, lines, off")),
        ({"max_grad_norm": 0}, ("max_grad_norm=0", "above 0")),
        ({"checkpoint_every": 1}, ("out=",)),
        ({"batchsize": 3}, ("'batchsize'", "did you mean 'batch_size'")),
        ({"zzz": 3}, ("'zzz'", "the settings are")),
    ],
)
def test_a_bad_setting_names_itself_and_what_is_allowed(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        resolve({"batch_size": 1, "epochs": 1, **settings})
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["batch_size", "epochs"])
def test_what_has_no_default_must_be_given(missing: str) -> None:
    with pytest.raises(InputError, match=f"{missing} is missing"):
        resolve({name: 1 for name in ("batch_size", "epochs") if name != missing})


def test_num_epochs_is_another_name_for_epochs() -> None:
    assert resolve({"batch_size": 1, "num_epochs": 7}).epochs == 7


def task(**changes: Any) -> Task:
    parts = {"make_model": nn.Identity, "make_optimizer": torch.optim.Adam, "train_step": max, "dataset": [1]}
    return Task(**{**parts, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"make_model": nn.Identity()}, "function that makes the model"),
        ({"make_model": 3}, "function that makes the model, got int"),
        ({"make_optimizer": None}, "optimizer must be a function"),
        ({"train_step": "loss"}, "step must be a function"),
        ({"dataset": iter([1])}, "map-style"),
        ({"dataset": None}, "got NoneType"),
        ({"dataset": []}, "dataset is empty"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(changes: dict[str, Any], words: str) -> None:
    check_task(task())
    with pytest.raises(InputError, match=words):
        check_task(task(**changes))
