"""The whole step as one CUDA graph: gather, augmentation, forward, backward, clip and optimizer.

Small models spend most of their time launching kernels; a captured step launches once. What changes between
steps is at fixed addresses: the sample indices (or the batch itself) and the learning rates. A slot of another size
(the last of an epoch) runs eagerly on the same params and optimizer state, and so does a slot for which the
scheduler has changed more than the rate (OneCycleLR's momentum), since that is a constant in the graph.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uneven.comm.host_copy import copy_to_host_async
from uneven.data.feed import Inputs
from uneven.data.tensors import Batch
from uneven.step.capture import Capture, CapturedModel, InputMicros
from uneven.step.captured_optimizer import CapturedSettings, prepare_optimizer
from uneven.step.eager import DerivedStep, EagerStep
from uneven.step.finite import OwnCheck, Verdict, largest_of, select
from uneven.step.no_trace import no_trace

WARMUP_STEPS = 3  # enough for cuDNN and the allocator to settle before the capture


@dataclass(frozen=True)
class _Graph:
    capture: Capture
    model: CapturedModel
    constants: Hashable  # of the optimizer's settings
    check: Tensor  # the OwnCheck that every replay writes


class GraphStep(DerivedStep):
    """Life cycle: `prepare` with inputs of each size to capture, then `start_alone` with every slot's inputs."""

    is_captured = True
    answers_late = True

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch]) -> None:
        super().__init__(eager)
        prepare_optimizer(self)
        self._open_batch = open_batch
        self._graphs: dict[tuple[int, ...], _Graph] = {}  # by the sizes of the micro-batches
        self._settings = CapturedSettings(self.optimizer, self.precision.device)

    def is_prepared(self, sizes: Sequence[int], slot_samples: int) -> bool:
        del slot_samples  # their sum, on one rank
        return tuple(sizes) in self._graphs

    def prepare(self, inputs: Sequence[tuple[Any, int]], slot_samples: int) -> None:
        """Leaves no trace."""
        capture, device = Capture(inputs), self.precision.device
        self.backup()  # made here, in the memory of this stream
        side = torch.cuda.Stream(device)
        with no_trace(self, device, keep_optimizer_tensors=True):
            side.wait_stream(torch.cuda.current_stream(device))  # it may still copy what no_trace has saved
            with torch.cuda.stream(side):
                for _ in range(WARMUP_STEPS):
                    run_on_device(self, self._open(capture.inputs), slot_samples)
            torch.cuda.current_stream(device).wait_stream(side)
        constants = self._settings.constants()
        with self._settings.rates_in_tensors():
            check = capture.record(lambda fixed: run_on_device(self, self._open(fixed), slot_samples))
        sizes = tuple(samples for _, samples in inputs)
        self._graphs[sizes] = _Graph(capture, CapturedModel(self.model), constants, check)

    def start_alone(self, inputs: Sequence[tuple[Any, int]], slot_samples: int) -> Verdict:
        """Returns whether the step was finite; asking waits until the device has done it."""
        graph = self._graphs.get(tuple(samples for _, samples in inputs))
        if graph is None or self._settings.constants() != graph.constants:
            return super().start_alone(self._open(inputs), slot_samples)
        graph.model.check()
        self._settings.write_rates()
        graph.capture.replay(inputs)
        copied = copy_to_host_async(graph.check)
        return lambda: self.fault_of([OwnCheck.from_row(copied().tolist())])

    def _open(self, inputs: InputMicros) -> list[tuple[Batch, int]]:
        return [(self._open_batch(micro), samples) for micro, samples in inputs]


def run_on_device(step: EagerStep, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Tensor:
    """A step of this rank alone without a word to the host; returns its OwnCheck, on the device.

    The device itself puts back what is not finite: [Note: steps that are not finite] in finite.py.
    """
    step.begin()
    step.optimizer.zero_grad(set_to_none=True)
    counts = step.backward(batches, slot_samples)
    is_scaled = step.precision.is_scaled
    is_clipped = step.before_update.max_grad_value is not None
    largest = largest_of(step.gradients) if is_clipped and not is_scaled else None  # before the clip
    # A fused optimizer can skip its step on the device: GradScaler uses that, too.
    skips_by_itself = not is_scaled and all(group.get("fused") for group in step.optimizer.param_groups)
    kept = [] if skips_by_itself else _updated_tensors(step)
    before = [tensor.clone() for tensor in kept]  # activations are free by now
    step.prepare_update(counts)
    if largest is None and not is_scaled:
        largest = largest_of(step.gradients)
    own = step.own_check(counts, largest)
    is_good = own.isfinite().all() & ((own[0] == 0) | (own[1] > 0))
    if skips_by_itself:
        _step_fused(step, is_good)
    else:
        step.step_optimizer()
        select(is_good, kept, before)
    step.backup().select(is_good)
    return own


def _step_fused(step: EagerStep, is_good: Tensor) -> None:
    optimizer: Any = step.optimizer
    optimizer.grad_scale, optimizer.found_inf = None, is_good.logical_not().float()
    try:
        step.step_optimizer()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _updated_tensors(step: EagerStep) -> list[Tensor]:
    """What an update changes: params, optimizer state, the loss scale."""
    scaler = step.precision.scaler
    state = [value for values in step.optimizer.state.values() for value in values.values()]
    scale = [scaler._scale, scaler._growth_tracker] if scaler.is_enabled() else []
    return [
        *(param.detach() for group in step.optimizer.param_groups for param in group["params"]),
        *(value for value in (*state, *scale) if isinstance(value, Tensor)),
    ]
