"""Compare the ranks' models before the first collective, and refuse to start if they differ.

A collective over tensors of different shapes does not fail, it corrupts data or hangs. So every rank writes a
description of its model to the store, all ranks read all of them, and all raise the same error.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from uneven.comm.store import Store
from uneven.errors import InputError, RefusedError

# What to do where a machine differs, by what differs.
FIXES = {
    "model": "build it from the script and its arguments alone, not from files or variables of one machine; ",
    "settings": "pass the same arguments on every machine; ",
}
TIMEOUT = timedelta(minutes=30)  # another rank may still compile or load data; the launcher ends the run if one dies


def describe_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """One line per tensor: name, shape, type."""
    return [f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in named]


def exchange(store: Store, name: str, rank: int, ranks: Sequence[int], value: Any) -> list[Any]:
    """What each of `ranks` has posted under a name, as plain JSON; the others post nothing and only read."""
    if rank in ranks:
        store.set(f"fingerprint/{name}/{rank}", json.dumps(value))
    keys = [f"fingerprint/{name}/{other}" for other in ranks]
    store.wait(keys, TIMEOUT)
    return [json.loads(store.get(key)) for key in keys]


def agree(
    store: Store,
    rank: int,
    size: int,
    lines: list[str],
    *,
    what: str = "built another model",
    where: str = "model",
    hosts: Sequence[str] = (),
) -> None:
    """InputError on every rank, naming the first rank that differs from rank 0 and how.

    `hosts` names the machine of each rank where there are several: then it is a RefusedError, which names the machine.
    """
    refuse_differences(exchange(store, where, rank, range(size), lines), what, where, hosts)


def refuse_differences(
    descriptions: Sequence[list[str]],
    what: str = "built another model",
    where: str = "model",
    hosts: Sequence[str] = (),
    names: Sequence[str] = (),
) -> None:
    """InputError naming the first rank whose lines are not rank 0's; the same on every rank.

    `names` say who they are where it is not 'rank' and the number.
    """
    for rank, lines in enumerate(descriptions):
        if lines == descriptions[0]:
            continue
        difference, name = _difference(descriptions[0], lines), names[rank] if names else f"rank {rank}"
        if not hosts:
            raise InputError(f"{name} {what} than rank 0: {difference}; the {where} must be the same on every rank")
        raise RefusedError(
            f"{hosts[rank]}: {name} {what} than rank 0 on {hosts[0]}: {difference}; {FIXES.get(where, '')}the "
            f"{where} must be the same on every rank"
        )


def _difference(first: list[str], other: list[str]) -> str:
    for a, b in zip(first, other, strict=False):
        if a != b:
            return f"'{b}' where rank 0 has '{a}'"
    return f"{len(other)} tensors where rank 0 has {len(first)}"
