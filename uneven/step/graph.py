"""The whole step as one CUDA graph: gather, augmentation, forward, backward, clip and optimizer.

Small models spend most of their time launching kernels; a captured step launches once. What changes between
steps lives at fixed addresses: the picked samples (or the batch itself) and the learning rates. A slot of
another size (an epoch's tail) runs eagerly on the same params and optimizer state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils import _pytree as pytree

from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.step.eager import EagerStep
from uneven.step.warmup import no_trace

WARMUP_STEPS = 3  # enough for cuDNN and the allocator to settle before the capture

Inputs = Any  # a pytree of device tensors that `open_batch` turns into a batch


class GraphStep:
    """Life cycle: `capture` once with the first slot's inputs, then call with every slot's inputs."""

    def __init__(self, eager: EagerStep, open_batch: Callable[[Inputs], Batch], device: torch.device) -> None:
        prepare_optimizer(eager)
        self._eager = eager
        self._open = open_batch
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: list[tuple[Inputs, int]] = []
        self._rates = [torch.tensor(float(group["lr"]), device=device) for group in eager.optimizer.param_groups]
        self._written = [float(group["lr"]) for group in eager.optimizer.param_groups]

    def capture(self, inputs: Sequence[tuple[Inputs, int]], slot_samples: int) -> None:
        self._static = [(pytree.tree_map(torch.clone, one), samples) for one, samples in inputs]
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with no_trace(self._eager, self._device, keep_optimizer_tensors=True):
            with torch.cuda.stream(side):
                for _ in range(WARMUP_STEPS):
                    self._run_eagerly(self._static, slot_samples)
            torch.cuda.current_stream(self._device).wait_stream(side)
        groups = self._eager.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: a call of another thread (a sampler, a logger) must not break the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run_eagerly(self._static, slot_samples)
        except RuntimeError as error:
            raise InputError(
                "compile='graph' could not capture the train step, which must not read tensors on the host "
                f"(.item(), print, if on a tensor): {str(error).splitlines()[0]}; use compile='off'"
            ) from error
        finally:
            # Schedulers go on with plain numbers; the captured step reads the tensors.
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
        self._graph = graph

    def __call__(self, inputs: Sequence[tuple[Inputs, int]], slot_samples: int) -> None:
        if self._graph is None or [n for _, n in inputs] != [n for _, n in self._static]:
            self._run_eagerly(inputs, slot_samples)
            return
        for (fixed, _), (fresh, _) in zip(self._static, inputs, strict=True):
            for to, source in zip(pytree.tree_leaves(fixed), pytree.tree_leaves(fresh), strict=True):
                to.copy_(source, non_blocking=True)
        for place, group in enumerate(self._eager.optimizer.param_groups):
            if group["lr"] != self._written[place]:
                self._written[place] = group["lr"]
                self._rates[place].fill_(group["lr"])
        self._graph.replay()

    def _run_eagerly(self, inputs: Sequence[tuple[Inputs, int]], slot_samples: int) -> None:
        self._eager([(self._open(one), samples) for one, samples in inputs], slot_samples)


def prepare_optimizer(step: EagerStep) -> None:
    """Switch an optimizer to the form a graph can hold: state and learning rate on the device."""
    optimizer = step.optimizer
    if type(optimizer) not in (SGD, Adam, AdamW, RMSprop) or _is_damped(optimizer):
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
            # SGD's other forms read a learning-rate tensor on the host; a scaler's skip needs the fused form.
            group["fused"], group["foreach"] = True, False
    if step.precision.name == "fp16":
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _is_damped(optimizer: Optimizer) -> bool:
    return any(group.get("dampening", 0) for group in optimizer.param_groups)


def _describe(optimizer: Optimizer) -> str:
    return type(optimizer).__name__ + (" with dampening" if _is_damped(optimizer) else "")
