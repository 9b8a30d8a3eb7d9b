"""The arrays that `datasets.load` returns, and how they are built from a set's canonical files.

A set is defined by its canonical files (idx, CIFAR's binary batches, plain text). Each function here takes the
(name, content) pairs of those files in any order. Images are uint8 [N, C, H, W], unscaled; labels are int64, as
PyTorch's losses expect.

`mnist-mini`, the first 10,000 training and 2,000 test images of MNIST, is part of the package and needs no network.
Four fifths of MNIST's pixels are zero, so its file is an xz stream of: two uint32 counts, the labels, one bit per pixel
(non-zero or not), the values of the non-zero pixels. That takes 1.6 MB; the idx files have 9.4 MB.
`tools/pack_mnist_mini.py` writes it. Its checksums are of the decoded pixels and labels.
"""

import hashlib
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from uneven.errors import MachineError

CIFAR_ROW = 1 + 3 * 32 * 32  # label byte, then 1,024 red, green and blue bytes
TRAIN_FRACTION = 0.9
MINI = "mnist-mini.xz"
MINI_IMAGES_SHA256 = "54ed7994940da86ce84ba063eb743d818c7f1202c7f1e61eeb03bf1bce93a276"
MINI_LABELS_SHA256 = "aad31d159fdb3a02e76823c619d2bdf9b36135ff3d99381c9960635303d06ae6"


@dataclass(frozen=True)
class ImageArrays:
    """A labelled image set: uint8 images [N, C, H, W] and int64 labels [N], both splits in official order."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


@dataclass(frozen=True)
class TextArrays:
    """A text as character tokens; `tokens[i]` is the index of `text[i]` in `vocabulary`, which is sorted.

    The split is by position: the first 90 % train, the rest validates.
    """

    text: str
    vocabulary: str
    tokens: NDArray[np.uint8]

    @property
    def train_tokens(self) -> NDArray[np.uint8]:
        return self.tokens[: int(TRAIN_FRACTION * len(self.tokens))]

    @property
    def validation_tokens(self) -> NDArray[np.uint8]:
        return self.tokens[int(TRAIN_FRACTION * len(self.tokens)) :]


Arrays = ImageArrays | TextArrays
Contents = Iterable[tuple[str, bytes]]


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """Decode an idx file of unsigned bytes (MNIST's format): two zeros, type 8, rank, big-endian sizes."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError("not an idx file of unsigned bytes")
    start = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    # Copied, because frombuffer gives a read-only array and torch.from_numpy warns about those.
    array: NDArray[np.uint8] = np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
    return array


def images_from_idx(contents: Contents) -> ImageArrays:
    """MNIST from its four idx files."""
    arrays = {name: parse_idx(content) for name, content in contents}
    return ImageArrays(
        train_images=arrays["train-images-idx3-ubyte"][:, None],
        train_labels=arrays["train-labels-idx1-ubyte"].astype(np.int64),
        test_images=arrays["t10k-images-idx3-ubyte"][:, None],
        test_labels=arrays["t10k-labels-idx1-ubyte"].astype(np.int64),
    )


def images_from_cifar_batches(contents: Contents) -> ImageArrays:
    """CIFAR-10 from `data_batch_*.bin` and `test_batch.bin` of the official binary version."""
    rows = {name: np.frombuffer(content, np.uint8).reshape(-1, CIFAR_ROW) for name, content in contents}
    train = [rows[name] for name in sorted(rows) if name.startswith("data_batch_")]
    test = rows["test_batch.bin"]
    return ImageArrays(
        train_images=np.concatenate([batch[:, 1:] for batch in train]).reshape(-1, 3, 32, 32),
        train_labels=np.concatenate([batch[:, 0] for batch in train]).astype(np.int64),
        test_images=test[:, 1:].copy().reshape(-1, 3, 32, 32),
        test_labels=test[:, 0].astype(np.int64),
    )


def tokens_from_text(contents: Contents) -> TextArrays:
    """A text and its character tokens from its single ASCII file."""
    [(_, content)] = contents
    codes = np.frombuffer(content, np.uint8)
    used, tokens = np.unique(codes, return_inverse=True)
    return TextArrays(content.decode("ascii"), used.tobytes().decode("ascii"), tokens.astype(np.uint8))


def load_mini() -> ImageArrays:
    """Decode the embedded set and verify its checksums; MachineError if the installation is damaged."""
    try:
        packed = files("uneven.data").joinpath("embedded").joinpath(MINI).read_bytes()
        images, labels, num_train = _unpack_mini(packed)
        if hashlib.sha256(images.tobytes()).hexdigest() != MINI_IMAGES_SHA256:
            raise ValueError("wrong checksum of the images")
        if hashlib.sha256(labels.tobytes()).hexdigest() != MINI_LABELS_SHA256:
            raise ValueError("wrong checksum of the labels")
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise MachineError(
            f"the embedded set mnist-mini cannot be read ({error}); "
            "install uneven again: python -m pip install --force-reinstall --no-deps uneven"
        ) from error
    return ImageArrays(
        train_images=images[:num_train, None],
        train_labels=labels[:num_train].astype(np.int64),
        test_images=images[num_train:, None],
        test_labels=labels[num_train:].astype(np.int64),
    )


def _unpack_mini(packed: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    """(images, labels, number of training images)."""
    plain = np.frombuffer(lzma.decompress(packed, format=lzma.FORMAT_XZ), np.uint8)
    num_train, num_test = (int(n) for n in plain[:8].view("<u4"))
    count = num_train + num_test
    pixels = count * 28 * 28
    labels, rest = plain[8 : 8 + count].copy(), plain[8 + count :]
    num_mask = -(-pixels // 8)
    images = np.zeros(pixels, np.uint8)
    images[np.unpackbits(rest[:num_mask], count=pixels).astype(bool)] = rest[num_mask:]
    return images.reshape(count, 28, 28), labels, num_train
