"""The embedded set: real, whole, small, and readable without anything but numpy."""

import hashlib
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

from uneven.data import datasets, mini
from uneven.errors import MachineError


def test_counts_sums_and_histogram() -> None:
    digits = datasets.load("mnist-mini")
    assert isinstance(digits, datasets.ImageArrays)
    assert digits.train_images.shape == (10_000, 1, 28, 28)
    assert digits.test_images.shape == (2_000, 1, 28, 28)
    # Counted in the official idx files.
    assert np.bincount(digits.train_labels).tolist() == [
        1001,
        1127,
        991,
        1032,
        980,
        863,
        1014,
        1070,
        944,
        978,
    ]
    assert np.bincount(digits.test_labels).tolist() == [175, 234, 219, 207, 217, 179, 178, 205, 192, 194]
    pixels = hashlib.sha256(digits.train_images.tobytes() + digits.test_images.tobytes()).hexdigest()
    assert pixels == "54ed7994940da86ce84ba063eb743d818c7f1202c7f1e61eeb03bf1bce93a276"
    labels = np.concatenate([digits.train_labels, digits.test_labels]).astype(np.uint8)
    expected = "aad31d159fdb3a02e76823c619d2bdf9b36135ff3d99381c9960635303d06ae6"
    assert hashlib.sha256(labels.tobytes()).hexdigest() == expected


def test_it_is_small_and_carries_its_licence() -> None:
    embedded = files("uneven.data").joinpath("embedded")
    assert len(embedded.joinpath("mnist-mini.xz").read_bytes()) <= 2_500_000
    licence = embedded.joinpath("LICENSE-mnist-mini.txt").read_text()
    for word in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", mini.IMAGES_SHA256, mini.LABELS_SHA256):
        assert word in licence


def test_pack_round_trip_is_deterministic() -> None:
    images = np.random.default_rng(2).integers(0, 3, (5, 28, 28), np.uint8)
    labels = np.arange(5, dtype=np.uint8)
    packed = mini.pack(images, labels, 4)
    assert packed == mini.pack(images, labels, 4)
    read_images, read_labels, num_train = mini.unpack(packed)
    assert np.array_equal(read_images, images)
    assert np.array_equal(read_labels, labels)
    assert num_train == 4


def test_a_damaged_installation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini, "IMAGES_SHA256", "0" * 64)
    with pytest.raises(MachineError, match=r"wrong checksum of the images.*install uneven again"):
        mini.load_mini()


def test_data_needs_numpy_only() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'typer', 'rich', 'click', 'psutil', 'PIL'): sys.modules[name] = None\n"
        "from uneven.data import datasets\n"
        "print(datasets.load('mnist-mini').train_images.shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(10000, 1, 28, 28)", done.stderr
