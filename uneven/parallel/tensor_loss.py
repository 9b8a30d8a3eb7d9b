"""Cross-entropy over a vocabulary that is cut among ranks: two small sums and a maximum, never the whole scores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uneven.comm.group import Group


def vocabulary_cross_entropy(scores: Tensor, targets: Tensor, cut: Sequence[int], group: Group) -> Tensor:
    """The loss of every target, as `F.cross_entropy(..., reduction="none")` of all ranks' scores side by side.

    `scores` are this rank's columns, cut[rank] to cut[rank + 1] of the vocabulary; `targets` are the same on all ranks.
    """
    found: Tensor = _CrossEntropy.apply(scores, targets, cut[group.rank], group)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, first: int, group: Group) -> Tensor:
        lowest = torch.finfo(scores.dtype).min
        largest = scores.amax(-1) if scores.shape[-1] else scores.new_full(targets.shape, lowest)
        largest = group.all_reduce_max(largest.contiguous()).wait()
        powers = (scores - largest.unsqueeze(-1)).exp()
        place = targets - first
        is_own = (place >= 0) & (place < scores.shape[-1])
        place = place.clamp(0, max(0, scores.shape[-1] - 1)).unsqueeze(-1)
        own = scores.gather(-1, place).squeeze(-1) if scores.shape[-1] else torch.zeros_like(largest)
        # Both sums in one collective: the powers, and the target's score, which one rank has.
        sums = group.all_reduce(torch.stack([powers.sum(-1), torch.where(is_own, own - largest, 0.0)])).wait()
        ctx.save_for_backward(powers, sums[0], place, is_own)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        powers, total, place, is_own = ctx.saved_tensors
        of_scores = powers / total.unsqueeze(-1)
        if of_scores.shape[-1]:
            of_scores.scatter_add_(-1, place, -is_own.unsqueeze(-1).to(of_scores.dtype))
        return of_scores * grads[0].unsqueeze(-1), None, None, None
