from pathlib import Path

import numpy as np
import pytest
import torch

from uneven.bench.models import sets
from uneven.data.arrays import ImageArrays, TextArrays


def test_mnist_mini_as_tensors() -> None:
    loaded = sets.load_set("mnist-mini")
    images, labels = loaded.train.take(torch.arange(100), None)
    assert (len(loaded.train), len(loaded.test)) == (10_000, 2_000)
    assert images.shape == (100, 1, 28, 28)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_text_windows_are_shifted_by_one_and_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = (np.arange(3000) % 60).astype(np.uint8)
    arrays = TextArrays(text="", vocabulary="x" * 60, tokens=tokens)
    monkeypatch.setattr(sets.datasets, "load", lambda name: arrays)
    loaded = sets.load_set("shakespeare")
    assert (len(loaded.train), len(loaded.test), loaded.vocabulary) == (2699 // 128, 299 // 128, 60)
    inputs, targets = loaded.train.take(torch.tensor([0, 1]), None)
    assert torch.equal(inputs.flatten(), torch.arange(256) % 60)
    assert torch.equal(targets.flatten(), torch.arange(1, 257) % 60)


def test_cifar_is_normalised_and_augmented_only_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (50, 3, 32, 32)).astype(np.uint8)
    labels = np.zeros(50, np.int64)
    monkeypatch.setattr(sets.datasets, "load", lambda name: ImageArrays(images, labels, images, labels))
    loaded = sets.load_set("cifar10")
    plain, _ = loaded.test.take(torch.arange(50), None)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (sets.CIFAR_MEAN, sets.CIFAR_STD))
    torch.testing.assert_close(plain, (torch.from_numpy(images) / 255 - mean) / std)
    augmented, _ = loaded.train.take(torch.arange(50), torch.arange(50) * 7919)
    assert (augmented != plain).flatten(1).any(1).sum() > 40


def test_a_missing_set_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_DATA", str(tmp_path))
    with pytest.raises(RuntimeError, match="uneven data get mnist"):
        sets.load_set("mnist")
