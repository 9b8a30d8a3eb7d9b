"""Steps without a trace, to compile and tune kernels and to measure on real batches: everything is restored.

Restored are params, buffers, optimizer state and param groups, loss scaler, loss meter, and the random states of
Python, numpy, torch and the device; by `no_trace_of_forward` what a forward alone may change.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.average.buffers import HeldBuffers
from uneven.step.capture import refuse_assigned
from uneven.step.eager import EagerStep


@contextmanager
def no_trace(step: EagerStep, device: torch.device, *, keep_optimizer_tensors: bool = False) -> Iterator[None]:
    """Undo everything that happens inside.

    Tensors that existed before keep their addresses, which a captured graph may hold. With `keep_optimizer_tensors`,
    before a capture, new optimizer state is zeroed and kept; for optimizers that can be captured that is a fresh start.
    """
    params = list(step.model.parameters())
    saved = [param.detach().clone() for param in params]
    optimizers = list(_with_inner(step.optimizer))
    optimizer_states = [{p: copy.deepcopy(values) for p, values in one.state.items()} for one in optimizers]
    settings = [[_settings(group) for group in one.param_groups] for one in optimizers]
    counters = [_counters(one) for one in optimizers]
    scaler_state = copy.deepcopy(step.precision.scaler.state_dict())
    totals = step.meter.totals.clone()
    try:
        with no_trace_of_forward(step.model, device) as held:
            yield
            if keep_optimizer_tensors:
                refuse_assigned(held)
    finally:
        with torch.no_grad():
            for param, old in zip(params, saved, strict=True):
                param.copy_(old)
        step.optimizer.zero_grad(set_to_none=True)
        befores = zip(optimizers, optimizer_states, settings, counters, strict=True)
        for one, old_state, old_settings, old_counters in befores:
            _restore_state(one, old_state, keep_optimizer_tensors)
            vars(one).update(old_counters)
            for group, before in zip(one.param_groups, old_settings, strict=True):
                _restore_settings(group, before)
        if scaler_state:
            step.precision.scaler.load_state_dict(scaler_state)
        step.meter.totals.copy_(totals)


@contextmanager
def no_trace_of_forward(model: nn.Module, device: torch.device) -> Iterator[HeldBuffers]:
    """Undo what forwards inside do to buffers, extra states and random states.

    Buffers are restored behind autograd's back: a graph that waits for its backward may have saved them.
    """
    held = HeldBuffers(model)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    extra = [(module, copy.deepcopy(module.get_extra_state())) for module in _with_extra_state(model)]
    python_random, numpy_random = random.getstate(), np.random.get_state()
    cpu_random = torch.get_rng_state()
    device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield held
    finally:
        held.put_back()
        for buffer, old in buffers:
            buffer.data.copy_(old)
        for module, state in extra:
            module.set_extra_state(state)
        random.setstate(python_random)
        np.random.set_state(numpy_random)
        torch.set_rng_state(cpu_random)
        if device_random is not None:
            torch.cuda.set_rng_state(device_random, device)


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer and those inside it, which hold the state of a sharded one."""
    yield optimizer
    for inner in getattr(optimizer, "inner_optimizers", ()):
        yield from _with_inner(inner)


def _with_extra_state(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that keep more than tensors, such as a count of their steps."""
    plain = nn.Module.get_extra_state
    return (module for module in model.modules() if type(module).get_extra_state is not plain)


def _counters(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers that an optimizer keeps as attributes, such as a count of its steps."""
    found = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float)}
    found.pop("_opt_called", None)  # a torch scheduler warns where it has not seen a step
    return found


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def _restore_settings(group: dict[str, Any], old: dict[str, Any]) -> None:
    """Undo what the optimizer has counted in its param group, or added to it; tensors keep their addresses."""
    for key in [key for key in group if key != "params" and key not in old]:
        del group[key]
    for key, value in old.items():
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _restore_state(optimizer: Optimizer, old: dict[Tensor, dict[str, Any]], keeps_new: bool) -> None:
    for param, values in list(optimizer.state.items()):
        if param in old:
            for name, value in old[param].items():
                if isinstance(value, Tensor) and isinstance(values.get(name), Tensor):
                    values[name].copy_(value)
                else:
                    values[name] = value
        elif keeps_new:
            for value in values.values():
                if isinstance(value, Tensor):
                    value.zero_()
        else:
            del optimizer.state[param]
