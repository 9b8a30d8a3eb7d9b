"""Tiny data sets in the forms of the real ones: idx files, CIFAR's binary batches, a text.

Contents are fixed, so another process that imports this module describes the very same sets.
"""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from uneven.data.arrays import images_from_cifar_batches, images_from_idx, tokens_from_text
from uneven.data.datasets import DataSet

NUM_TRAIN, NUM_TEST, CIFAR_ROWS = 7, 3, 6
_DRAW = np.random.default_rng(5)
DIGITS = _DRAW.integers(0, 256, (NUM_TRAIN + NUM_TEST, 28, 28), np.uint8)
DIGIT_LABELS = _DRAW.integers(0, 10, NUM_TRAIN + NUM_TEST).astype(np.uint8)
PHOTOS = _DRAW.integers(0, 256, (6, CIFAR_ROWS, 1024, 3), np.uint8)  # six batches of [image, pixel, RGB]
PHOTO_LABELS = _DRAW.integers(0, 10, (6, CIFAR_ROWS)).astype(np.uint8)
TEXT = b"To be, or not to be"


def format_idx(array: NDArray[np.uint8]) -> bytes:
    """The idx file of an array: two zeros, type 8, rank, big-endian sizes."""
    header = bytes((0, 0, 8, array.ndim)) + np.asarray(array.shape, ">u4").tobytes()
    return header + np.ascontiguousarray(array).tobytes()


DIGIT_FILES = {
    "train-images-idx3-ubyte": format_idx(DIGITS[:NUM_TRAIN]),
    "train-labels-idx1-ubyte": format_idx(DIGIT_LABELS[:NUM_TRAIN]),
    "t10k-images-idx3-ubyte": format_idx(DIGITS[NUM_TRAIN:]),
    "t10k-labels-idx1-ubyte": format_idx(DIGIT_LABELS[NUM_TRAIN:]),
}
BATCH_NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
# Written out image by image, to be independent of the code under test.
PHOTO_FILES = {
    f"{name}.bin": b"".join(
        bytes([label]) + b"".join(image[:, channel].tobytes() for channel in range(3))
        for image, label in zip(images, labels, strict=True)
    )
    for name, images, labels in zip(BATCH_NAMES, PHOTOS, PHOTO_LABELS, strict=True)
}


def described(contents: dict[str, bytes]) -> dict[str, str]:
    """The checksums of these contents."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def digits(*base_urls: str) -> DataSet:
    """A MNIST of ten images with mirrors at these addresses."""
    return DataSet(
        name="digits",
        title="ten digits",
        licence="none",
        assemble=images_from_idx,
        files=described(DIGIT_FILES),
        num_bytes=sum(map(len, DIGIT_FILES.values())),
        mirrors=tuple(
            tuple(f"{base}{name}.gz" for name in DIGIT_FILES) for base in base_urls or ("http://127.0.0.1:9/",)
        ),
    )


def photos(url: str = "http://127.0.0.1:9/cifar-10-binary.tar.gz") -> DataSet:
    """A CIFAR-10 of six images a batch."""
    return DataSet(
        name="photos",
        title="36 photographs",
        licence="none",
        assemble=images_from_cifar_batches,
        files=described(PHOTO_FILES),
        num_bytes=sum(map(len, PHOTO_FILES.values())),
        mirrors=((url,),),
    )


def play(url: str = "http://127.0.0.1:9/input.txt") -> DataSet:
    """A text of nineteen characters, which its mirror calls input.txt."""
    return DataSet(
        name="play",
        title="a line",
        licence="none",
        assemble=tokens_from_text,
        files=described({"play.txt": TEXT}),
        num_bytes=len(TEXT),
        mirrors=((url,),),
    )


def gz_pages() -> dict[str, bytes]:
    """The digits as a mirror serves them."""
    return {f"/{name}.gz": gzip.compress(content) for name, content in DIGIT_FILES.items()}


def photos_tarball() -> bytes:
    """The photographs as their mirror serves them."""
    return tarball({f"cifar-10-batches-bin/{name}": content for name, content in PHOTO_FILES.items()})


def tarball(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
