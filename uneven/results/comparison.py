"""What differs between two saved states: settings, position, and every tensor. `uneven state diff`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from uneven.results.saved_state import SavedState

# Settings that say where results go and what happens around training, not what is trained.
_AROUND = {
    *("out", "overwrite", "resume", "replay", "progress", "deadline", "keep_last", "keep_best", "checkpoint_copies"),
    *("grace", "monitor_mode", "on_fault", "min_ranks", "data_dir", "timeline"),
}
_POSITION = ("slot", "samples", "ledger", "dropped", "skipped")


class Side(TypedDict):
    """One of the two states."""

    folder: str
    kind: str
    slot: int | None


class Difference(TypedDict, total=False):
    """What differs; of equal tensors the shape alone."""

    only_in: str  # a or b
    shapes: list[list[int]]  # where they differ
    shape: list[int]
    dtypes: list[str]
    max_abs: float  # the largest difference
    max_rel: float
    not_finite: int


class NamedTensor(TypedDict):
    """Every tensor has these keys."""

    group: str  # model, or a rank's
    name: str
    equal: bool


class TensorRow(NamedTensor, Difference):
    """One tensor of both states, or of one alone."""


class Comparison(TypedDict):
    """What differs between two states."""

    a: Side
    b: Side
    equal: bool  # bit by bit
    settings: dict[str, list[Any]]
    position: dict[str, list[Any]]
    tensors: list[TensorRow]


def compare_states(a: SavedState, b: SavedState) -> Comparison:
    """Every difference as JSON; "equal" where there is none, bit by bit.

    Tensors of the ranks are compared where both states have that rank. Random states are compared and do not count:
    those of Python and numpy differ from process to process unless the user seeds them.
    """
    settings = dict(_pairs(_settings(a.record), _settings(b.record)))
    position = {key: (a.record.get(key), b.record.get(key)) for key in _POSITION if key in a.record and key in b.record}
    position = {key: pair for key, pair in position.items() if pair[0] != pair[1]}
    if a.kind == b.kind and len(a.ranks) != len(b.ranks):
        position["ranks"] = (len(a.ranks), len(b.ranks))
    tensors = list(_tensors("model", a.tensors, b.tensors, dict.fromkeys((*a.tensors, *b.tensors))))
    for rank, (ours, theirs) in enumerate(zip(a.ranks, b.ranks, strict=False)):
        names = [
            name for name in dict.fromkeys((*ours, *theirs)) if a.kind == b.kind or (name in ours and name in theirs)
        ]
        random = [name for name in names if name.startswith("random.")]
        tensors += _tensors(f"rank {rank}", ours, theirs, [name for name in names if name not in random])
        tensors += _tensors(f"random states of rank {rank}", ours, theirs, random)
    return {
        "a": {"folder": str(a.folder), "kind": a.kind, "slot": a.record.get("slot")},
        "b": {"folder": str(b.folder), "kind": b.kind, "slot": b.record.get("slot")},
        "equal": not settings
        and not position
        and all(row["equal"] for row in tensors if not row["name"].startswith("random.")),
        "settings": {key: list(pair) for key, pair in settings.items()},
        "position": {key: list(pair) for key, pair in position.items()},
        "tensors": tensors,
    }


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by name, those of the optimizer's param groups and a graph's structure included."""
    found = {name: value for name, value in record.get("config", {}).items() if name not in _AROUND}
    for number, group in enumerate(record.get("param_groups", [])):
        found |= {f"param_groups[{number}].{key}": value for key, value in group.items() if key != "params"}
    return found | {"structure": record.get("structure"), "global_batch_size": _global_batch_size(record)}


def _global_batch_size(record: Mapping[str, Any]) -> int | None:
    """As it was at work: a resumed run sets it to what followed from batch_size and devices before."""
    config = record.get("config", {})
    size, ranks = config.get("global_batch_size"), str(config.get("devices", "")).count(",") + 1
    if size is not None or config.get("policy") not in ("sync", "balanced") or "batch_size" not in config:
        return None if size is None else int(size)
    return int(config["batch_size"] * config.get("accumulate", 1) * record.get("world_size", ranks))


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            yield name, (a.get(name), b.get(name))


def _tensors(group: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[TensorRow]:
    for name in names:
        if name not in a or name not in b:
            yield {"group": group, "name": name, "equal": False, "only_in": "a" if name in a else "b"}
        else:
            found = _difference(a[name], b[name])
            yield {"group": group, "name": name, "equal": set(found) == {"shape"}, **found}


def _difference(a: Tensor, b: Tensor) -> Difference:
    shapes = [list(a.shape), list(b.shape)]
    if shapes[0] != shapes[1]:
        return {"shapes": shapes}
    types: Difference = {} if a.dtype == b.dtype else {"dtypes": [str(a.dtype), str(b.dtype)]}
    if not types and torch.equal(_bits(a), _bits(b)):
        return {"shape": shapes[0]}
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    both = x.isfinite() & y.isfinite()
    x, y = x[both], y[both]
    difference, size = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    relative = difference / size.clamp(min=torch.finfo(torch.float64).tiny)
    return {
        "shape": shapes[0],
        **types,
        "max_abs": float(difference.max()) if len(difference) else 0.0,
        "max_rel": float(relative.max()) if len(relative) else 0.0,
        "not_finite": int((~both).sum()),
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
