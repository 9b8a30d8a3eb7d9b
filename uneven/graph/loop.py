"""A body applied to its own result, a number of times or as long as a condition says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.function import Function


class Loop(nn.Module):
    """`times` passes; or passes while a condition holds; or passes until one does (at least one).

    A condition gives one truth for the batch, or one per sample: then a sample that is done keeps its value while
    others go on. No gradient flows through the decision. After `most` passes the loop ends in any case.
    """

    def __init__(
        self,
        body: nn.Module,
        times: int | None = None,
        *,
        condition: Callable[[Tensor], Any] | None = None,
        is_until: bool = False,
        most: int = 100,
    ) -> None:
        super().__init__()
        self.body = body
        self.times = times
        self.condition = condition
        self.is_until = is_until
        self.most = most

    def forward(self, x: Tensor, *extra: Any) -> Tensor:
        if self.times is not None:
            for _ in range(self.times):
                x = self.body(x, *extra)
            return x
        going = self._going(x) if not self.is_until else None
        for _ in range(self.most):
            if going is not None and not bool(going.any()):
                break
            x = _only(going, self.body(x, *extra), x)
            still = self._going(x)
            going = still if going is None else going & still
        return x

    def _going(self, x: Tensor) -> Tensor:
        """Which samples take the next pass; one truth for all where the condition gives only one."""
        assert self.condition is not None
        verdict = self.condition(x)
        verdict = verdict.detach() if isinstance(verdict, Tensor) else torch.tensor(bool(verdict), device=x.device)
        if verdict.dtype != torch.bool or (verdict.dim() > 0 and verdict.numel() not in (1, len(x))):
            raise InputError(
                f"a loop's condition must give one bool, or one for each of the {len(x)} samples; "
                f"this one gave {verdict.dtype} of shape {tuple(verdict.shape)}"
            )
        verdict = verdict.flatten() if verdict.numel() > 1 else verdict.reshape(())
        return ~verdict if self.is_until else verdict

    def extra_repr(self) -> str:
        if self.times is not None:
            return f"for {self.times}"
        name = self.condition.name if isinstance(self.condition, Function) else type(self.condition).__name__
        return f"{'until' if self.is_until else 'while'} {name}, at most {self.most}"


def _only(going: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    if going is None or going.dim() == 0:
        return new
    return torch.where(going.view(-1, *[1] * (new.dim() - 1)), new, old)
