"""Control flow as modules: Loop, Map, Gate and Switch, made by FlowBuilder's methods of these names.

Each holds its parts as children and decides in forward when they run. Invariant: no gradient flows through a decision
(condition, selector), and a sample that a decision leaves out keeps its value.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from uneven.errors import InputError
from uneven.graph.function import Function

Weighting = Literal["softmax", "sigmoid", "none"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)


class Loop(nn.Module):
    """A body applied to its own result: `times` passes, while a condition holds, or until one does (at least one pass).

    A condition returns one bool for the batch, or one per sample; then only the samples that are not done run, and the
    others keep their values. The loop ends after `most` passes in any case.
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
        active = None if self.is_until else self._active(x)
        for _ in range(self.most):
            if active is not None and not bool(active.any()):
                break
            x = self._pass(x, active, extra)
            still_active = self._active(x)
            active = still_active if active is None else active & still_active
        return x

    def _pass(self, x: Tensor, active: Tensor | None, extra: tuple[Any, ...]) -> Tensor:
        """One pass of the active samples. The others do not run, so their gradients do not change either."""
        if active is None or active.dim() == 0 or bool(active.all()):
            result: Tensor = self.body(x, *extra)
            return result
        rows = active.nonzero().flatten()
        results: Tensor = self.body(x[rows], *_rows_of(extra, rows, len(x), "loop"))
        dtype = torch.promote_types(x.dtype, results.dtype)  # autocast does that for index_copy on a CPU alone
        return x.to(dtype).index_copy(0, rows, results.to(dtype))

    def _active(self, x: Tensor) -> Tensor:
        """A mask of the samples that take the next pass; a 0-dim bool if the condition decides for the whole batch."""
        assert self.condition is not None
        verdict = self.condition(x)
        samples = len(x) if x.dim() else 1
        if not isinstance(verdict, Tensor):
            if not isinstance(verdict, bool | np.bool_):  # a list would count as true, whatever is in it
                raise InputError(
                    f"a loop's condition must return one bool, or a tensor with one for each of the {samples} samples; "
                    f"it returned {verdict!r}"
                )
            verdict = torch.tensor(bool(verdict), device=x.device)
        verdict = verdict.detach()
        if verdict.dtype != torch.bool or (verdict.dim() > 0 and verdict.numel() not in (1, samples)):
            raise InputError(
                f"a loop's condition must return one bool, or one for each of the {samples} samples; "
                f"it returned {verdict.dtype} of shape {tuple(verdict.shape)}"
            )
        is_for_all = verdict.dim() == 0 or x.dim() == 0 or verdict.numel() != samples
        verdict = verdict.reshape(()) if is_for_all else verdict.flatten()
        return ~verdict if self.is_until else verdict

    def extra_repr(self) -> str:
        if self.times is not None:
            return f"for {self.times}"
        name = self.condition.name if isinstance(self.condition, Function) else type(self.condition).__name__
        return f"{'until' if self.is_until else 'while'} {name}, at most {self.most}"


class Map(nn.Module):
    """The body on each element along `dim` (results are stacked), or on each of `slices` equal slices (concatenated).

    `batched` folds the elements into the batch, so that the body runs once. The result is the same for a body that
    treats samples independently, but not for one that mixes them, as BatchNorm does. Extra inputs are passed whole to
    every element.
    """

    def __init__(self, body: nn.Module, dim: int, slices: int | None = None, batched: bool = False) -> None:
        super().__init__()
        self.body = body
        self.dim = dim
        self.slices = slices
        self.batched = batched

    def forward(self, x: Tensor, *extra: Any) -> Tensor:
        elements = self._elements(x)
        if self.batched:
            num_elements, samples = len(elements), len(x)
            widened = [
                value.expand(num_elements, *value.shape).flatten(0, 1)
                if _is_per_sample(value, samples, "map")
                else value
                for value in extra
            ]
            results = self.body(torch.cat(elements), *widened).unflatten(0, (num_elements, samples)).unbind(0)
        else:
            results = [self.body(element, *extra) for element in elements]
        dim = self.dim % x.dim()  # counted from the front, since the body may add or drop trailing dimensions
        return torch.stack(tuple(results), dim) if self.slices is None else torch.cat(tuple(results), dim)

    def _elements(self, x: Tensor) -> tuple[Tensor, ...]:
        if not -x.dim() <= self.dim < x.dim() or self.dim % x.dim() == 0:
            raise InputError(
                f"map along dim={self.dim} of a value of shape {tuple(x.shape)}: dim must be from 1 to {x.dim() - 1} "
                "(0 is the batch)"
            )
        if self.slices is None:
            return x.unbind(self.dim)
        if x.shape[self.dim] % self.slices:
            raise InputError(
                f"dimension {self.dim} has {x.shape[self.dim]} elements, which {self.slices} slices do not divide"
            )
        return x.chunk(self.slices, self.dim)

    def extra_repr(self) -> str:
        what = "each" if self.slices is None else f"{self.slices} slices"
        return f"{what} of dimension {self.dim}{', batched' if self.batched else ''}"


