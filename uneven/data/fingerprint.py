"""What a data set holds, described so that the machines of a run can compare it before they train.

Ranks of several machines call `describe_data` (launch/checks/parity.py), one per machine, exchange the descriptions
(plain JSON), and `compare_data` names the first difference. Tensors are read whole up to a size, other data sets at a
few fixed positions, files by name, order, size and content: lists of paths, (path, label) pairs, single paths and
memory-mapped arrays in the attributes of a data set, by their names below the folder that they share. Bounded in time
and bytes; a stream is not consumed, and no random state is disturbed. What a data set draws at random in a sample is
left out: it shows, because every sample is read under two seeds.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uneven.config import is_stream
from uneven.data.epoch_order import random_states_preserved, seed_generators, with_own_generators
from uneven.data.sample_order import permutation, sample_keys
from uneven.data.source import ShardedDataset, count_samples, shard_sizes
from uneven.data.tensors import is_gathered
from uneven.machines.parity import Difference

WHOLE_BYTES = 32 << 20  # of a tensor; of a larger one so many rows spread over it
SAMPLED_ROWS = 4096
PICKS, PICKS_S = 8, 1.0  # samples that are read, and the time after which no further one is
MOST_PARTS = 64
CHUNKS = 64  # of an array of floats
CLOSE = 1e-6  # relative: sums in another order, on another processor
MOST_NAMES = 20_000  # that are compared one by one; a longer list is compared in so many pieces
MOST_SIZES = 2_000
WHOLE_FILES = 64 << 20  # bytes of all files of a list together, up to which they are read whole
SAMPLED_FILES = 16  # of what is larger
BLOCKS = 8  # of each of them, the last one among them: there a Parquet file has its row groups
BLOCK = 1 << 16
DEPTH = 3
FIX = "copy the leader's data there, or leave the check out with --skip data"
SORT = "sort the list in the script: folders are listed in any order"

# What is compared, by its name: its kind, a digest, how it is shown, and of floats sums that tell rounding from others.
Entry = dict[str, Any]
Entries = dict[str, Entry]


def describe_data(dataset: Any) -> dict[str, Entries]:
    """A data set as plain JSON; reads at most a few samples, rows and blocks of files."""
    files: Entries = {}
    for name, paths in dict(_file_lists(dataset, "", DEPTH, set())).items():
        files |= describe_files(name, paths)
    sizes = shard_sizes(dataset) if is_stream(dataset) else None
    contents = {"the number of shards": _text(len(sizes or ()))}
    contents |= {f"shard {number}": _text(f"{size} samples") for number, size in enumerate(sizes or ())}
    contents["the length"] = _text(count_samples(dataset))
    contents |= {name: _describe_array(tensor) for name, tensor in _tensors(dataset).items()}
    is_read_by_rows = isinstance(dataset, Tensor) or is_gathered(dataset)
    if not is_read_by_rows and (sizes is not None or not is_stream(dataset)):
        contents |= _read_samples(ShardedDataset(dataset) if sizes is not None else dataset)
    return {"files": files, "contents": contents}


def compare_data(host: str, what: str, ours: Mapping[str, Entries], theirs: Mapping[str, Entries]) -> Difference | None:
    """The first difference of a machine's data from the leader's; `what` is 'the data set' or 'the test set'."""
    for section, of in (("files", ""), ("contents", f" of {what}")):
        for name, entry in ours[section].items():
            values = _compare(entry, theirs[section].get(name, entry))
            if values is None:
                continue
            label = name.partition(" of ")[2]
            is_shuffled = name.startswith("file ") and _names_in(ours[section], label) == _names_in(
                theirs[section], label
            )
            return Difference(host, name + of, values[0], values[1], SORT if is_shuffled else FIX, "data")
    return None


def _names_in(files: Entries, label: str) -> list[str]:
    return sorted(entry["shown"] for name, entry in files.items() if name.endswith(f" of {label}"))


def _compare(ours: Entry, theirs: Entry) -> tuple[str, str] | None:
    """(theirs, ours) where two differ by more than rounding."""
    if ours["kind"] != theirs["kind"]:
        return str(theirs["kind"]), str(ours["kind"])
    if ours["digest"] == theirs["digest"]:
        return None
    parts = zip(ours.get("sums", ()), theirs.get("sums", ()), ours.get("norms", ()), strict=False)
    if ours.get("sums") and all(abs(a - b) <= CLOSE * norm for a, b, norm in parts):
        return None
    return theirs.get("shown") or f"other values ({theirs['digest']})", ours.get("shown") or ours["digest"]


def _text(value: object) -> Entry:
    return {"kind": "", "digest": str(value), "shown": str(value)}


def describe_files(label: str, paths: Sequence[str]) -> Entries:
    """A list of files; equal where names, order, sizes and content are."""
    names = _relative(paths)
    step = -(-len(names) // MOST_NAMES)
    found = {f"the number of files in {label}": _text(len(names))}
    if step == 1:
        found |= {f"file {number} of {label}": _text(name) for number, name in enumerate(names)}
    else:
        for at in range(0, len(names), step):
            piece = "\0".join(names[at : at + step]).encode(errors="surrogateescape")
            found[f"a file of {label} from number {at} on"] = _text(_hash(piece))
    few = len(names) <= MOST_SIZES
    sizes = {number: _size(paths[number]) for number in _evenly(len(names), len(names) if few else SAMPLED_FILES)}
    for number, size in sizes.items():
        found[f"the size of {names[number]} in {label}"] = _text("missing" if size is None else size)
    is_whole = few and sum(size or 0 for size in sizes.values()) <= WHOLE_FILES
    for place in _evenly(len(sizes), len(sizes) if is_whole else SAMPLED_FILES):
        number, size = list(sizes.items())[place]
        if size is not None:
            found[f"the content of {names[number]} in {label}"] = _text(_content(paths[number], size, is_whole))
    return found


def _content(path: str, size: int, is_whole: bool) -> str:
    found = blake2b(str(size).encode(), digest_size=8)
    try:
        with open(path, "rb") as file:
            if is_whole or size <= BLOCKS * BLOCK:
                while chunk := file.read(1 << 20):
                    found.update(chunk)
            else:
                for number in range(BLOCKS):
                    file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                    found.update(file.read(BLOCK))
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return found.hexdigest()


def _file_lists(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, list[str]]]:
    """(attribute, paths in their order) of a data set and of those inside it; no file is opened."""
    if isinstance(value, list | tuple):
        if (paths := _paths(value, ())) is not None:
            yield name or "dataset", paths
        elif name and len(value) <= MOST_PARTS:
            for number, inner in enumerate(value):
                yield from _file_lists(inner, f"{name}[{number}]", depth, seen)
        return
    if not depth or id(value) in seen or type(value).__module__.partition(".")[0] in ("datasets", "pyarrow"):
        return  # datasets of that library keep generated files of their own
    seen.add(id(value))
    roots = [root for word in ("root", "folder", "data_dir", "img_dir") if _is_path(root := getattr(value, word, None))]
    for attribute, part in list(getattr(value, "__dict__", {}).items()):
        label = f"{name}.{attribute}" if name else attribute
        if (paths := _paths(part, [str(root) for root in roots])) is not None:
            yield label, paths
        elif isinstance(part, list | tuple) or (hasattr(part, "__getitem__") and hasattr(part, "__dict__")):
            yield from _file_lists(part, label, depth - 1, seen)


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
    if not all(map(_is_path, entries)):
        return None
    looks = [entries[place] for place in _evenly(len(entries), 5)]
    for root in ("", *roots):
        if any(os.path.isfile(os.path.join(root, entry)) for entry in looks):
            return [os.path.join(root, entry) for entry in entries]
    return None


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
    with suppress(OSError):
        return os.stat(path).st_size
    return None


def _tensors(dataset: Any) -> dict[str, Tensor]:
    """The tensors and arrays that hold a data set's samples, by name."""
    if isinstance(dataset, Tensor):
        return {"the tensor": dataset}
    if is_gathered(dataset):
        return {f"tensor {number}": tensor for number, tensor in enumerate(dataset.tensors)}
    samples = count_samples(dataset)
    found = {}
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, np.ndarray) and not isinstance(value, np.memmap) and value.dtype.kind in "biuf":
            value = torch.from_numpy(np.ascontiguousarray(value))
        # An array with a row for every sample is the data; a shorter one may be anything, and a cache is filled later.
        if isinstance(value, Tensor) and value.ndim and len(value) >= (samples or 1) and "cache" not in name.lower():
            found[name] = value
    return found


