"""The canonical files become the arrays that were put into them; the embedded set is real, whole and small."""

import hashlib
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

from tests.data import tiny_sets
from tests.data.tiny_sets import format_idx
from uneven.data import arrays, datasets
from uneven.data.arrays import images_from_cifar_batches, parse_idx, tokens_from_text
from uneven.errors import MachineError


@pytest.mark.parametrize("shape", [(5,), (3, 28, 28)])
def test_idx_round_trip(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    assert np.array_equal(parse_idx(format_idx(array)), array)


def test_idx_header_is_the_official_one() -> None:
    assert format_idx(np.zeros((60000, 28, 0), np.uint8)).hex() == "00000803" + "0000ea60" + "0000001c" + "00000000"


@pytest.mark.parametrize("content", [b"", b"\0\0\x0d\x01" + bytes(8), format_idx(np.zeros((2, 2), np.uint8))[:-1]])
def test_what_is_no_idx_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse_idx(content)


def test_cifar_batches_keep_their_order_and_become_planes() -> None:
    # In reverse, because an archive may hold them in any order.
    photos = images_from_cifar_batches(reversed(tiny_sets.PHOTO_FILES.items()))
    pixels = tiny_sets.PHOTOS.reshape(6, -1, 32, 32, 3).transpose(0, 1, 4, 2, 3)
    assert np.array_equal(photos.train_images, pixels[:5].reshape(-1, 3, 32, 32))
    assert np.array_equal(photos.test_images, pixels[5])
    assert np.array_equal(photos.train_labels, tiny_sets.PHOTO_LABELS[:5].reshape(-1))
    assert np.array_equal(photos.test_labels, tiny_sets.PHOTO_LABELS[5])
    for array in (photos.train_images, photos.test_images):
        # torch.from_numpy warns about read-only arrays, and strided ones are slow to index.
        assert array.flags.writeable
        assert array.flags.c_contiguous


def test_text_tokens_spell_the_text_and_split_by_position() -> None:
    text = tokens_from_text([("play.txt", tiny_sets.TEXT)])
    assert text.text == tiny_sets.TEXT.decode()
    assert text.vocabulary == "".join(sorted(set(text.text)))
    assert "".join(text.vocabulary[token] for token in text.tokens) == text.text
    assert len(text.train_tokens) == 17  # 90 % of 19, rounded down
    assert np.array_equal(np.concatenate([text.train_tokens, text.validation_tokens]), text.tokens)


def test_the_embedded_set_has_the_counts_and_sums_of_the_official_files() -> None:
    digits = datasets.load("mnist-mini")
    assert isinstance(digits, datasets.ImageArrays)
    assert digits.train_images.shape == (10_000, 1, 28, 28)
    assert digits.test_images.shape == (2_000, 1, 28, 28)
    # Counted in the official idx files.
    assert np.bincount(digits.train_labels).tolist() == [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]
    assert np.bincount(digits.test_labels).tolist() == [175, 234, 219, 207, 217, 179, 178, 205, 192, 194]
    pixels = hashlib.sha256(digits.train_images.tobytes() + digits.test_images.tobytes()).hexdigest()
    assert pixels == "54ed7994940da86ce84ba063eb743d818c7f1202c7f1e61eeb03bf1bce93a276"
    labels = np.concatenate([digits.train_labels, digits.test_labels]).astype(np.uint8)
    expected = "aad31d159fdb3a02e76823c619d2bdf9b36135ff3d99381c9960635303d06ae6"
    assert hashlib.sha256(labels.tobytes()).hexdigest() == expected


def test_the_embedded_set_is_small_and_carries_its_licence() -> None:
    embedded = files("uneven.data").joinpath("embedded")
    assert len(embedded.joinpath("mnist-mini.xz").read_bytes()) <= 2_500_000
    licence = embedded.joinpath("LICENSE-mnist-mini.txt").read_text()
    for word in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", arrays.MINI_IMAGES_SHA256, arrays.MINI_LABELS_SHA256):
        assert word in licence


def test_a_damaged_embedded_set_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MINI_IMAGES_SHA256", "0" * 64)
    with pytest.raises(MachineError, match=r"wrong checksum of the images.*install uneven again"):
        arrays.load_mini()


def test_data_needs_numpy_only() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'typer', 'rich', 'click', 'psutil', 'PIL'): sys.modules[name] = None\n"
        "from uneven.data import datasets\n"
        "print(datasets.load('mnist-mini').train_images.shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "(10000, 1, 28, 28)", done.stderr
