"""A body applied to its own result, a number of times or as long as a condition says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.function import Function
from uneven.graph.rows import rows_of


class Loop(nn.Module):
    """`times` passes; or passes while a condition holds; or passes until one does (at least one).

    A condition gives one truth for the batch, or one per sample: then a sample that is done keeps its value and only
    the others run. No gradient flows through the decision. After `most` passes the loop ends in any case.
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
        going = None if self.is_until else self._going(x)
        for _ in range(self.most):
            if going is not None and not bool(going.any()):
                break
            x = self._pass(x, going, extra)
            still = self._going(x)
            going = still if going is None else going & still
        return x

    def _pass(self, x: Tensor, going: Tensor | None, extra: tuple[Any, ...]) -> Tensor:
        """One pass of the samples that go on. The others do not run: their gradients, too, are as they were."""
        if going is None or going.dim() == 0 or bool(going.all()):
            result: Tensor = self.body(x, *extra)
            return result
        mine = going.nonzero().flatten()
        return x.index_copy(0, mine, self.body(x[mine], *rows_of(extra, mine, len(x), "loop")))

    def _going(self, x: Tensor) -> Tensor:
        """Which samples take the next pass; one truth for all where the condition gives only one."""
        assert self.condition is not None
        verdict = self.condition(x)
        verdict = verdict.detach() if isinstance(verdict, Tensor) else torch.tensor(bool(verdict), device=x.device)
        samples = len(x) if x.dim() else 1
        if verdict.dtype != torch.bool or (verdict.dim() > 0 and verdict.numel() not in (1, samples)):
            raise InputError(
                f"a loop's condition must give one bool, or one for each of the {samples} samples; "
                f"this one gave {verdict.dtype} of shape {tuple(verdict.shape)}"
            )
        is_for_all = verdict.dim() == 0 or x.dim() == 0 or verdict.numel() != samples
        verdict = verdict.reshape(()) if is_for_all else verdict.flatten()
        return ~verdict if self.is_until else verdict

    def extra_repr(self) -> str:
        if self.times is not None:
            return f"for {self.times}"
        name = self.condition.name if isinstance(self.condition, Function) else type(self.condition).__name__
        return f"{'until' if self.is_until else 'while'} {name}, at most {self.most}"
