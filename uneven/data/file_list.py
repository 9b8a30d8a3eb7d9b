"""The files that a data set reads, described so that machines can compare them: names, order, sizes, content.

Found in the data set's attributes: lists of paths, (path, label) pairs, single paths, memory-mapped arrays. Names are
relative to the folder that a list's files share, because data may lie elsewhere on every machine. Used by
data/fingerprint.py; no torch here.
"""

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

MOST_NAMES = 20_000  # that are compared one by one; a longer list is compared in so many pieces
MOST_SIZES = 2_000
WHOLE_BYTES = 64 << 20  # of all files of a list together, up to which they are read whole
SAMPLED_FILES = 16  # of what is larger
BLOCKS = 8  # of each of them, the last one among them: there a Parquet file has its row groups
BLOCK = 1 << 16
DEPTH = 3
# Names of files, also where a machine does not have them.
SUFFIXES = """
.parquet .arrow .feather .npy .npz .pt .pth .bin .safetensors .pkl .msgpack .json .jsonl .csv .tsv .txt .h5 .hdf5
.tfrecord .mds .idx .jpg .jpeg .png .webp .bmp .tif .tiff .wav .flac .mp3 .ogg .mp4 .webm .tar .zip .gz .zst .xz
"""


def file_lists(dataset: Any) -> dict[str, list[str]]:
    """Paths by the attribute that holds them, in their order; no file is opened."""
    if isinstance(dataset, list | tuple):
        paths = _paths(dataset, ())
        return {} if paths is None else {"dataset": paths}
    return dict(_find(dataset, "", DEPTH, set()))


def describe_files(paths: Sequence[str]) -> dict[str, Any]:
    """A list of files as plain JSON; equal where names, order, sizes and content are."""
    names = _relative(paths)
    step = -(-len(names) // MOST_NAMES)
    described: dict[str, Any] = {
        "count": len(names),
        "step": step,  # names that each entry stands for
        "names": names if step <= 1 else [_hash(names[at : at + step]) for at in range(0, len(names), step)],
        "sorted": _hash(sorted(names)),
    }
    few = len(names) <= MOST_SIZES
    picked = range(len(names)) if few else _evenly(len(names), SAMPLED_FILES)
    sizes = {number: _size(paths[number]) for number in picked}
    described["sizes"] = [[names[number], size] for number, size in sizes.items()]
    is_whole = few and sum(size or 0 for size in sizes.values()) <= WHOLE_BYTES
    read = list(sizes) if is_whole else [list(sizes)[place] for place in _evenly(len(sizes), SAMPLED_FILES)]
    present = [number for number in read if sizes[number] is not None]
    described["content"] = [[names[number], _content(paths[number], is_whole)] for number in present]
    return described


def _content(path: str, is_whole: bool) -> str:
    try:
        return _digest(path, os.stat(path).st_size, is_whole)
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _find(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, list[str]]]:
    """(attribute, paths) of an object and of the data sets inside it."""
    if id(value) in seen or type(value).__module__.partition(".")[0] in ("datasets", "pyarrow", "builtins"):
        return  # datasets of that library keep generated files of their own
    seen.add(id(value))
    roots = [root for word in ("root", "folder", "data_dir", "img_dir") if _is_path(root := getattr(value, word, None))]
    for attribute, part in list(getattr(value, "__dict__", {}).items()):
        label = f"{name}.{attribute}" if name else attribute
        if (paths := _paths(part, [str(root) for root in roots])) is not None:
            yield label, paths
        elif depth and hasattr(part, "__getitem__") and hasattr(part, "__dict__"):
            yield from _find(part, label, depth - 1, seen)
        elif depth and isinstance(part, list | tuple) and len(part) <= 64:
            for number, inner in enumerate(part):
                if isinstance(inner, list | tuple) and (paths := _paths(inner, ())) is not None:
                    yield f"{label}[{number}]", paths
                elif hasattr(inner, "__dict__"):
                    yield from _find(inner, f"{label}[{number}]", depth - 1, seen)


def _paths(value: Any, roots: Sequence[str]) -> list[str] | None:
    """The paths that an attribute holds, or None where it holds something else."""
    if isinstance(value, np.memmap) and value.filename is not None:
        return [str(value.filename)]
    if _is_path(value):
        return [str(value)] if os.path.isfile(value) else None
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "UO":
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        return None
    entries = [entry[0] if isinstance(entry, list | tuple) and entry else entry for entry in value]
    looks = [entries[place] for place in _evenly(len(entries), 5)]
    if not all(_is_path(entry) for entry in looks) or not all(_is_path(entry) for entry in entries):
        return None
    for root in ("", *roots):
        if any(os.path.isfile(os.path.join(root, entry)) for entry in looks):
            return [os.path.join(root, entry) for entry in entries]
    suffixes = SUFFIXES.split()
    is_named_so = all(os.path.splitext(entry)[1].lower() in suffixes for entry in looks)
    return [str(entry) for entry in entries] if is_named_so else None


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and 0 < len(str(value)) < 1024 and "\n" not in str(value)


def _relative(paths: Sequence[str]) -> list[str]:
    """Names below the folder that all of them share."""
    whole = [os.path.abspath(path) for path in paths]
    # The least and the greatest differ earliest: a list may have a million names.
    shared = os.path.commonpath([os.path.dirname(min(whole)), os.path.dirname(max(whole))])
    return [os.path.relpath(path, shared) if shared == os.sep else path[len(shared) + 1 :] for path in whole]


def _evenly(count: int, most: int) -> list[int]:
    """At most so many numbers below `count`, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _digest(path: str, size: int, is_whole: bool) -> str:
    found = blake2b(str(size).encode(), digest_size=8)
    with open(path, "rb") as file:
        if is_whole or size <= BLOCKS * BLOCK:
            while chunk := file.read(1 << 20):
                found.update(chunk)
        else:
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                found.update(file.read(BLOCK))
    return found.hexdigest()


def _hash(names: Sequence[str]) -> str:
    return blake2b("\0".join(names).encode(errors="surrogateescape"), digest_size=8).hexdigest()
