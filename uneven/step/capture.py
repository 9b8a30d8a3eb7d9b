"""One CUDA graph over inputs at fixed addresses: both captured forms of a step (graph.py, captured.py) use it.

A replay repeats the captured kernels on the same addresses. What changes between steps is copied into the fixed inputs
before it, and no host code runs again.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from uneven.average.buffers import HeldBuffers
from uneven.data.feed import Inputs
from uneven.errors import InputError

T = TypeVar("T")
InputMicros = Sequence[tuple[Inputs, int]]

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

    def fits(self, inputs: InputMicros) -> bool:
        return [samples for _, samples in inputs] == [samples for _, samples in self.inputs]

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
