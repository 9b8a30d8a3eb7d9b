"""Several branches and who decides: a soft mixture of all (Gate), or one for each sample (Switch)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.rows import rows_of

WEIGHTINGS = ("softmax", "sigmoid", "none")


class Gate(nn.Module):
    """The sum of all experts' results, weighted by the router: scores of shape (..., experts)."""

    def __init__(self, router: nn.Module, experts: Sequence[nn.Module], weighting: str = "softmax") -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)
        self.weighting = weighting

    def forward(self, x: Tensor, *extra: Any) -> Tensor:
        scores = self.router(x)
        if scores.shape[-1] != len(self.experts):
            raise InputError(f"the router gives {scores.shape[-1]} scores for {len(self.experts)} experts")
        if self.weighting != "none":
            scores = scores.softmax(-1) if self.weighting == "softmax" else scores.sigmoid()
        results = [expert(x, *extra) for expert in self.experts]
        missing = results[0].dim() - (scores.dim() - 1)
        parts = [
            score.reshape(*score.shape, *[1] * missing) * one
            for score, one in zip(scores.unbind(-1), results, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def extra_repr(self) -> str:
        return f"weighting={self.weighting}"


class Switch(nn.Module):
    """Each sample goes through one branch.

    The selector gives a branch for the whole batch (an int), one per sample (integers of shape (batch,)), or scores
    of shape (batch, branches) of which the highest wins. No gradient flows through the choice. A branch that nobody
    chose does not run, and its params get no gradient. Further inputs have a row for each sample, or go whole if they
    are no tensors.
    """

    def __init__(self, selector: Any, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.selector = selector
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor, *extra: Any) -> Tensor:
        choice = self.selector(x)
        if not isinstance(choice, Tensor) or choice.dim() == 0:
            result: Tensor = self.branches[self._checked(int(choice))](x, *extra)
            return result
        if len(x) == 0:
            nobody: Tensor = self.branches[0](x, *extra)  # its shape is what the others would give
            return nobody
        chosen = self._per_sample(choice, len(x))
        rows = [(chosen == branch).nonzero().flatten() for branch in range(len(self.branches))]
        results = [
            branch(x[mine], *rows_of(extra, mine, len(x), "switch"))
            for branch, mine in zip(self.branches, rows, strict=True)
            if len(mine)
        ]
        order = torch.cat([mine for mine in rows if len(mine)])
        return torch.cat(results)[order.argsort()]

    def _per_sample(self, choice: Tensor, samples: int) -> Tensor:
        if choice.is_floating_point():
            if choice.shape != (samples, len(self.branches)):
                raise InputError(
                    f"the selector's scores have shape {tuple(choice.shape)}; for {samples} samples and "
                    f"{len(self.branches)} branches it must be {(samples, len(self.branches))}"
                )
            return choice.argmax(-1)
        if choice.shape != (samples,):
            raise InputError(f"the selector chose for {tuple(choice.shape)}, not for each of {samples} samples")
        self._checked(int(choice.min()))
        self._checked(int(choice.max()))
        return choice

    def _checked(self, branch: int) -> int:
        if not 0 <= branch < len(self.branches):
            raise InputError(f"the selector chose branch {branch} of {len(self.branches)} (they count from 0)")
        return branch
