"""Compare the ranks' models before the first collective, and refuse to start if they differ.

A collective over tensors of different shapes does not fail, it corrupts data or hangs. So every rank writes a
description of its model to the store, all ranks read all of them, and all raise the same error.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch

from uneven.comm.store import Store
from uneven.errors import InputError

TIMEOUT = timedelta(minutes=30)  # another rank may still compile or load data; the launcher ends the run if one dies


def describe_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """One line per tensor: name, shape, type."""
    return [f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named]


def agree(
    store: Store, rank: int, size: int, lines: list[str], *, what: str = "built another model", where: str = "model"
) -> None:
    """InputError on every rank, naming the first rank that differs from rank 0 and how."""
    store.set(f"fingerprint/{where}/{rank}", json.dumps(lines))
    store.wait([f"fingerprint/{where}/{other}" for other in range(size)], TIMEOUT)
    refuse_differences([json.loads(store.get(f"fingerprint/{where}/{other}")) for other in range(size)], what, where)


def refuse_differences(
    descriptions: Sequence[list[str]], what: str = "built another model", where: str = "model"
) -> None:
    """InputError naming the first rank whose lines are not rank 0's; the same on every rank."""
    for rank, lines in enumerate(descriptions):
        if lines != descriptions[0]:
            raise InputError(
                f"rank {rank} {what} than rank 0: {_difference(descriptions[0], lines)}; "
                f"the {where} must be the same on every rank"
            )


def _difference(first: list[str], other: list[str]) -> str:
    for a, b in zip(first, other, strict=False):
        if a != b:
            return f"'{b}' where rank 0 has '{a}'"
    return f"{len(other)} tensors where rank 0 has {len(first)}"
