"""The whole step as one CUDA graph: gather, augmentation, forward, backward, clip and optimizer.

Small models spend most of their time launching kernels; a captured step launches once. What changes between
steps is at fixed addresses: the sample indices (or the batch itself) and the learning rates. A slot of another
size (the last of an epoch) runs eagerly on the same params and optimizer state.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from uneven.comm.host_copy import copy_to_host_async
from uneven.data.feed import Inputs
from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.step.capture import Capture, InputMicros
from uneven.step.eager import EagerStep
from uneven.step.finite import OwnCheck, Verdict
from uneven.step.warmup import no_trace

WARMUP_STEPS = 3  # enough for cuDNN and the allocator to settle before the capture


class GraphStep:
    """Life cycle: `capture` once with the first slot's inputs, then call with every slot's inputs."""

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch], device: torch.device) -> None:
        prepare_optimizer(eager)
        self._eager = eager
        self._open_batch = open_batch
        self._device = device
        self._capture: Capture | None = None
        self._check: Tensor | None = None  # the OwnCheck that every replay writes
        self._rates = [torch.tensor(float(group["lr"]), device=device) for group in eager.optimizer.param_groups]
        self._written = [float(group["lr"]) for group in eager.optimizer.param_groups]

    def capture(self, inputs: InputMicros, slot_samples: int) -> None:
        capture = Capture(inputs)
        side = torch.cuda.Stream(self._device)
        with no_trace(self._eager, self._device, keep_optimizer_tensors=True):
            side.wait_stream(torch.cuda.current_stream(self._device))  # it may still copy what no_trace has saved
            with torch.cuda.stream(side):
                for _ in range(WARMUP_STEPS):
                    self._run_on_device(capture.inputs, slot_samples)
            torch.cuda.current_stream(self._device).wait_stream(side)
        groups = self._eager.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            self._check = capture.record(lambda fixed: self._run_on_device(fixed, slot_samples))
        finally:
            # Schedulers go on with plain floats; the captured step reads the tensors.
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
        self._capture = capture

    def __call__(self, inputs: InputMicros, slot_samples: int) -> Verdict:
        """Returns whether the step was finite; asking waits until the device has done it."""
        if self._capture is None or self._check is None or not self._capture.fits(inputs):
            fault = self._eager(self._opened(inputs), slot_samples)
            return lambda: fault
        for place, group in enumerate(self._eager.optimizer.param_groups):
            rate = float(group["lr"])  # also of a tensor, which the schedule fills in place
            if rate != self._written[place]:
                self._written[place] = rate
                self._rates[place].fill_(rate)
        self._capture.replay(inputs)
        copied = copy_to_host_async(self._check)
        return lambda: self._eager.fault_of([OwnCheck(*copied().tolist())])

    def _run_on_device(self, inputs: InputMicros, slot_samples: int) -> Tensor:
        return self._eager.run_on_device(self._opened(inputs), slot_samples)

    def _opened(self, inputs: InputMicros) -> list[tuple[Batch, int]]:
        return [(self._open_batch(micro), samples) for micro, samples in inputs]


def prepare_optimizer(step: EagerStep) -> None:
    """Switch an optimizer to its capturable form: state and learning rate on the device."""
    optimizer = step.optimizer
    if type(optimizer) not in (SGD, Adam, AdamW, RMSprop) or _has_dampening(optimizer):
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
            group["capturable"] = True
        if isinstance(optimizer, SGD) or step.precision.name == "fp16":
            # SGD's other forms read a learning-rate tensor on the host; GradScaler skips steps only in the fused form.
            group["fused"], group["foreach"] = True, False
    if step.precision.name == "fp16":
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _has_dampening(optimizer: Optimizer) -> bool:
    return any(group.get("dampening", 0) for group in optimizer.param_groups)


def _describe(optimizer: Optimizer) -> str:
    return type(optimizer).__name__ + (" with dampening" if _has_dampening(optimizer) else "")
