"""Params side by side in one flat buffer, sharded among the ranks: by elements, or by whole tensors. Unequal shards.

By elements, shares are met to one element; that suits optimizers that treat each element by itself (SGD, Adam). Whole
tensors suit those that treat matrices (Muon, Adafactor): the largest first, each to the rank with the least for its
share. FlatShards keeps the params whole on every rank (zero1, zero2); ReshardableShards keeps only this rank's shard
between uses (fsdp).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from uneven.comm.collectives import all_gather_shards
from uneven.comm.group import Group
from uneven.comm.work import WorkList
from uneven.errors import InputError
from uneven.parallel.buckets import is_dense, view_like
from uneven.policy.apportion import apportion, check_shares, cut_by
from uneven.policy.redundancy import Copies


@dataclass(frozen=True)
class Shard:
    """A rank's part of one param: elements `start` to `stop`, in the order of memory."""

    param: nn.Parameter
    start: int
    stop: int
    rank: int  # the owner; with redundancy another rank keeps a copy

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor with the param's strides, as a flat view."""
        assert tensor.stride() == self.param.stride(), "gradients and state have their param's strides"
        return flat_memory(tensor)[self.start : self.stop]


class FlatShards:
    """One flat buffer of params of one dtype and device. The params become views of it: same values, same strides.

    Rank r owns flat[bounds[r]:bounds[r + 1]], which may be empty. `held`: elements that ranks own elsewhere, which
    counts where whole tensors are given to whoever has the least.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        shares: Sequence[float],
        *,
        by_tensors: bool,
        held: Sequence[int] | None = None,
    ) -> None:
        if by_tensors:
            owners = assign_tensors([param.numel() for param in params], shares, held)
            order = sorted(range(len(params)), key=lambda place: owners[place])
            sizes = [sum(p.numel() for p, o in zip(params, owners, strict=True) if o == r) for r in range(len(shares))]
            params = [params[place] for place in order]
        else:
            sizes = apportion(sum(param.numel() for param in params), shares)
        self.params = list(params)
        self.starts = dict(zip(params, cut_by([param.numel() for param in params]), strict=False))
        self.bounds = cut_by(sizes)
        self.by_tensors = by_tensors
        self.flat = _flatten(self.starts)
        self.reduce_dtype = self.flat.dtype  # of summed gradients

    def bounds_of(self, rank: int) -> tuple[int, int]:
        return self.bounds[rank], self.bounds[rank + 1]

    def shards_of(self, rank: int) -> Iterator[Shard]:
        """A rank's shards, param by param."""
        begin, end = self.bounds_of(rank)
        for param, start in self.starts.items():
            first, last = max(begin, start), min(end, start + param.numel())
            if first < last:
                yield Shard(param, first - start, last - start, rank)

    def optimized_param(self, shard: Shard) -> nn.Parameter:
        """What the optimizer updates in place of the param; for a whole tensor, the param itself."""
        return shard.param if self.by_tensors else nn.Parameter(self.value_of(shard))

    def value_of(self, shard: Shard) -> Tensor:
        """The lasting values of a shard that this rank holds, as a flat view."""
        return shard.of(shard.param.detach())

    def all_gather(self, group: Group, kept: Sequence[int] = ()) -> WorkList:
        """Send every owner's updated params to all ranks.

        `kept`: whose shards this rank keeps a copy of, in the flat buffer. They arrive beside it: a group that is lost
        may leave anything in what it was receiving, and the copy must be good then.
        """
        ranges = {rank: self.flat[slice(*self.bounds_of(rank))] for rank in kept}
        aside = {rank: torch.empty_like(shard) for rank, shard in ranges.items()}
        works = all_gather_shards(group, self.flat, self.bounds, aside)
        return _Arriving(works, [(ranges[rank], aside[rank]) for rank in kept]) if aside else works


class _Arriving(WorkList):
    """Shards that arrive beside the place where they belong, and are moved there when all of them are there."""

    def __init__(self, works: WorkList, moves: list[tuple[Tensor, Tensor]]) -> None:
        self._inner, self._moves = works, moves

    def wait(self) -> None:
        self._inner.wait()
        for place, arrived in self._moves:
            place.copy_(arrived)
        self._moves = []


