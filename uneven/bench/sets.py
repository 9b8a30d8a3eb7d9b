"""The data sets as tensors: arrays by name -> (train, test) TensorData, with the recipes' preparation.

MNIST pixels are divided by 255; CIFAR-10 is normalised by channel and, in training, cropped and flipped per
image; text is cut into windows of 128 characters whose targets are shifted by one.
"""

from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from uneven.data import datasets
from uneven.data.arrays import TextArrays
from uneven.data.augment import crop_and_flip
from uneven.data.tensors import TensorData, Transform

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)
WINDOW = 128


def load_tensors(name: str) -> tuple[TensorData, TensorData]:
    """Training and test part of a named set; a MachineError names the command when it is not here."""
    arrays = datasets.load(name)
    if isinstance(arrays, TextArrays):
        return _windows(arrays.train_tokens), _windows(arrays.validation_tokens)
    transform = _cifar if name == "cifar10" else _mnist
    return (
        _images(arrays.train_images, arrays.train_labels, transform),
        _images(arrays.test_images, arrays.test_labels, transform),
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
    # Cached because a captured step cannot copy from the host: the warm-up has put them on the device.
    return tuple(torch.tensor(v, device=device).view(3, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))  # type: ignore[return-value]


def _windows(tokens: NDArray[Any]) -> TensorData:
    text = torch.from_numpy(tokens)
    count = (len(text) - 1) // WINDOW
    inputs = text[: count * WINDOW].view(count, WINDOW)
    targets = text[1 : count * WINDOW + 1].view(count, WINDOW)
    return TensorData(inputs, targets, transform=lambda rows, _: (rows[0].long(), rows[1].long()))
