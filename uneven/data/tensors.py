"""TensorData, a data set of a few tensors from which a whole batch is one gather on the device; and its augmentation.

`transform(rows, keys)` turns the gathered rows into the batch: type conversion, normalisation and, in training, random
augmentation. `keys` has one int64 per sample, drawn from (seed, epoch, position), or is None in evaluation. The
transform runs on the training device, inside the captured step with `compile="graph"`, so it must consist of tensor
operations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

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
        wrong = next((t for t in tensors if not isinstance(t, Tensor) or t.dim() == 0), None)
        if wrong is not None:
            got = "one without dimensions" if isinstance(wrong, Tensor) else type(wrong).__name__
            raise InputError(
                f"TensorData needs tensors with a row for each sample, got {got}; torch.as_tensor makes one of an array"
            )
        if transform is not None and not callable(transform):
            raise InputError(f"TensorData(transform={transform!r}) must be a function of (rows, keys)")
        lengths = [len(t) for t in tensors]
        if not tensors or len(set(lengths)) != 1:
            raise InputError(f"TensorData needs tensors of one common length, got lengths {lengths}")
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "transform", transform)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], transform: Transform | None = None) -> "TensorData":
        return cls(*tensors, transform=transform)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Batch:
        """One sample, transformed as in evaluation."""
        batch = self.take(torch.tensor([index]), None)
        return tuple(t[0] for t in batch) if isinstance(batch, tuple | list) else batch[0]

    def take(self, indices: Tensor, keys: Tensor | None) -> Batch:
        """The batch of these samples, gathered and transformed on the tensors' device."""
        rows = tuple(t.index_select(0, indices) for t in self.tensors)
        if self.transform is not None:
            return self.transform(rows, keys)
        return rows if len(rows) > 1 else rows[0]

    def first(self, samples: int) -> "TensorData":
        """The first `samples` samples, sharing memory."""
        return TensorData.of([t[:samples] for t in self.tensors], self.transform)

    def to(self, device: torch.device) -> "TensorData":
        return TensorData.of([t.to(device) for t in self.tensors], self.transform)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def is_gathered(dataset: Any) -> bool:
    """Whether a batch of it is one gather of rows: a TensorData, or a TensorDataset that is read as PyTorch's own is.

    A TensorDataset with a `__getitem__` of its own augments or normalises there, so it is read sample by sample.
    InputError for such a TensorData, because its samples have keys, which `__getitem__` does not get.
    """
    kind = next((kind for kind in (TensorData, TensorDataset) if isinstance(dataset, kind)), None)
    if kind is None:
        return False
    names = ("__getitem__", "__getitems__", "__len__", "take")
    own = [name for name in names if getattr(type(dataset), name, None) is not getattr(kind, name, None)]
    if own and kind is TensorData:
        raise InputError(
            f"{type(dataset).__name__} is a TensorData with its own {', '.join(own)}, which would not be called: pass "
            "TensorData(..., transform=...), or derive it from torch.utils.data.Dataset"
        )
    return not own


def key_integers(keys: Tensor, stream: int, high: int) -> Tensor:
    """Random integers in [0, high), one per key; draws of different `stream` are independent."""
    # The bias of the remainder is below high / 2**31.
    return _bits(keys, _wrap(stream * _GOLDEN)) % high


def key_normals(keys: Tensor, stream: int, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers of this shape for each key, in float32: [len(keys), *shape].

    The noise of a sample then depends on its key alone, so it is the same on whichever rank trains the sample. One
    stream of it takes up streams of `key_integers` from `stream * 2**32` on.
    """
    count = math.prod(shape)
    places = torch.arange(2 * ((count + 1) // 2), device=keys.device) * _wrap(_GOLDEN)
    bits = _bits(keys[:, None], places + _wrap((stream << 32) * _GOLDEN))
    # Box and Muller: two uniform numbers in (0, 1) make two normal ones.
    radius, turn = ((bits.double() + 0.5) / 2**31).chunk(2, dim=1)
    radius, turn = (-2 * radius.log()).sqrt(), 2 * math.pi * turn
    normals = torch.cat([radius * turn.cos(), radius * turn.sin()], dim=1)
    return normals[:, :count].float().view(len(keys), *shape)


def _bits(keys: Tensor, streams: Tensor | int) -> Tensor:
    """31 random bits for each key; `streams` are multiples of _GOLDEN."""
    mixed = (keys ^ streams) * _wrap(0xBF58476D1CE4E5B9)
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    mixed = mixed * _wrap(0x94D049BB133111EB)
    return (mixed >> 33) & 0x7FFFFFFF  # the upper ones, non-negative


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 by the golden ratio


def _wrap(value: int) -> int:
    """A 64-bit constant as a signed integer for torch, whose int64 products wrap around."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def crop_and_flip(images: Tensor, keys: Tensor, padding: int = 4) -> Tensor:
    """Zero-pad by `padding`, crop back to size at a random offset, mirror half of the images.

    images: [N, C, H, W]; keys: int64 [N]. Offset and flip of an image depend on its key alone, so they are the same in
    any batch, on any rank or device.
    """
    height, width = images.shape[-2:]
    span = 2 * padding + 1
    top, left = key_integers(keys, 0, span), key_integers(keys, 1, span)
    flip = key_integers(keys, 2, 2).bool()
    rows = top[:, None] + torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    padded = F.pad(images, (padding,) * 4)
    return padded[
        torch.arange(len(images), device=images.device)[:, None, None],
        :,
        rows[:, :, None],
        columns[:, None, :],
    ].permute(0, 3, 1, 2)
