"""Nested state as JSON and named tensors, and back: nothing is pickled.

An optimizer's state, or what a user keeps in a checkpoint, is dicts, lists, tuples, tensors and plain values in any
nesting. `split_tree` takes the tensors out under their paths and leaves a skeleton that JSON can hold; `join_tree`
puts both together again, with the same types. Used by train/saves.py and train/saved_state.py.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uneven.errors import InputError

KIND = "#"  # the key of a skeleton's entry that is not a plain value


def split_tree(value: Any, path: str) -> tuple[Any, dict[str, Tensor]]:
    """(skeleton, tensors by path); InputError names the path of what cannot be kept. Tensors are not copied."""
    tensors: dict[str, Tensor] = {}

    def split(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach()
            return {KIND: "tensor", "name": path}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.kind in "biuf":
            tensors[path] = torch.from_numpy(np.array(value))
            return {KIND: "array", "name": path}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [split(entry, f"{path}.{place}") for place, entry in enumerate(value)]
        if isinstance(value, tuple):
            return {KIND: "tuple", "items": [split(entry, f"{path}.{place}") for place, entry in enumerate(value)]}
        if isinstance(value, Mapping):
            if any(not isinstance(key, str | int | float | bool) for key in value):
                raise InputError(f"{path} has a key that is neither text nor a number: it cannot be kept in a file")
            if KIND not in value and all(isinstance(key, str) for key in value):
                return {key: split(entry, f"{path}.{key}") for key, entry in value.items()}
            return {KIND: "dict", "items": [[key, split(entry, f"{path}.{key}")] for key, entry in value.items()]}
        raise InputError(
            f"{path} is a {type(value).__name__}, which cannot be kept in a checkpoint: tensors, numbers, text, and "
            "lists and dicts of them can"
        )

    return split(value, path), tensors


def join_tree(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `split_tree` was given, with these tensors."""
    if isinstance(skeleton, list):
        return [join_tree(entry, tensors) for entry in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = skeleton.get(KIND)
    if kind is None:
        return {key: join_tree(entry, tensors) for key, entry in skeleton.items()}
    if kind == "tensor":
        return tensors[skeleton["name"]]
    if kind == "array":
        return tensors[skeleton["name"]].numpy()
    if kind == "tuple":
        return tuple(join_tree(entry, tensors) for entry in skeleton["items"])
    return {key: join_tree(entry, tensors) for key, entry in skeleton["items"]}
