"""The manual tier: the user's own optimizer, data and loop, with the sums over ranks at hand.

All ranks must make the same calls in the same order. In a process by itself every call does nothing, so the same
script trains on one device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from uneven.average.buffers import BufferAverage
from uneven.comm.collectives import broadcast_params
from uneven.comm.group import Group
from uneven.errors import InputError


class Wrapped:
    """Made by `Ddp.wrap`: the model, this rank's number, and what ranks do together. `close()` frees the group."""

    def __init__(self, model: nn.Module, group: Group, leave: Callable[[], None]) -> None:
        self.model = model
        self._group = group
        self._leave = leave
        self._buffers = BufferAverage(model)
        self._weight = 0.0  # since the buffers last met
        self._has_counted = False

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def sync_params(self) -> None:
        """Rank 0's params and buffers become everyone's."""
        if self.world_size == 1:
            return
        broadcast_params(self._group, (*self.model.parameters(), *self.model.buffers()))
        self._buffers = BufferAverage(self.model)

    def all_reduce_gradients(self) -> None:
        """Gradients become the mean over ranks of the local mean gradients: right for batches of equal size."""
        self._average(1.0)

    def weighted_all_reduce_gradients(self, count: float | Tensor) -> None:
        """Gradients become those of the mean over all ranks' samples, exactly.

        `count` is the number of samples (or tokens) this rank's loss was the mean of. 0 is legal: its gradients, if it
        has any, do not count.
        """
        weight = float(count)
        if not 0.0 <= weight < float("inf"):
            raise InputError(f"count={count!r} must be a number of samples of at least 0")
        self._average(weight)

    def sync_buffers(self) -> None:
        """Float buffers are averaged by the samples counted since the last time, integer ones take the maximum."""
        # Calls are the same on all ranks, so all of them know whether anything was counted.
        weight = self._weight if self._has_counted else 1.0
        self._weight, self._has_counted = 0.0, False
        self._buffers.run(self._group, weight)

    def close(self) -> None:
        """No more calls: the next run of this process may form its group."""
        self._leave()

    def _average(self, weight: float) -> None:
        self._weight += weight
        self._has_counted = True
        if self.world_size == 1:
            return
        params = [param for param in self.model.parameters() if param.requires_grad]
        # A mean over no samples is NaN, and 0 times NaN too: without weight there is nothing to send.
        is_used = [weight > 0 and param.grad is not None for param in params]
        head = torch.tensor([weight, *(float(used) for used in is_used)], dtype=torch.float64)
        total, *flags = self._group.all_reduce(head).wait().tolist()
        flats = self._flatten(params, is_used, weight / (total or 1.0))
        works = [self._group.all_reduce(flat) for flat, _ in flats]
        for work, (flat, members) in zip(works, flats, strict=True):
            work.wait()
            for param, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                param.grad = part.view(param.shape).clone()
        for param, flag in zip(params, flags, strict=True):
            if flag == 0.0:
                param.grad = None  # used by nobody: weight decay must not touch it

    @torch.no_grad()
    def _flatten(
        self, params: list[nn.Parameter], is_used: list[bool], scale: float
    ) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """One flat buffer per type and device, in the same order on every rank."""
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        used = dict(zip(params, is_used, strict=True))
        for param in params:
            kinds.setdefault((param.dtype, param.device), []).append(param)
        return [
            (
                torch.cat([_own(p).flatten() * scale if used[p] else p.new_zeros(p.numel()) for p in members]),
                members,
            )
            for members in kinds.values()
        ]


def _own(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "asked only of params with a gradient"
    return param.grad
