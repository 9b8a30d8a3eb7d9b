"""Make uneven/data/embedded/mnist-mini.xz from the four official idx files, and print its checksums.

    python tools/pack_mnist_mini.py FOLDER_WITH_THE_IDX_FILES [OUTPUT]

The first 10,000 training and first 2,000 test images, in official order. The same input gives the same bytes. The
layout of the file is described in uneven/data/arrays.py, which reads it.
"""

import hashlib
import lzma
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from uneven.data.arrays import MINI, parse_idx

NUM_TRAIN, NUM_TEST = 10_000, 2_000
DEFAULT_OUTPUT = Path(__file__).parent.parent / "uneven" / "data" / "embedded" / MINI


def pack(images: NDArray[np.uint8], labels: NDArray[np.uint8], num_train: int) -> bytes:
    """Pack uint8 images [N, 28, 28] and labels [N], training images first; deterministic."""
    counts = np.asarray([num_train, len(images) - num_train], "<u4")
    mask = np.packbits(images.reshape(-1) != 0)
    plain = counts.tobytes() + labels.tobytes() + mask.tobytes() + images[images != 0].tobytes()
    return lzma.compress(plain, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)


def main(folder: Path, output: Path) -> None:
    def first(kind: str) -> NDArray[np.uint8]:
        train = parse_idx((folder / f"train-{kind}-ubyte").read_bytes())[:NUM_TRAIN]
        return np.concatenate([train, parse_idx((folder / f"t10k-{kind}-ubyte").read_bytes())[:NUM_TEST]])

    images, labels = first("images-idx3"), first("labels-idx1")
    output.write_bytes(pack(images, labels, NUM_TRAIN))
    print(f"{output}: {output.stat().st_size:,} bytes")
    print(f"images sha256 {hashlib.sha256(images.tobytes()).hexdigest()}")
    print(f"labels sha256 {hashlib.sha256(labels.tobytes()).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else DEFAULT_OUTPUT)
