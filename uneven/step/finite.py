"""Whether a step is finite, found before the update; and what puts a step back that is not.

[Note: steps that are not finite] One rule for all policies: a step whose loss or gradient is not finite, or whose
counts cannot be divided by, is skipped before the update. Params, optimizer state, buffers and the loss meter stay as
they were; its samples are recorded as dropped (train/state.py), and `max_bad_steps` in a row end the run.
Each rank checks its own loss, count and gradient before they are summed: afterwards a NaN is everywhere and nobody
could tell whose it was. The numbers travel with the ranks' statistics, so all ranks skip the same step and know why.
With precision='fp16' gradients that overflow are the loss scaler's business, which skips such a step by itself.

The host reads the numbers before it enqueues the update. Several ranks wait for their statistics anyway. One CUDA
device waits for its backward here (as GradScaler does), because nothing else can keep an update of any optimizer from
happening; only a step that is one CUDA graph decides on the device (`select`), since its speed is not to wait.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from uneven.average.buffers import HeldBuffers

JOINED = 1 << 16  # elements: see `select`
SMALL = 1 << 20  # elements: larger buffers are masks or tables, and a copy of them in every step would cost


class Cause(IntEnum):
    """A small number, because it travels in the same tensor as other statistics."""

    LOSS_NAN = 1
    LOSS_INF = 2
    COUNT = 3
    NO_COUNT = 4
    GRADIENT_NAN = 5
    GRADIENT_INF = 6
    SUM = 7

    def describe(self, rank: int) -> str:
        return {
            Cause.LOSS_NAN: f"the loss of rank {rank} is nan",
            Cause.LOSS_INF: f"the loss of rank {rank} is infinite",
            Cause.COUNT: f"the count that the train step returned on rank {rank} is negative or not finite",
            Cause.NO_COUNT: f"the counts that the train step returned add up to 0 (rank {rank})",
            Cause.GRADIENT_NAN: f"the gradient of rank {rank} holds nan, though its loss is finite",
            Cause.GRADIENT_INF: f"the gradient of rank {rank} is infinite, though its loss is finite",
            Cause.SUM: f"the gradients are finite, but their sum over ranks overflows (the largest on rank {rank})",
        }[self]


class OwnCheck(NamedTuple):
    """One rank's part of a step, as far as it can go wrong; before the sum over ranks.

    With it comes what the rank's loss meter holds by then: whoever is left knows it when the rank is lost.
    """

    has_count: float = 0.0  # 1 where the train step returned (loss_sum, count)
    counts: float = 0.0
    loss: float = 0.0  # not finite if a loss is not
    largest: float = 0.0  # the largest absolute value of the rank's gradient
    # LossMeter.halves: sum and count as fp32 holds them, and what that leaves of them.
    meter_sum: float = 0.0
    meter_count: float = 0.0
    rest_of_sum: float = 0.0
    rest_of_count: float = 0.0

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "OwnCheck":
        """Of a rank alone, which leaves out what its meter holds."""
        return cls(*row)


class Fault(NamedTuple):
    """Why a step is skipped, and which rank's part is the reason."""

    rank: int
    cause: Cause

    @classmethod
    def from_json(cls, data: Sequence[int]) -> "Fault":
        rank, cause = data
        return cls(rank, Cause(cause))

    def __str__(self) -> str:
        return self.cause.describe(self.rank)


Verdict = Callable[[], Fault | None]  # waits for the device where the step is still on its way


def find_fault(checks: Sequence[OwnCheck], largest_sum: float, *, checks_gradients: bool = True) -> Fault | None:
    """The first fault in the ranks' checks: the same on every rank. `largest_sum`: what gradients may add up to."""
    for rank, own in enumerate(checks):
        if not math.isfinite(own.loss):
            return Fault(rank, Cause.LOSS_NAN if math.isnan(own.loss) else Cause.LOSS_INF)
        if own.has_count and not (math.isfinite(own.counts) and own.counts >= 0):
            return Fault(rank, Cause.COUNT)
    if total_count(checks) == 0.0:
        return Fault(next(rank for rank, own in enumerate(checks) if own.has_count), Cause.NO_COUNT)
    if not checks_gradients:
        return None
    total = 0.0
    for rank, own in enumerate(checks):
        if not math.isfinite(own.largest):
            return Fault(rank, Cause.GRADIENT_NAN if math.isnan(own.largest) else Cause.GRADIENT_INF)
        total += own.largest
    if total > largest_sum:
        return Fault(max(range(len(checks)), key=lambda rank: checks[rank].largest), Cause.SUM)
    return None