class Gate(nn.Module):
    """The sum of all experts' results, weighted by the router's scores, which have shape (..., experts)."""

    def __init__(self, router: nn.Module, experts: Sequence[nn.Module], weighting: Weighting = "softmax") -> None:
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
            score.reshape(*score.shape, *[1] * missing) * result
            for score, result in zip(scores.unbind(-1), results, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def extra_repr(self) -> str:
        return f"weighting={self.weighting}"


class Switch(nn.Module):
    """Each sample goes through one branch.

    The selector returns a branch for the whole batch (an int), one per sample (integers of shape (batch,)), or scores
    of shape (batch, branches), of which the highest wins. No gradient flows through the choice. A branch without
    samples does not run, and its params get no gradient. Extra inputs that are tensors have a row per sample; others
    are passed whole.
    """

    def __init__(self, selector: Any, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.selector = selector
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor, *extra: Any) -> Tensor:
        choice = self.selector(x)
        if not isinstance(choice, Tensor) or choice.dim() == 0:
            result: Tensor = self.branches[self._checked(self._integer(choice))](x, *extra)
            return result
        if len(x) == 0:
            empty: Tensor = self.branches[0](x, *extra)  # an empty batch has the same output shape in every branch
            return empty
        chosen = self._per_sample(choice, len(x))
        rows = [(chosen == branch).nonzero().flatten() for branch in range(len(self.branches))]
        results = [
            branch(x[own], *_rows_of(extra, own, len(x), "switch"))
            for branch, own in zip(self.branches, rows, strict=True)
            if len(own)
        ]
        order = torch.cat([own for own in rows if len(own)])
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

    def _integer(self, choice: Any) -> int:
        """A choice for the whole batch; int() of a probability would be branch 0, and of a list no number."""
        is_fraction = choice.is_floating_point() if isinstance(choice, Tensor) else not hasattr(choice, "__index__")
        if is_fraction:
            raise InputError(
                f"the selector chose {choice!r}: it must return an integer, a tensor of one for each sample, or one of "
                f"scores, of shape (samples, {len(self.branches)})"
            )
        return int(choice)

    def _checked(self, branch: int) -> int:
        if not 0 <= branch < len(self.branches):
            raise InputError(f"the selector chose branch {branch} of {len(self.branches)} (they count from 0)")
        return branch


def _is_per_sample(extra: Any, samples: int, verb: str) -> bool:
    """Whether an extra input has a row per sample. A tensor with dimensions must have; others are passed whole."""
    if not isinstance(extra, Tensor) or extra.dim() == 0:
        return False
    if len(extra) != samples:
        raise InputError(
            f"{verb}: an extra input has shape {tuple(extra.shape)}, and the batch {samples} samples: it must have a "
            "row per sample; a value that is the same for all samples belongs in the part"
        )
    return True


def _rows_of(extra: tuple[Any, ...], rows: Tensor, samples: int, verb: str) -> tuple[Any, ...]:
    """The extra inputs, restricted to the samples `rows`."""
    return tuple(value[rows] if _is_per_sample(value, samples, verb) else value for value in extra)
