"""Nested state through JSON and tensors and back."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from uneven.errors import InputError
from uneven.results.state_tree import join_tree, split_tree

TREES: list[Any] = [
    {"step": 3, "exp_avg": torch.arange(4.0), "nested": [{"a": (1, torch.ones(2, 2, dtype=torch.bfloat16))}, None]},
    {0: "zero", 1.5: True, "#": "a key of ours"},
    [],
    (float("inf"), -0.0, 2**70, "text"),
    {"rng": np.arange(3, dtype=np.uint32), "n": np.int64(7)},
]


@pytest.mark.parametrize("tree", TREES)
def test_round_trip_keeps_values_and_types(tree: Any) -> None:
    skeleton, tensors = split_tree(tree, "x")
    assert same(join_tree(json.loads(json.dumps(skeleton)), tensors), tree)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if isinstance(wanted, np.generic):
        return bool(found == wanted)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    return type(found) is type(wanted) and repr(found) == repr(wanted)


@pytest.mark.parametrize("value", [object(), {"f": len}, {(1, 2): 3}])
def test_what_cannot_be_kept_is_named(value: Any) -> None:
    with pytest.raises(InputError, match=r"^x\.deep"):
        split_tree({"deep": [value]}, "x")
