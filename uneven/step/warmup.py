"""Warm-up without a trace: compile and tune kernels on real batches, then put everything back.

Restored: params, buffers, optimizer state, loss scaler, loss meter, and the random state of CPU and device.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from uneven.step.eager import EagerStep


@contextmanager
def no_trace(step: EagerStep, device: torch.device, *, keep_optimizer_tensors: bool = False) -> Iterator[None]:
    """Undo everything that happens inside.

    A captured graph holds the addresses of the optimizer's tensors; then they are kept and zeroed, which for
    the optimizers that may be captured equals a fresh start.
    """
    tensors = [*step.model.parameters(), *step.model.buffers()]
    saved = [t.detach().clone() for t in tensors]
    optimizer_state = copy.deepcopy(step.optimizer.state_dict())
    scaler_state = copy.deepcopy(step.precision.scaler.state_dict())
    totals = step.meter.totals.clone()
    cpu_random = torch.get_rng_state()
    device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(tensors, saved, strict=True):
                tensor.copy_(old)
        step.optimizer.zero_grad(set_to_none=True)
        if keep_optimizer_tensors:
            for state in step.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        else:
            step.optimizer.load_state_dict(optimizer_state)
        if scaler_state:
            step.precision.scaler.load_state_dict(scaler_state)
        step.meter.totals.copy_(totals)
        torch.set_rng_state(cpu_random)
        if device_random is not None:
            torch.cuda.set_rng_state(device_random, device)
