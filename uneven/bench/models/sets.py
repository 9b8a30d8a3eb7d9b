"""Loads the benchmark's data sets as TensorData, with the preparation that the recipes need.

MNIST pixels are divided by 255. CIFAR-10 is normalised per channel and, in training, cropped and flipped per image.
Text is split into windows of 128 characters whose targets are shifted by one.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from uneven.data import datasets
from uneven.data.arrays import TextArrays
from uneven.data.tensors import TensorData, Transform, crop_and_flip

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)
WINDOW = 128


@dataclass(frozen=True)
class TensorSet:
    """A named set as tensors; `vocabulary` is how many distinct characters a text has, None for images."""

    train: TensorData
    test: TensorData
    kind: str  # "28x28", "32x32" or "text"; a recipe's model takes one of them
    vocabulary: int | None = None


def load_set(name: str) -> TensorSet:
    """MachineError with the command to download it if the data set is missing."""
    arrays = datasets.load(name)
    if isinstance(arrays, TextArrays):
        train, test = _windows(arrays.train_tokens), _windows(arrays.validation_tokens)
        return TensorSet(train, test, "text", len(arrays.vocabulary))
    size = arrays.train_images.shape[-1]
    transform = _cifar if size == 32 else _mnist
    return TensorSet(
        _images(arrays.train_images, arrays.train_labels, transform),
        _images(arrays.test_images, arrays.test_labels, transform),
        f"{size}x{size}",
    )


def _images(images: NDArray[Any], labels: NDArray[Any], transform: Transform) -> TensorData:
    return TensorData(torch.from_numpy(images), torch.from_numpy(labels), transform=transform)


def _mnist(rows: tuple[Tensor, ...], keys: Tensor | None) -> tuple[Tensor, Tensor]:
    del keys
    images, labels = rows
    return images.float() / 255, labels


def _cifar(rows: tuple[Tensor, ...], keys: Tensor | None) -> tuple[Tensor, Tensor]:
    images, labels = rows
    if keys is not None:
        images = crop_and_flip(images, keys)
    mean, std = _cifar_constants(images.device)
    return (images.float() / 255 - mean) / std, labels


@lru_cache
def _cifar_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    # Cached, because a captured step cannot copy from the host: the warm-up copies them to the device.
    return tuple(torch.tensor(v, device=device).view(3, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))  # type: ignore[return-value]


def _windows(tokens: NDArray[Any]) -> TensorData:
    text = torch.from_numpy(tokens)
    count = (len(text) - 1) // WINDOW
    inputs = text[: count * WINDOW].view(count, WINDOW)
    targets = text[1 : count * WINDOW + 1].view(count, WINDOW)
    return TensorData(inputs, targets, transform=lambda rows, _: (rows[0].long(), rows[1].long()))