def total_count(checks: Iterable[OwnCheck]) -> float | None:
    """The count of all ranks; None where losses are means, and no rank has a count."""
    total = None
    for own in checks:
        if own.has_count:
            total = own.counts + (total or 0.0)
    return total


def losses_of(checks: Iterable[OwnCheck]) -> list[tuple[float, float]]:
    """Sum and count of each rank's losses since the last epoch's entry, this step's among them."""
    return [(own.meter_sum + own.rest_of_sum, own.meter_count + own.rest_of_count) for own in checks]


def largest_of(gradients: Sequence[Tensor]) -> Tensor:
    """The largest absolute value, as a double on their device; NaN if any is NaN."""
    filled = [values for grad in gradients if (values := _values(grad)).numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=gradients[0].device if gradients else None)
    if filled[0].device.type == "cuda":
        norms = list(torch._foreach_norm(filled, math.inf))  # a few kernels for all of them
    else:
        norms = [torch.maximum(-low, high) for low, high in map(torch.aminmax, filled)]  # ten times as fast there
    same = len({norm.dtype for norm in norms}) == 1
    return torch.stack(norms if same else [norm.double() for norm in norms]).amax().double()


def largest_unless_finite(gradients: Sequence[Tensor]) -> Tensor | float:
    """0 where all gradients are finite, else as `largest_of`; for a rank alone, which adds up to nobody's.

    On a CPU a sum that is finite proves it: one operation for each gradient instead of four.
    """
    for grad in gradients:
        values = grad if grad.is_floating_point() and not grad.is_sparse else _values(grad)
        if grad.is_cuda or not math.isfinite(values.sum().item()):
            return largest_of(gradients)
    return 0.0


def _values(grad: Tensor) -> Tensor:
    """The numbers of a gradient, which may be sparse (of an embedding) or complex."""
    values = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values


class GradientWatch:
    """The largest gradient that this rank itself computes, for strategies that reduce gradients during backward."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._seen: list[Tensor] = []
        self._handles = [param.register_hook(self._see) for param in params if param.requires_grad]

    def take(self) -> Tensor:
        """Since the last call."""
        seen, self._seen = self._seen, []
        return torch.stack(seen).amax() if seen else torch.zeros((), dtype=torch.float64)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, grad: Tensor) -> None:
        self._seen.append(largest_of([grad.detach()]))


class Backup:
    """What forward changes beside gradients: buffers (BatchNorm's running statistics) and the loss meter.

    `save` before a step's forward; then `restore` on the host, or `select` on the device, where the step was not
    finite. Invariant: the copies keep their addresses, so both can be captured.
    """

    def __init__(self, model: nn.Module, totals: Tensor) -> None:
        self._held = HeldBuffers(model)
        self._live = [totals, *(b.detach() for b in model.buffers() if _can_be_kept(b))]
        self._saved = [torch.empty_like(tensor) for tensor in self._live]
        self._by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for saved, live in zip(self._saved, self._live, strict=True):
            # One kernel copies many tensors, but of one dtype only.
            pairs = self._by_dtype.setdefault(live.dtype, ([], []))
            pairs[0].append(saved)
            pairs[1].append(live)

    def save(self) -> None:
        self._held.put_back()
        for saved, live in self._by_dtype.values():
            torch._foreach_copy_(saved, live)

    def restore(self) -> None:
        self._held.put_back()
        for saved, live in self._by_dtype.values():
            torch._foreach_copy_(live, saved)

    def select(self, is_good: Tensor) -> None:
        select(is_good, self._live, self._saved)


def _can_be_kept(buffer: Tensor) -> bool:
    """Small, and with memory of its own for each element."""
    return buffer.numel() <= SMALL and not is_expanded(buffer)


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, as after `expand`: such a tensor cannot be written."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@torch.no_grad()
def select(is_good: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Keep the tensors if the step was good, else put them back; without a word to the host.

    Small tensors are joined: of each by itself the launches would cost more than the copies.
    """
    joined: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for tensor, old in zip(tensors, before, strict=True):
        if tensor.numel() <= JOINED:
            joined.setdefault(tensor.dtype, []).append((tensor, old))
        else:
            tensor.copy_(torch.where(is_good, tensor, old))
    for pairs in joined.values():
        live, saved = (torch.cat([tensor.flatten() for tensor in part]) for part in zip(*pairs, strict=True))
        chosen = torch.where(is_good, live, saved).split([tensor.numel() for tensor, _ in pairs])
        wanted = [part.view(tensor.shape) for part, (tensor, _) in zip(chosen, pairs, strict=True)]
        torch._foreach_copy_([tensor for tensor, _ in pairs], wanted)
