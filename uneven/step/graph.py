"""The whole step as one CUDA graph: gather, augmentation, forward, backward, clip and optimizer.

Small models spend most of their time launching kernels; a captured step launches once. What changes between
steps is at fixed addresses: the sample indices (or the batch itself) and the learning rates. A slot of another
size (the last of an epoch) runs eagerly on the same params and optimizer state, and so does a slot for which the
scheduler has changed more than the rate (OneCycleLR's momentum), since that is a constant in the graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from uneven.comm.host_copy import copy_to_host_async
from uneven.data.feed import Inputs
from uneven.data.tensors import Batch
from uneven.step.capture import Capture, InputMicros
from uneven.step.captured_model import CapturedModel
from uneven.step.eager import EagerStep
from uneven.step.finite import OwnCheck, Verdict
from uneven.step.no_trace import no_trace
from uneven.step.on_device import run_on_device
from uneven.step.optimizer_capture import CapturedSettings, prepare_optimizer

WARMUP_STEPS = 3  # enough for cuDNN and the allocator to settle before the capture


class GraphStep:
    """Life cycle: `capture` once with the first slot's inputs, then call with every slot's inputs."""

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch], device: torch.device) -> None:
        prepare_optimizer(eager)
        self._eager = eager
        self._open_batch = open_batch
        self._device = device
        self._capture: Capture | None = None
        self._model = CapturedModel(eager.model)
        self._check: Tensor | None = None  # the OwnCheck that every replay writes
        self._settings = CapturedSettings(eager.optimizer, device)
        self._constants = self._settings.constants()

    def capture(self, inputs: InputMicros, slot_samples: int) -> None:
        capture = Capture(inputs)
        side = torch.cuda.Stream(self._device)
        with no_trace(self._eager, self._device, keep_optimizer_tensors=True):
            side.wait_stream(torch.cuda.current_stream(self._device))  # it may still copy what no_trace has saved
            with torch.cuda.stream(side):
                for _ in range(WARMUP_STEPS):
                    self._run_on_device(capture.inputs, slot_samples)
            torch.cuda.current_stream(self._device).wait_stream(side)
        self._constants = self._settings.constants()
        with self._settings.rates_in_tensors():
            self._check = capture.record(lambda fixed: self._run_on_device(fixed, slot_samples))
        self._capture, self._model = capture, CapturedModel(self._eager.model)

    def __call__(self, inputs: InputMicros, slot_samples: int) -> Verdict:
        """Returns whether the step was finite; asking waits until the device has done it."""
        capture, check = self._capture, self._check
        if capture is None or check is None or not capture.fits(inputs) or not self._has_same_constants:
            fault = self._eager(self._opened(inputs), slot_samples)
            return lambda: fault
        self._model.check()
        self._settings.write_rates()
        capture.replay(inputs)
        copied = copy_to_host_async(check)
        return lambda: self._eager.fault_of([OwnCheck(*copied().tolist())])

    @property
    def _has_same_constants(self) -> bool:
        return self._settings.constants() == self._constants

    def _run_on_device(self, inputs: InputMicros, slot_samples: int) -> Tensor:
        return run_on_device(self._eager, self._opened(inputs), slot_samples)

    def _opened(self, inputs: InputMicros) -> list[tuple[Batch, int]]:
        return [(self._open_batch(micro), samples) for micro, samples in inputs]
