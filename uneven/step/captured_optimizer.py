"""The optimizer in captured steps: state and learning rates on the device, everything else a constant.

The step of one rank is one graph (graph.py); of several ranks the update is a graph of its own (`CapturedUpdate`).
The first half (captured.py) ends with this rank's gradients in the reducer's buckets. Between the two the host waits
for the other ranks, decides whether the step is finite, and sums the buckets; so a graph holds no collective, and only
addresses of this rank's own memory: the group may be replaced without capturing again.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from uneven.errors import InputError
from uneven.parallel.buckets import Bucket
from uneven.step.capture import Capture
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


class CapturedUpdate:
    """Stands in for `EagerStep.apply`, by gradients that are known to be finite.

    There is one graph for each set of params with a gradient and each state of the optimizer's constants. What is seen
    for the first time runs eagerly: optimizer state must exist before it is captured.
    """

    def __init__(self, step: EagerStep) -> None:
        prepare_optimizer(step)
        device = step.precision.device
        self.optimizer = step.optimizer
        self._step = step
        self._settings = CapturedSettings(step.optimizer, device)
        self._count = torch.ones((), dtype=torch.float64, device=device)
        self._constants: Hashable = None  # of the settings, where `read_settings` has read them for this step
        self._seen: Hashable = None
        self._graphs: dict[Hashable, Capture] = {}
        self._buckets: list[Bucket] | None = None  # whose addresses the graphs hold

    def read_settings(self) -> None:
        """What the next call needs to know of the optimizer, while the device computes; when the rates are set."""
        self._constants = self._settings.constants()
        self._settings.write_rates()

    def __call__(self, counts: Tensor | None) -> None:
        key = self._key(counts)
        self._constants = None
        if key not in self._graphs:
            if key != self._seen:  # a scheduler that changes momentum in every step is never captured
                self._seen = key
                EagerStep.apply(self._step, counts)  # not the form of it that comes here
                return
            self.record(counts)
        self._settings.write_rates()
        if counts is not None:
            self._count.fill_(float(counts))
        self._graphs[key].replay([])
        self._step.end_update()

    def record(self, counts: Tensor | None) -> None:
        """Capture the update for the gradients as they are now; nothing is computed."""
        capture, count = Capture([]), None if counts is None else self._count
        with self._settings.rates_in_tensors():
            capture.record(lambda _: EagerStep.apply(self._step, count))
        self._graphs[self._key(counts)] = capture

    def clear(self) -> None:
        """Forget all graphs: optimizer state or buckets are about to be replaced."""
        self._graphs.clear()
        self._seen = None

    def _key(self, counts: Tensor | None) -> Hashable:
        reducer = self._step.reducer
        assert reducer is not None, "captured only where gradients are summed over ranks"
        if reducer.buckets is not self._buckets:
            self.clear()
            self._buckets = reducer.buckets
        constants = self._settings.constants() if self._constants is None else self._constants
        return counts is not None, reducer.unused, constants


def make_captured_update(step: EagerStep) -> CapturedUpdate | None:
    """None where the update must stay eager: the user's own function, a loss scaler, or an optimizer that cannot."""
    if step.before_update.function is not None or step.precision.is_scaled:
        return None
    try:
        return CapturedUpdate(step)
    except InputError:
        return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | bool | str | None) or (
        isinstance(value, tuple) and all(isinstance(item, int | float) for item in value)
    )


def _has_dampening(optimizer: Optimizer) -> bool:
    return any(group.get("dampening", 0) for group in optimizer.param_groups)


def _describe(optimizer: Optimizer) -> str:
    return type(optimizer).__name__ + (" with dampening" if _has_dampening(optimizer) else "")
