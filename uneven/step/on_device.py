"""Steps without a word to the host, which a CUDA graph can hold: the device itself puts back what is not finite.

Captured whole is the step of one rank alone (graph.py). [Note: steps that are not finite] is in finite.py.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from uneven.data.tensors import Batch
from uneven.step.eager import EagerStep
from uneven.step.finite import largest_of, select


def run_on_device(step: EagerStep, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Tensor:
    """A step of this rank alone; returns its OwnCheck, on the device."""
    step.begin()
    step.optimizer.zero_grad(set_to_none=True)
    counts = step.backward(batches, slot_samples)
    is_scaled = step.precision.scaler.is_enabled()
    largest = None if is_scaled or step.max_grad_value is None else largest_of(step.gradients)  # before the clip
    kept = [] if _skips_by_itself(step) else _updated_tensors(step)
    before = [tensor.clone() for tensor in kept]  # activations are free by now
    step.prepare_update(counts)
    if largest is None and not is_scaled:
        largest = largest_of(step.gradients)
    own = step.own_check(counts, largest)
    is_good = own.isfinite().all() & ((own[0] == 0) | (own[1] > 0))
    _apply_where(step, is_good, kept, before)
    return own


def _apply_where(step: EagerStep, is_good: Tensor, kept: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    if _skips_by_itself(step):
        optimizer: Any = step.optimizer
        optimizer.grad_scale, optimizer.found_inf = None, is_good.logical_not().float()
        try:
            step.apply_update()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    else:
        step.apply_update()
        select(is_good, kept, before)
    step.backup().select(is_good)


def _skips_by_itself(step: EagerStep) -> bool:
    """Whether the optimizer is a fused one, which can skip its step on the device: what GradScaler uses."""
    is_scaled = step.precision.scaler.is_enabled()
    return not is_scaled and all(group.get("fused") for group in step.optimizer.param_groups)


def _updated_tensors(step: EagerStep) -> list[Tensor]:
    """What an update changes: params, optimizer state, the loss scale."""
    scaler = step.precision.scaler
    state = [value for values in step.optimizer.state.values() for value in values.values()]
    scale = [scaler._scale, scaler._growth_tracker] if scaler.is_enabled() else []
    return [
        *(param.detach() for group in step.optimizer.param_groups for param in group["params"]),
        *(value for value in (*state, *scale) if isinstance(value, Tensor)),
    ]
