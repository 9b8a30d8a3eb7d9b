"""The state of every random generator that training draws from: Python's, numpy's, torch's and the device's.

Each rank has its own (dropout masks differ), and a checkpoint keeps each rank's. Used by train/saves.py and resume.py.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture_random(device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors by name) of all generators, as they are now."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    record = {"python": [version, gauss], "numpy": [kind, *rest]}
    tensors = {
        "random.python": torch.tensor(numbers, dtype=torch.int64),
        "random.numpy": torch.from_numpy(np.array(keys, dtype=np.int64)),
        "random.torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return record, tensors


def restore_random(record: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all generators; that of a kind of device that the checkpoint did not have goes on as it is."""
    version, gauss = record["python"]
    random.setstate((version, tuple(tensors["random.python"].tolist()), gauss))
    kind, *rest = record["numpy"]
    np.random.set_state((kind, tensors["random.numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(tensors["random.torch"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
