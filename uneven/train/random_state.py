"""The state of every random generator that training draws from: Python's, numpy's, torch's and the device's.

Each rank has its own (dropout masks differ). A checkpoint keeps each rank's (train/saves.py and resume.py), and a step
that may have to be done again those from before it (train/elastic/step_guard.py).
"""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


def seed_random(seed: int, *, is_own_loop: bool) -> None:
    """Seed torch, and for `fit` Python and numpy, too: a train step may draw from them. A user's loop seeds its own."""
    torch.manual_seed(seed)
    if not is_own_loop:
        random.seed(seed)
        np.random.seed(seed % 2**32)


class RandomStates(NamedTuple):
    """As the generators give them; cheap enough for every step."""

    python: Any
    numpy: Any
    cpu: Tensor  # torch's
    cuda: Tensor | None  # None where the device is another

    @classmethod
    def read(cls, device: torch.device) -> "RandomStates":
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self, device: torch.device) -> None:
        """Set all generators; that of a kind of device that is not among them goes on as it is."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


def capture_random(device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors by name) of all generators, as they are now."""
    states = RandomStates.read(device)
    version, numbers, gauss = states.python
    kind, keys, *rest = states.numpy
    record = {"python": [version, gauss], "numpy": [kind, *rest]}
    tensors = {
        "random.python": torch.tensor(numbers, dtype=torch.int64),
        "random.numpy": torch.from_numpy(np.array(keys, dtype=np.int64)),
        "random.torch": states.cpu,
    }
    if states.cuda is not None:
        tensors["random.cuda"] = states.cuda
    return record, tensors


def restore_random(record: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all generators to what `capture_random` returned."""
    version, gauss = record["python"]
    kind, *rest = record["numpy"]
    python = (version, tuple(tensors["random.python"].tolist()), gauss)
    numpy = (kind, tensors["random.numpy"].numpy().astype(np.uint32), *rest)
    RandomStates(python, numpy, tensors["random.torch"], tensors.get("random.cuda")).restore(device)
