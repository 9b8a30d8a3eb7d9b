"""What a data set holds, described so that the machines of a run can compare it before they train.

Ranks of several machines call `describe_data` (launch/checks/parity.py), one per machine, exchange the descriptions
(plain JSON), and `compare_data` names the first difference. Tensors are read whole up to a size, other data sets at a
few fixed positions, files by name, order, size and content. Bounded in time and bytes; a stream is not
consumed, and no random state is disturbed. What a data set draws at random in a sample is left out: it shows, because
every sample is read under two seeds.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uneven.config import is_stream
from uneven.data.epoch_order import random_states_preserved, seed_generators
from uneven.data.file_list import describe_files, file_lists
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
FIX = "copy the leader's data there, or leave the check out with --skip data"


def describe_data(dataset: Any) -> dict[str, Any]:
    """A data set as plain JSON; reads at most a few samples, rows and blocks of files."""
    lists = {name: describe_files(paths) for name, paths in file_lists(dataset).items() if paths}
    sizes = shard_sizes(dataset) if is_stream(dataset) else None
    found: dict[str, Any] = {"samples": count_samples(dataset), "files": lists, "shards": sizes}
    tensors = _tensors(dataset)
    found["tensors"] = {name: _describe_array(tensor) for name, tensor in tensors.items()}
    is_read_by_rows = isinstance(dataset, Tensor) or is_gathered(dataset)
    if not is_read_by_rows and (sizes is not None or not is_stream(dataset)):
        found["picks"], found["random"] = _read_samples(ShardedDataset(dataset) if sizes is not None else dataset)
    return found


def compare_data(host: str, what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Difference | None:
    """The first difference of a machine's data from the leader's; `what` is 'the data set' or 'the test set'."""
    for names in ours["files"]:
        if names in theirs["files"]:
            found = _compare_files(host, names, ours["files"][names], theirs["files"][names])
            if found is not None:
                return found
    if len(ours["shards"] or ()) != len(theirs["shards"] or ()):
        counts = [str(len(one["shards"] or ())) for one in (theirs, ours)]
        return Difference(host, f"the number of shards of {what}", counts[0], counts[1], FIX, "data")
    for number, (a, b) in enumerate(zip(ours["shards"] or (), theirs["shards"] or (), strict=False)):
        if a != b:
            return Difference(host, f"shard {number} of {what}", f"{b} samples", f"{a}", FIX, "data")
    if ours["samples"] != theirs["samples"]:
        return Difference(host, f"the length of {what}", str(theirs["samples"]), str(ours["samples"]), FIX, "data")
    for name, array in ours["tensors"].items():
        if (values := _compare_arrays(array, theirs["tensors"].get(name, array))) is not None:
            return Difference(host, f"{name} of {what}", values[0], values[1], FIX, "data")
    return _compare_picks(host, what, ours, theirs)


def _compare_files(host: str, label: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Difference | None:
    if ours["count"] != theirs["count"]:
        return Difference(
            host, f"the number of files in {label}", str(theirs["count"]), str(ours["count"]), FIX, "data"
        )
    for number, (a, b) in enumerate(zip(ours["names"], theirs["names"], strict=True)):
        if a != b:
            is_shuffled = ours["sorted"] == theirs["sorted"]
            first = number * ours["step"]
            which = f"file {number} of {label}" if ours["step"] <= 1 else f"a file of {label} from number {first} on"
            fix = "sort the list in the script: folders are listed in any order" if is_shuffled else FIX
            return Difference(host, which, b, a, fix, "data")
    for aspect, words in (("sizes", "the size"), ("content", "the content")):
        for (name, a), (_, b) in zip(ours[aspect], theirs[aspect], strict=False):
            if a != b:
                return Difference(host, f"{words} of {name} in {label}", _short(b), _short(a), FIX, "data")
    return None


def _short(value: Any) -> str:
    return "missing" if value is None else str(value)


def _compare_picks(host: str, what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Difference | None:
    drawn = {*ours.get("random", ()), *theirs.get("random", ())}
    for number, parts in ours.get("picks", {}).items():
        others = theirs.get("picks", {}).get(number, {})
        for name, part in parts.items():
            if name in drawn or name not in others:
                continue
            if (values := _compare_arrays(part, others[name])) is not None:
                return Difference(host, f"sample {number}{name} of {what}", values[0], values[1], FIX, "data")
    return None


def _compare_arrays(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str] | None:
    """(theirs, ours) where two arrays differ by more than rounding."""
    if ours["kind"] != theirs["kind"]:
        return str(theirs["kind"]), str(ours["kind"])
    if ours["digest"] == theirs["digest"]:
        return None
    parts = zip(ours.get("sums", ()), theirs.get("sums", ()), ours.get("norms", ()), strict=False)
    if ours.get("sums") and all(abs(a - b) <= CLOSE * norm for a, b, norm in parts):
        return None
    return theirs.get("shown") or f"other values ({theirs['digest']})", ours.get("shown") or ours["digest"]


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


def _describe_array(tensor: Tensor) -> dict[str, Any]:
    """Type, shape and digest; of floats also random projections of pieces, which tell rounding from other values."""
    tensor = tensor.detach()
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.layout != torch.strided:
        return {"kind": f"{kind} {tensor.layout}", "digest": ""}
    if tensor.numel() * tensor.element_size() > WHOLE_BYTES and tensor.ndim and len(tensor) > SAMPLED_ROWS:
        rows = torch.linspace(0, len(tensor) - 1, SAMPLED_ROWS, dtype=torch.float64).long()
        tensor = tensor.index_select(0, rows.to(tensor.device))
    flat = tensor.cpu().contiguous().reshape(-1)
    described: dict[str, Any] = {"kind": kind, "digest": _hash(flat.view(torch.uint8).numpy().tobytes())}
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


def _read_samples(dataset: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Parts of some samples by position and name, and the names of those that are drawn at random."""
    samples = len(dataset)
    numbers = list(dict.fromkeys([0, samples - 1, *permutation(0, 0, min(samples, 1 << 20))[: PICKS - 2].tolist()]))
    keys = sample_keys(0, 0, 2).tolist()
    picks: dict[str, dict[str, Any]] = {}
    drawn: set[str] = set()
    end_s = time.monotonic() + PICKS_S
    with random_states_preserved(), _own_generators_preserved(dataset):
        for number in numbers:
            first, *again = [_read(dataset, number, key) for key in (keys[0], keys[0], keys[1])]
            drawn |= {name for other in again for name, part in first.items() if other.get(name) != part}
            picks[str(number)] = first
            if time.monotonic() > end_s:
                break
    return picks, sorted(drawn)


def _read(dataset: Any, number: int, key: int) -> dict[str, Any]:
    seed_generators(key)
    try:
        sample = dataset[number]
    except Exception as error:  # told by the machine that cannot read it, as a difference
        return {"": {"kind": f"unreadable ({type(error).__name__})", "digest": ""}}
    found: dict[str, Any] = {}
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


def _describe_part(value: Any) -> dict[str, Any]:
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


@contextmanager
def _own_generators_preserved(dataset: Any) -> Iterator[None]:
    """Generators that the data set itself holds go on as if nothing had been read."""
    undo: list[tuple[Callable[[Any], Any], Any]] = []
    for owner in (dataset, getattr(dataset, "dataset", None)):
        for value in list(getattr(owner, "__dict__", {}).values()):
            if isinstance(value, torch.Generator):
                undo.append((value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                undo.append((value.setstate, value.getstate()))
            elif isinstance(value, np.random.RandomState):
                undo.append((value.set_state, value.get_state()))
            elif isinstance(value, np.random.Generator):
                undo.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
    try:
        yield
    finally:
        for restore, state in undo:
            restore(state)
