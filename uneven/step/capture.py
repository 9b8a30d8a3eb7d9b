"""One CUDA graph over inputs at fixed addresses: both captured forms of a step (graph.py, captured.py) use it.

A replay repeats the captured kernels on the same addresses. What changes between steps is copied into the fixed inputs
before it, and no host code runs again: what host code decides by is a constant, and a change of it is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from uneven.average.buffers import HeldBuffers
from uneven.data.feed import Inputs
from uneven.errors import InputError

T = TypeVar("T")
InputMicros = Sequence[tuple[Inputs, int]]

ADVICE = (
    "a CUDA graph goes on as it was captured; change it before the run begins, train the second stage in a run of its "
    "own, or use compile='off'"
)

# torch's own default for captures belongs to the first device that captured; captures that share memory share a stream.
_streams: dict[torch.device, torch.cuda.Stream] = {}


def can_capture(device: torch.device) -> bool:
    """Whether this device has CUDA graphs; a CPU rank beside CUDA ranks runs eagerly."""
    return device.type == "cuda"


def refuse_assigned(held: HeldBuffers) -> None:
    """InputError where forward has assigned buffers: every replay would compute them from the same first values."""
    if names := held.assigned:
        raise InputError(
            f"compile='graph': forward assigns another tensor to the buffer {names[0]}, which a CUDA graph cannot "
            "hold; write into it (copy_, mul_, add_), or use compile='off'"
        )


class Capture:
    """Life cycle: made with inputs of the sizes to capture, `record` once, then `replay` with every step's inputs."""

    def __init__(self, inputs: InputMicros) -> None:
        self.inputs = [(pytree.tree_map(torch.clone, micro), samples) for micro, samples in inputs]
        self._leaves = [_leaves(micro) for micro, _ in self.inputs]
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, run: Callable[[InputMicros], T], beside: "Capture | None" = None) -> T:
        """Capture `run` on the fixed inputs; nothing is computed yet.

        The capture shares its memory pool with `beside`. That is safe if the two are replayed in turn and the results
        of one are read before the next replay.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = _streams.setdefault(stream.device, torch.cuda.Stream(stream.device))
        pool = None if beside is None or beside._graph is None else beside._graph.pool()
        try:
            # thread_local: CUDA calls of other threads (the sampler, a logger) must not break the capture.
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                result = run(self.inputs)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that failed leaves its own stream current
            raise InputError(
                "compile='graph' could not capture the train step, which must not read tensors on the host "
                f"(.item(), print, if on a tensor): {str(error).splitlines()[0]}; use compile='off'"
            ) from error
        self._graph = graph
        return result

    def replay(self, inputs: InputMicros) -> None:
        assert self._graph is not None, "recorded before it is replayed"
        self._copy_inputs(inputs)
        self._graph.replay()

    def _copy_inputs(self, inputs: InputMicros) -> None:
        for fixed, (fresh, _) in zip(self._leaves, inputs, strict=True):
            for to, source in zip(fixed, _leaves(fresh), strict=True):
                to.copy_(source, non_blocking=True)


def _leaves(inputs: Inputs) -> list[Any]:
    """To walk through a pytree takes longer than to launch a graph."""
    return [inputs] if isinstance(inputs, Tensor) else pytree.tree_leaves(inputs)


class CapturedModel:
    """What a captured step has as constants of the model: which params are trained, which modules are in training mode.

    Life cycle: made when a step is captured, `check` before every replay.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._params = list(model.parameters())
        self._module_names = [name for name, _ in model.named_modules()]
        self._modules = list(model.modules())
        self._are_trained, self._are_training = self._read()

    def check(self) -> None:
        """InputError where a replay would not do what the model says now."""
        are_trained, are_training = self._read()
        if are_trained != self._are_trained:
            place = _first_change(self._are_trained, are_trained)
            what = "unfrozen" if are_trained[place] else "frozen"
            raise InputError(f"compile='graph': {self._names[place]} was {what} while the run is on: {ADVICE}")
        if are_training != self._are_training:
            place = _first_change(self._are_training, are_training)
            name = self._module_names[place] or "the model"
            what = "train" if are_training[place] else "eval"
            raise InputError(f"compile='graph': {name} was put into {what} mode while the run is on: {ADVICE}")

    def _read(self) -> tuple[list[bool], list[bool]]:
        return [param.requires_grad for param in self._params], [module.training for module in self._modules]


def _first_change(before: list[bool], after: list[bool]) -> int:
    return next(place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
