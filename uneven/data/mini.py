"""`mnist-mini`, the data set embedded in the package: real MNIST digits that need no network and no cache.

It has the first 10,000 training and the first 2,000 test images, lossless. Four fifths of MNIST's pixels are zero, so
the file is an xz stream of: two uint32 counts, the labels, one bit per pixel (non-zero or not), the values of the
non-zero pixels. That takes 1.6 MB; the idx files have 9.4 MB. `tools/pack_mnist_mini.py` writes it. The checksums below
are of the decoded pixels and labels.
"""

import hashlib
import lzma
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from uneven.data.arrays import ImageArrays
from uneven.errors import MachineError

FILE_NAME = "mnist-mini.xz"
NUM_TRAIN, NUM_TEST = 10_000, 2_000
_PIXELS = 28 * 28

IMAGES_SHA256 = "54ed7994940da86ce84ba063eb743d818c7f1202c7f1e61eeb03bf1bce93a276"
LABELS_SHA256 = "aad31d159fdb3a02e76823c619d2bdf9b36135ff3d99381c9960635303d06ae6"


def pack(images: NDArray[np.uint8], labels: NDArray[np.uint8], num_train: int) -> bytes:
    """Pack uint8 images [N, 28, 28] and labels [N], training images first; deterministic."""
    counts = np.asarray([num_train, len(images) - num_train], "<u4")
    mask = np.packbits(images.reshape(-1) != 0)
    plain = counts.tobytes() + labels.tobytes() + mask.tobytes() + images[images != 0].tobytes()
    return lzma.compress(plain, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)


def unpack(packed: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    """(images, labels, number of training images), the inverse of `pack`."""
    plain = np.frombuffer(lzma.decompress(packed, format=lzma.FORMAT_XZ), np.uint8)
    num_train, num_test = (int(n) for n in plain[:8].view("<u4"))
    count = num_train + num_test
    labels, rest = plain[8 : 8 + count].copy(), plain[8 + count :]
    num_mask = -(-count * _PIXELS // 8)
    mask = np.unpackbits(rest[:num_mask], count=count * _PIXELS).astype(bool)
    images = np.zeros(count * _PIXELS, np.uint8)
    images[mask] = rest[num_mask:]
    return images.reshape(count, 28, 28), labels, num_train


def load_mini() -> ImageArrays:
    """Decode the embedded set and verify its checksums; MachineError if the installation is damaged."""
    try:
        packed = files("uneven.data").joinpath("embedded").joinpath(FILE_NAME).read_bytes()
        images, labels, num_train = unpack(packed)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise _damaged_installation(str(error)) from error
    if hashlib.sha256(images.tobytes()).hexdigest() != IMAGES_SHA256:
        raise _damaged_installation("wrong checksum of the images")
    if hashlib.sha256(labels.tobytes()).hexdigest() != LABELS_SHA256:
        raise _damaged_installation("wrong checksum of the labels")
    return ImageArrays(
        train_images=images[:num_train, None],
        train_labels=labels[:num_train].astype(np.int64),
        test_images=images[num_train:, None],
        test_labels=labels[num_train:].astype(np.int64),
    )


def _damaged_installation(reason: str) -> MachineError:
    return MachineError(
        f"the embedded set mnist-mini cannot be read ({reason}); "
        "install uneven again: python -m pip install --force-reinstall --no-deps uneven"
    )
