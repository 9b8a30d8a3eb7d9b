"""Loads the benchmark's data sets as TensorData, with the preparation that the recipes need.

MNIST pixels are divided by 255. CIFAR-10 is normalised per channel and, in training, cropped and flipped per image.
Text is split into windows of 128 or 512 characters whose targets are shifted by one. Random images stand in for those
of ImageNet where only speed is measured.
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
KINDS = {  # what a recipe's model takes, by the name of a set
    "mnist": "28x28",
    "mnist-mini": "28x28",
    "cifar10": "32x32",
    "random-224": "224x224",
    "shakespeare": "text",
    "shakespeare-512": "long text",
}
WINDOWS = {"text": 128, "long text": 512}
RANDOM_IMAGES, CLASSES = 512, 1000


@dataclass(frozen=True)
class TensorSet:
    """A named set as tensors; `vocabulary` is how many distinct characters a text has, None for images."""

    train: TensorData
    test: TensorData
    kind: str  # one of KINDS
    vocabulary: int | None = None


def load_set(name: str) -> TensorSet:
    """MachineError with the command to download it if the data set is missing."""
    kind = KINDS.get(name, "")
    if kind == "224x224":
        return TensorSet(_random_images(0, RANDOM_IMAGES), _random_images(1, RANDOM_IMAGES // 8), kind)
    arrays = datasets.load("shakespeare" if kind in WINDOWS else name)
    if isinstance(arrays, TextArrays):
        train, test = (_windows(tokens, WINDOWS[kind]) for tokens in (arrays.train_tokens, arrays.validation_tokens))
        return TensorSet(train, test, kind, len(arrays.vocabulary))
    transform = _cifar if kind == "32x32" else _of_255
    return TensorSet(
        _images(arrays.train_images, arrays.train_labels, transform),
        _images(arrays.test_images, arrays.test_labels, transform),
        kind,
    )


def _images(images: NDArray[Any], labels: NDArray[Any], transform: Transform) -> TensorData:
    return TensorData(torch.from_numpy(images), torch.from_numpy(labels), transform=transform)


def _random_images(seed: int, count: int) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, 224, 224), generator=generator, dtype=torch.uint8)
    return TensorData(images, torch.randint(CLASSES, (count,), generator=generator), transform=_of_255)


def _of_255(rows: tuple[Tensor, ...], keys: Tensor | None) -> tuple[Tensor, Tensor]:
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


def _windows(tokens: NDArray[Any], window: int) -> TensorData:
    text = torch.from_numpy(tokens)
    count = (len(text) - 1) // window
    inputs = text[: count * window].view(count, window)
    targets = text[1 : count * window + 1].view(count, window)
    return TensorData(inputs, targets, transform=lambda rows, _: (rows[0].long(), rows[1].long()))
