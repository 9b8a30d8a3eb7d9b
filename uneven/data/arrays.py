"""The arrays that `datasets.load` returns, and how they are built from a set's canonical files.

A set is defined by its canonical files (idx, CIFAR's binary batches, plain text). Each function here takes the
(name, content) pairs of those files in any order, whatever source they came from. Images are uint8 [N, C, H, W],
unscaled; labels are int64, as PyTorch's losses expect.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CIFAR_ROW = 1 + 3 * 32 * 32  # label byte, then 1,024 red, green and blue bytes
TRAIN_FRACTION = 0.9


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


def format_idx(array: NDArray[np.uint8]) -> bytes:
    """The idx file of an array; the inverse of `parse_idx`."""
    header = bytes((0, 0, 8, array.ndim)) + np.asarray(array.shape, ">u4").tobytes()
    return header + np.ascontiguousarray(array).tobytes()


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
