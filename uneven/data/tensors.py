"""TensorData: a data set that is a few tensors, so that a whole batch is one gather on the device.

`transform(batch, keys)` turns gathered rows into what the model sees: type conversion and normalisation, and
in training the random augmentation. `keys` holds one int64 per sample, drawn from (seed, epoch, position), or
None in evaluation. It runs on the training device, inside the captured step under `compile="graph"`, so it
must be made of tensor operations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uneven.errors import InputError

Batch = Any
Transform = Callable[[tuple[Tensor, ...], Tensor | None], Batch]


@dataclass(frozen=True, init=False, eq=False)
class TensorData:
    """A map-style data set over tensors with a common first dimension.

    >>> data = TensorData(torch.arange(6).view(3, 2), torch.tensor([0, 1, 2]))
    >>> len(data), data[1][0].tolist()
    (3, [2, 3])
    """

    tensors: tuple[Tensor, ...]
    transform: Transform | None

    def __init__(self, *tensors: Tensor, transform: Transform | None = None) -> None:
        lengths = [len(t) for t in tensors]
        if not tensors or len(set(lengths)) != 1:
            raise InputError(f"TensorData needs tensors of one common length, got lengths {lengths}")
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "transform", transform)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Batch:
        """One sample as evaluation sees it."""
        batch = self.take(torch.tensor([index]), None)
        return tuple(t[0] for t in batch) if isinstance(batch, tuple | list) else batch[0]

    def take(self, indices: Tensor, keys: Tensor | None) -> Batch:
        """The batch of these samples, on the tensors' device."""
        rows = tuple(t.index_select(0, indices) for t in self.tensors)
        if self.transform is not None:
            return self.transform(rows, keys)
        return rows if len(rows) > 1 else rows[0]

    def first(self, samples: int) -> "TensorData":
        """The first `samples` samples, sharing memory."""
        return TensorData(*(t[:samples] for t in self.tensors), transform=self.transform)

    def to(self, device: torch.device) -> "TensorData":
        return TensorData(*(t.to(device) for t in self.tensors), transform=self.transform)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def key_integers(keys: Tensor, stream: int, high: int) -> Tensor:
    """Integers in [0, high), one per key; each `stream` is an independent draw."""
    mixed = (keys ^ _wrap(stream * 0x9E3779B97F4A7C15)) * _wrap(0xBF58476D1CE4E5B9)
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    mixed = mixed * _wrap(0x94D049BB133111EB)
    # The upper 31 bits, non-negative: the bias of the remainder is below high / 2**31.
    return ((mixed >> 33) & 0x7FFFFFFF) % high


def _wrap(value: int) -> int:
    """A 64-bit constant as the signed integer torch wants; its int64 products wrap around."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
