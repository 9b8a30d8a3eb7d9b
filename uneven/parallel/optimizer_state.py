"""The state of an optimizer whose params are cut among ranks: joined to what a plain one has, and cut again.

State that has the shape of its param is cut as the param is. All other state (a step count, Adafactor's rows) belongs
to the param as a whole: every owner of a part has the same.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uneven.comm.gather import gather_bytes
from uneven.comm.group import Group
from uneven.parallel.pieces import Segment, flat_memory

STEP = "step"  # a count even where it has the shape of its param, which a single number has


def cut_state(state: Mapping[str, Any], segment: Segment, by_tensors: bool) -> dict[str, Any]:
    """A rank's own part of a param's state, on the param's device; tensors are copies."""
    return {key: _cut(key, value, segment, by_tensors) for key, value in state.items()}


def _cut(key: str, value: Any, segment: Segment, by_tensors: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == STEP:
        return value.detach().clone()
    param = segment.param
    if by_tensors or value.shape != param.shape:
        return value.detach().to(param.device, copy=True)
    lying = torch.empty_like(param, dtype=value.dtype).copy_(value)
    return segment.of(lying).clone()


def join_state(
    group: Group, params: Sequence[nn.Parameter], own: Mapping[int, tuple[Segment, dict[str, Any]]], by_tensors: bool
) -> dict[int, dict[str, Any]]:
    """Everyone's parts of every param's state put together, on the host of every rank. A collective."""
    kinds = {
        place: {key: _kind(key, value, segment, by_tensors) for key, value in state.items()}
        for place, (segment, state) in own.items()
        if state
    }
    told = [json.loads(text) for text in gather_bytes(group, json.dumps(kinds).encode())]
    joined: dict[int, dict[str, Any]] = {}
    for place, param in enumerate(params):
        owners = [rank for rank, theirs in enumerate(told) if str(place) in theirs]
        if owners:
            mine = own.get(place)
            joined[place] = {
                key: _join(group, param, kind, owners[0], mine[0] if mine else None, mine[1].get(key) if mine else None)
                for key, kind in told[owners[0]][str(place)].items()
            }
    return joined


def _kind(key: str, value: Any, segment: Segment, by_tensors: bool) -> dict[str, Any]:
    """What the others must know to take part: whether it is cut, its type and shape, or the value itself."""
    if not isinstance(value, Tensor):
        return {"value": value}
    kind = {"type": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    is_cut = not by_tensors and key != STEP and value.shape == (segment.stop - segment.start,)
    return {**kind, "is_cut": is_cut}


def _join(
    group: Group, param: nn.Parameter, kind: dict[str, Any], owner: int, segment: Segment | None, value: Any
) -> Any:
    if "value" in kind:
        return kind["value"]
    dtype = getattr(torch, kind["type"])
    if kind["is_cut"]:
        full = torch.zeros_like(param, dtype=dtype)
        if segment is not None and value is not None:
            segment.of(full).copy_(value)
        group.all_reduce(flat_memory(full)).wait()
        return full.cpu()
    whole = torch.zeros(kind["shape"], dtype=dtype, device=param.device)
    if group.rank == owner:
        whole.copy_(value)
    group.broadcast(whole, owner).wait()
    return whole.cpu()
