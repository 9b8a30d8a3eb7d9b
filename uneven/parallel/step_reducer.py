"""Gradients summed at their owners when the optimizer steps: no hooks on backward, and nothing to forget."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uneven.comm.collectives import reduce_pieces
from uneven.comm.group import Group
from uneven.comm.work import Work, Works
from uneven.parallel.pieces import Pieces, Segment, flat_memory, lying_as


class StepReducer:
    """Takes what backward has accumulated in the params; the sums are there from `start` to `finish`."""

    def __init__(self, pieces: Sequence[Pieces], group: Group) -> None:
        self._pieces = pieces
        self._group = group
        self._home = {param: one for one in pieces for param in one.params}
        self._sums: dict[Pieces, tuple[Tensor, Works, Tensor, Work]] = {}
        self._used: dict[Pieces, set[nn.Parameter]] = {}

    @torch.no_grad()
    def start(self) -> None:
        for one in self._pieces:
            buffer = torch.zeros_like(one.flat)
            for param, start in one.starts.items():
                if param.grad is not None:
                    buffer[start : start + param.numel()] = flat_memory(lying_as(param))
            flags = torch.tensor([float(param.grad is not None) for param in one.params], device=buffer.device)
            self._sums[one] = buffer, reduce_pieces(self._group, buffer, one.cut), flags, self._group.all_reduce(flags)
        self._used.clear()

    def gradient_of(self, segment: Segment) -> Tensor | None:
        """The summed gradient of what this rank owns of a param; None if no rank used the param."""
        pieces = self._home[segment.param]
        buffer, works, flags, work = self._sums[pieces]
        if pieces not in self._used:
            works.wait()
            work.wait()
            self._used[pieces] = {p for p, flag in zip(pieces.params, flags.tolist(), strict=True) if flag}
        if segment.param not in self._used[pieces]:
            return None
        begin = pieces.starts[segment.param]
        return buffer[begin + segment.start : begin + segment.stop]

    def finish(self) -> None:
        self._sums.clear()
        self._used.clear()

    def zero(self) -> None:
        """The params' own gradients are the optimizer's to zero."""
