"""Make uneven/data/embedded/mnist-mini.xz from the four official idx files, and print its checksums.

    python tools/pack_mnist_mini.py FOLDER_WITH_THE_IDX_FILES [OUTPUT]

The first 10,000 training and first 2,000 test images, in official order. The same input gives the same bytes.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

from uneven.data import mini
from uneven.data.arrays import parse_idx

DEFAULT_OUTPUT = Path(__file__).parent.parent / "uneven" / "data" / "embedded" / mini.FILE_NAME


def main(folder: Path, output: Path) -> None:
    def first(name: str, count: int) -> np.ndarray:
        return parse_idx((folder / name).read_bytes())[:count]

    images = np.concatenate(
        [
            first("train-images-idx3-ubyte", mini.NUM_TRAIN),
            first("t10k-images-idx3-ubyte", mini.NUM_TEST),
        ]
    )
    labels = np.concatenate(
        [
            first("train-labels-idx1-ubyte", mini.NUM_TRAIN),
            first("t10k-labels-idx1-ubyte", mini.NUM_TEST),
        ]
    )
    output.write_bytes(mini.pack(images, labels, mini.NUM_TRAIN))
    print(f"{output}: {output.stat().st_size:,} bytes")
    print(f"images sha256 {hashlib.sha256(images.tobytes()).hexdigest()}")
    print(f"labels sha256 {hashlib.sha256(labels.tobytes()).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else DEFAULT_OUTPUT)
