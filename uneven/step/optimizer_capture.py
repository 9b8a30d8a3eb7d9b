"""An optimizer as a CUDA graph can hold it: state and learning rates on the device, everything else a constant.

Both captured updates use it: the whole step of one rank (graph.py) and the update after a gradient sum
(captured_update.py).
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from uneven.errors import InputError
from uneven.step.eager import EagerStep

CAPTURABLE = (SGD, Adam, AdamW, RMSprop)


def prepare_optimizer(step: EagerStep) -> None:
    """Switch an optimizer to its capturable form: state and learning rate on the device."""
    optimizer = step.optimizer
    if type(optimizer) not in CAPTURABLE or _has_dampening(optimizer):
        raise InputError(
            f"compile='graph' cannot capture {_describe(optimizer)}: it takes SGD without dampening, Adam, "
            "AdamW and RMSprop; use compile='off' or 'default'"
        )
    if step.precision.name == "fp16" and isinstance(optimizer, RMSprop):
        raise InputError(
            "compile='graph' with precision='fp16' needs an optimizer that can skip a step on the device "
            "(SGD, Adam, AdamW), got RMSprop; use precision='bf16' or compile='off'"
        )
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = all(param.is_cuda for param in group["params"])
        if "fused" in group and not any(param.is_complex() for param in group["params"]):
            # SGD's other forms read a learning-rate tensor on the host, and only the fused form can skip a step on
            # the device.
            group["fused"], group["foreach"] = True, False
    if step.precision.name == "fp16":
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    for param, values in optimizer.state.items():
        # A checkpoint's step counts were loaded to the host, where the form that is not captured has them.
        if isinstance(count := values.get("step"), Tensor):
            values["step"] = count.to(param.device, torch.float32)


class CapturedSettings:
    """The param groups of an optimizer beside a capture: rates in tensors, which `write_rates` fills before a replay.

    Schedulers go on with plain numbers. Other settings (momentum, betas, weight decay) are constants in the captured
    kernels: a graph is valid only while `constants()` is what it was when it was recorded.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._written = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates = [torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._written]

    def constants(self) -> Hashable:
        return tuple(
            tuple((name, value) for name, value in group.items() if name != "lr" and _is_plain(value))
            for group in self._optimizer.param_groups
        )

    def write_rates(self) -> None:
        for place, group in enumerate(self._optimizer.param_groups):
            rate = float(group["lr"])  # also of a tensor, which the schedule fills in place
            if rate != self._written[place]:
                self._written[place] = rate
                self._rates[place].fill_(rate)

    @contextmanager
    def rates_in_tensors(self) -> Iterator[None]:
        """Around a capture."""
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | bool | str | None) or (
        isinstance(value, tuple) and all(isinstance(item, int | float) for item in value)
    )


def _has_dampening(optimizer: Optimizer) -> bool:
    return any(group.get("dampening", 0) for group in optimizer.param_groups)


def _describe(optimizer: Optimizer) -> str:
    return type(optimizer).__name__ + (" with dampening" if _has_dampening(optimizer) else "")