def _describe_array(tensor: Tensor) -> Entry:
    """Type, shape and digest; of floats also random projections of pieces, which tell rounding from other values."""
    tensor = tensor.detach()
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.layout != torch.strided:
        return {"kind": f"{kind} {tensor.layout}", "digest": ""}
    if tensor.numel() * tensor.element_size() > WHOLE_BYTES and tensor.ndim and len(tensor) > SAMPLED_ROWS:
        rows = torch.linspace(0, len(tensor) - 1, SAMPLED_ROWS, dtype=torch.float64).long()
        tensor = tensor.index_select(0, rows.to(tensor.device))
    flat = tensor.cpu().contiguous().reshape(-1)
    described: Entry = {"kind": kind, "digest": _hash(flat.view(torch.uint8).numpy().tobytes())}
    if flat.is_floating_point() and flat.numel():
        described["sums"], described["norms"] = _project(flat)
    return described


def _project(flat: Tensor) -> tuple[list[float], list[float]]:
    """Of each of CHUNKS pieces: the sum under random signs, and the norm."""
    bits = np.frombuffer(np.random.Generator(np.random.PCG64(7)).bytes(flat.numel() // 8 + 1), dtype=np.uint8)
    signs = np.unpackbits(bits)
    sums, norms = list[float](), list[float]()
    ends = np.linspace(0, flat.numel(), min(CHUNKS, flat.numel()) + 1).astype(np.int64).tolist()
    numbers = (flat if flat.dtype in (torch.float32, torch.float64, torch.float16) else flat.float()).numpy()
    for start, end in pairwise(ends):
        # Sums of numpy, not products of BLAS: its threads would spin beside those of the other ranks.
        values = np.nan_to_num(numbers[start:end].astype(np.float64), nan=1.0, posinf=2.0, neginf=-2.0)
        sums.append(float(np.where(signs[start:end], values, -values).sum()))
        norms.append(float(np.sqrt(np.square(values).sum())))
    return sums, norms


def _read_samples(dataset: Any) -> Entries:
    """The parts of some samples, without those that are drawn at random."""
    samples, twin = len(dataset), with_own_generators(dataset, {})
    numbers = list(dict.fromkeys([0, samples - 1, *permutation(0, 0, min(samples, 1 << 20))[: PICKS - 2].tolist()]))
    keys = sample_keys(0, 0, 2).tolist()
    picks: dict[int, Entries] = {}
    drawn: set[str] = set()
    end_s = time.monotonic() + PICKS_S
    with random_states_preserved():
        for number in numbers:
            first, *again = [_read(twin, number, key) for key in (keys[0], keys[0], keys[1])]
            drawn |= {name for other in again for name, part in first.items() if other.get(name) != part}
            picks[number] = first
            if time.monotonic() > end_s:
                break
    found = ((number, name, part) for number, parts in picks.items() for name, part in parts.items())
    return {f"sample {number}{name}": part for number, name, part in found if name not in drawn}


def _read(dataset: Any, number: int, key: int) -> Entries:
    seed_generators(key)
    try:
        sample = dataset[number]
    except Exception as error:  # told by the machine that cannot read it, as a difference
        return {"": {"kind": f"unreadable ({type(error).__name__})", "digest": ""}}
    found: Entries = {}
    for name, part in _parts(sample, ""):
        if len(found) < MOST_PARTS:
            found[name] = _describe_part(part)
    return found


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(part, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple) and len(value) <= MOST_PARTS:
        for number, part in enumerate(value):
            yield from _parts(part, f"{name}[{number}]")
    else:
        yield name, value


def _describe_part(value: Any) -> Entry:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        return _describe_array(value)
    kind = type(value).__name__
    if isinstance(value, str | Path) and os.path.isabs(value):
        value = os.path.basename(value)  # data may lie elsewhere on every machine
    if isinstance(value, bool | int | float | str | bytes | None | list | tuple):
        text = repr(value)
        return {"kind": kind, "digest": _hash(text.encode()), "shown": text if len(text) <= 40 else f"{text[:37]}..."}
    if callable(getattr(value, "tobytes", None)) and hasattr(value, "size"):  # an image of PIL
        return {"kind": f"{kind} {value.size}", "digest": _hash(value.tobytes())}
    return {"kind": kind, "digest": ""}  # what cannot be looked into is not compared


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()