class ReshardableShards(FlatShards):
    """Params that are whole only between `unshard` and `reshard`; `held` has this rank's lasting shard, by its rank.

    With `copies` it also has the shard that this rank keeps for another one.

    The flat buffer keeps its address: its storage is freed and allocated again, never replaced, so that what autograd
    has saved of a param is valid again when backward needs it. With `compute_dtype` whole params have that dtype (and
    so have their gradients), while shards and summed gradients keep the dtype the params were made in.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        shares: Sequence[float],
        group: Group,
        compute_dtype: torch.dtype | None,
        copies: Copies | None = None,
    ) -> None:
        is_made = not has_no_memory(params[0])
        super().__init__(params, shares, by_tensors=False)
        self._rank = group.rank
        own = {rank: self.flat[slice(*self.bounds_of(rank))] for rank in ranks_held(group.rank, copies)}
        self.held = {rank: part.clone() if is_made else torch.empty_like(part) for rank, part in own.items()}
        self.is_unsharded = True
        if compute_dtype is not None and compute_dtype != self.flat.dtype:
            self._move_to(torch.empty_like(self.flat, dtype=compute_dtype))
        self.reshard()

    def unshard(self, group: Group) -> WorkList:
        """Start to gather the params; they are whole once the works have been waited for."""
        assert not self.is_unsharded
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.flat[slice(*self.bounds_of(self._rank))] = self.held[self._rank]
        self.is_unsharded = True
        return all_gather_shards(group, self.flat, self.bounds)

    def reshard(self) -> None:
        """Free everything but this rank's shard; the params must not be read until the next `unshard`."""
        self.flat.untyped_storage().resize_(0)
        self.is_unsharded = False

    def value_of(self, shard: Shard) -> Tensor:
        begin = self.starts[shard.param] + shard.start - self.bounds[shard.rank]
        return self.held[shard.rank][begin : begin + shard.stop - shard.start]

    def optimized_param(self, shard: Shard) -> nn.Parameter:
        return nn.Parameter(self.value_of(shard))

    def all_gather(self, group: Group, kept: Sequence[int] = ()) -> WorkList:
        """Nothing is sent after a step: the next forward gathers what it needs."""
        del group, kept
        return WorkList([])

    def _move_to(self, flat: Tensor) -> None:
        """Its values do not matter: they are gathered before anything reads them."""
        self.flat = flat
        for param, start in self.starts.items():
            param.data = view_like(param, flat, start)


def ranks_held(rank: int, copies: Copies | None) -> list[int]:
    """Whose shards a rank holds: its own, and with redundancy those that it keeps a copy of."""
    kept = None if copies is None else copies[rank]
    return [rank] if kept is None else [rank, kept]


def checked_shares(shares: Sequence[float] | None, group: Group) -> list[float]:
    """One share per rank; None means equal ones. ValueError if there are more or fewer."""
    if shares is None:
        return [1.0] * group.world_size
    check_shares(shares)
    if len(shares) != group.world_size:
        raise ValueError(f"shares={tuple(shares)} must have one entry for each of the {group.world_size} ranks")
    return list(shares)


def group_by_kind(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Params that can lie in one buffer: of one dtype, on one device, all trained or all frozen."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device, param.requires_grad), []).append(param)
    return list(kinds.values())


def assign_tensors(
    sizes: Sequence[int], shares: Sequence[float], held_before: Sequence[int] | None = None
) -> list[int]:
    """The owner of each tensor: the largest first, each to the rank that then holds the least for its share."""
    held = [0] * len(shares) if held_before is None else list(held_before)
    owners = [0] * len(sizes)
    candidates = [rank for rank, share in enumerate(shares) if share > 0]
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner = min(candidates, key=lambda rank: ((held[rank] + sizes[place]) / shares[rank], rank))
        owners[place] = owner
        held[owner] += sizes[place]
    return owners


def flat_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def has_no_memory(tensor: Tensor) -> bool:
    """Whether its storage was freed, or not yet made: with FSDP that of a param between uses."""
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_wrapper or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def gradient_like(param: nn.Parameter) -> Tensor:
    """The param's gradient with the param's strides; one with other strides is copied."""
    grad = param.grad
    assert grad is not None
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)


@torch.no_grad()
def _flatten(starts: Mapping[nn.Parameter, int]) -> Tensor:
    first = next(iter(starts))
    for param in starts:
        if param.layout is not torch.strided:
            raise InputError(f"a param of shape {tuple(param.shape)} is sparse, and cannot be sharded; make it dense")
    flat = torch.empty(sum(param.numel() for param in starts), dtype=first.dtype, device=first.device)
    for param, start in starts.items():
        if not is_dense(param):
            raise ValueError(f"a param of shape {tuple(param.shape)} has gaps in memory; make it contiguous")
        view = view_like(param, flat, start)
        if not has_no_memory(param):  # else its values come later
            view.copy_(param)
        param.data = view
    return flat
