"""What `load` returns, and how the official files become it.

Every set is defined by its canonical files (idx, CIFAR's binary batches, plain text), so each function here
takes the (name, content) pairs of those files, in any order, and knows nothing of where they came from.
Images are uint8 [N, C, H, W], unscaled; labels int64, the type that PyTorch's losses want.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CIFAR_ROW = 1 + 3 * 32 * 32  # label byte, then 1,024 red, green and blue bytes
TRAIN_SHARE = 0.9


@dataclass(frozen=True)
class ImageArrays:
    """A labelled image set: uint8 images [N, C, H, W] and int64 labels [N], both parts in official order."""

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
        return self.tokens[: int(TRAIN_SHARE * len(self.tokens))]

    @property
    def validation_tokens(self) -> NDArray[np.uint8]:
        return self.tokens[int(TRAIN_SHARE * len(self.tokens)) :]


Arrays = ImageArrays | TextArrays
Contents = Iterable[tuple[str, bytes]]


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """Decode an idx file of unsigned bytes (MNIST's format): two zeros, type 8, rank, big-endian sizes."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError("not an idx file of unsigned bytes")
    start = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    # A copy, because frombuffer's array is read-only and torch.from_numpy warns about those.
    array: NDArray[np.uint8] = np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
    return array


def format_idx(array: NDArray[np.uint8]) -> bytes:
    """The idx file of an array; the inverse of `parse_idx`."""
    header = bytes((0, 0, 8, array.ndim)) + np.asarray(array.shape, ">u4").tobytes()
    return header + np.ascontiguousarray(array).tobytes()


def images_from_idx(contents: Contents) -> ImageArrays:
    """MNIST from its four idx files."""
    parts = {name: parse_idx(content) for name, content in contents}
    return ImageArrays(
        train_images=parts["train-images-idx3-ubyte"][:, None],
        train_labels=parts["train-labels-idx1-ubyte"].astype(np.int64),
        test_images=parts["t10k-images-idx3-ubyte"][:, None],
        test_labels=parts["t10k-labels-idx1-ubyte"].astype(np.int64),
    )


def images_from_cifar_batches(contents: Contents) -> ImageArrays:
    """CIFAR-10 from `data_batch_*.bin` and `test_batch.bin` of the official binary version."""
    rows = {name: np.frombuffer(content, np.uint8).reshape(-1, CIFAR_ROW) for name, content in contents}
    train = [rows[name] for name in sorted(rows) if name.startswith("data_batch_")]
    test = rows["test_batch.bin"]
    return ImageArrays(
        train_images=np.concatenate([part[:, 1:] for part in train]).reshape(-1, 3, 32, 32),
        train_labels=np.concatenate([part[:, 0] for part in train]).astype(np.int64),
        test_images=test[:, 1:].copy().reshape(-1, 3, 32, 32),
        test_labels=test[:, 0].astype(np.int64),
    )


def tokens_from_text(contents: Contents) -> TextArrays:
    """A character text from its one file, which is ASCII."""
    [(_, content)] = contents
    codes = np.frombuffer(content, np.uint8)
    used, tokens = np.unique(codes, return_inverse=True)
    return TextArrays(content.decode("ascii"), used.tobytes().decode("ascii"), tokens.astype(np.uint8))
