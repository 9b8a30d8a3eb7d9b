"""Params side by side in one flat buffer, cut among their owners: by elements, or between whole tensors.

By elements, shares are met to one element, for optimizers that look at one element at a time (SGD, Adam). Whole tensors
are for those that look at matrices (Muon, Adafactor): the largest first, each to whoever has the least for its share.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uneven.comm.collectives import gather_pieces
from uneven.comm.group import Group
from uneven.comm.work import Works
from uneven.parallel.buckets import is_filled, view_like
from uneven.policy.apportion import apportion, check_shares, cut_by


@dataclass(frozen=True)
class Segment:
    """What a rank owns of one param: elements start to stop, in the order of memory."""

    param: nn.Parameter
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor that lies in memory as the param does, as a flat view."""
        assert tensor.stride() == self.param.stride(), "gradients and state lie as their param does"
        return flat_memory(tensor)[self.start : self.stop]


class Pieces:
    """One flat buffer of params of one type and device. The params become views of it: same values, same strides."""

    def __init__(self, params: Sequence[nn.Parameter], shares: Sequence[float], *, by_tensors: bool) -> None:
        if by_tensors:
            owners = own_whole([param.numel() for param in params], shares)
            places = sorted(range(len(params)), key=lambda place: owners[place])
            sizes = [sum(p.numel() for p, o in zip(params, owners, strict=True) if o == r) for r in range(len(shares))]
            params = [params[place] for place in places]
        else:
            sizes = apportion(sum(param.numel() for param in params), shares)
        self.params = list(params)
        self.starts = dict(zip(params, cut_by([param.numel() for param in params]), strict=False))
        self.cut = cut_by(sizes)
        self.by_tensors = by_tensors
        self.flat = _flatten(self.starts)
        self.sum_dtype = self.flat.dtype  # that gradients are summed in

    def segments(self, rank: int) -> Iterator[Segment]:
        """What this rank owns, param by param."""
        begin, end = self.cut[rank], self.cut[rank + 1]
        for param, start in self.starts.items():
            first, last = max(begin, start), min(end, start + param.numel())
            if first < last:
                yield Segment(param, first - start, last - start)

    def leaf_of(self, segment: Segment) -> nn.Parameter:
        """What the optimizer updates in the place of the param; of a whole tensor, the param itself."""
        return segment.param if self.by_tensors else nn.Parameter(segment.of(segment.param.detach()))

    def gather(self, group: Group) -> Works:
        """Every owner's params to everyone."""
        return gather_pieces(group, self.flat, self.cut)


def checked_shares(shares: Sequence[float] | None, group: Group) -> list[float]:
    """One for every rank; None means the same for all. ValueError else."""
    if shares is None:
        return [1.0] * group.world_size
    check_shares(shares)
    if len(shares) != group.world_size:
        raise ValueError(f"shares {tuple(shares)}: there must be one for each of {group.world_size} ranks")
    return list(shares)


def by_kind(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Params that can lie in one buffer: of one type, on one device, all trained or all frozen."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device, param.requires_grad), []).append(param)
    return list(kinds.values())


def own_whole(sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The owner of each tensor: largest tensors first, each to whoever then holds the least for its share."""
    held = [0] * len(shares)
    owners = [0] * len(sizes)
    takers = [rank for rank, share in enumerate(shares) if share > 0]
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner = min(takers, key=lambda rank: ((held[rank] + sizes[place]) / shares[rank], rank))
        owners[place] = owner
        held[owner] += sizes[place]
    return owners


def flat_memory(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def lying_as(param: nn.Parameter) -> Tensor:
    """The param's gradient, in memory as the param is; a foreign one may lie otherwise and is copied."""
    grad = param.grad
    assert grad is not None
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)


@torch.no_grad()
def _flatten(starts: Mapping[nn.Parameter, int]) -> Tensor:
    first = next(iter(starts))
    flat = torch.empty(sum(param.numel() for param in starts), dtype=first.dtype, device=first.device)
    for param, start in starts.items():
        if not is_filled(param):
            raise ValueError(f"a param of shape {tuple(param.shape)} has gaps in memory; make it contiguous")
        view = view_like(param, flat, start)
        view.copy_(param)
        param.data = view
    return flat
