"""Activation memory: what forward keeps for backward, per block of a model. Goes with every strategy.

A block's activations are kept, recomputed in backward (activation checkpointing) or offloaded to host memory. `auto`
measures how many bytes each block keeps and recomputes the largest blocks until the rest fits a budget. The setting
`activations` of a run ends up here (train/prepare.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from uneven.parallel.units import blocks_of

POLICIES = ("keep", "recompute", "offload", "auto")


@dataclass(frozen=True)
class BlockActivations:
    """What is done with one block's activations: 'keep', 'recompute' or 'offload'; `bytes` if they were measured."""

    name: str
    policy: str
    bytes: int | None = None


class Activations:
    """Applies a policy to the blocks of a model, in place; `blocks` lists what was done, `close()` undoes it.

    `auto` needs `measure`, a function that runs one forward, and `budget_bytes`. Where `measure` runs on fewer samples
    than training will, `scale` is the ratio of the two.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str,
        *,
        blocks: Sequence[nn.Module] | None = None,
        measure: Callable[[], Any] | None = None,
        budget_bytes: float | None = None,
        scale: float = 1.0,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"activations={policy!r} must be one of {', '.join(POLICIES)}")
        if (policy == "auto") != (measure is not None and budget_bytes is not None):
            raise ValueError("measure and budget_bytes belong to the policy 'auto', which needs both")
        chosen = blocks_of(model) if blocks is None else list(blocks)
        names = {id(module): name for name, module in model.named_modules()}
        self._changed: list[nn.Module] = []
        self.blocks: list[BlockActivations] = []
        sizes: list[int | None] = [None] * len(chosen)
        if measure is not None:
            sizes = [int(scale * size) for size in _measure(model, chosen, measure)]
        for block, choice, size in zip(chosen, _choose(policy, sizes, budget_bytes), sizes, strict=True):
            self.blocks.append(BlockActivations(names[id(block)], choice, size))
            if choice != "keep":
                block.forward = partial(_recompute if choice == "recompute" else _offload, block, block.forward)
                self._changed.append(block)

    def close(self) -> None:
        for block in self._changed:
            del block.forward
        self._changed = []


def _choose(policy: str, sizes: Sequence[int | None], budget: float | None) -> list[str]:
    if policy != "auto":
        return [policy] * len(sizes)
    assert budget is not None
    known = [size or 0 for size in sizes]
    choices = ["keep"] * len(sizes)
    kept = sum(known)
    for place in sorted(range(len(sizes)), key=lambda place: (-known[place], place)):
        if kept <= budget:
            break
        choices[place] = "recompute"
        kept -= known[place]
    return choices


def _recompute(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, block), **kwargs)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _AsForwardBegan(block)


class _AsForwardBegan(AbstractContextManager[None]):
    """Made before a block's forward; inside it the block is as it was then, and afterwards as it is now.

    Without it a recomputation takes other numbers than the forward, silently: functional_call has given back the
    model's own params, power iterations have moved on, the user has changed modes. Nor may it leave a trace:
    BatchNorm would move its running statistics twice a step. It is entered by every backward through the block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._states = [_state(module) for module in block.modules()]
        self._values = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        found = [(buffer, buffer.detach().clone()) for buffer, _ in self._values]
        for buffer, value in self._values:
            buffer.data.copy_(value)  # .data: autograd has saved the buffer and must not see another version
        self._values = found
        for place, (module, is_training, params, buffers) in enumerate(self._states):
            self._states[place] = _state(module)
            module.training = is_training
            module._parameters.update(params)
            module._buffers.update(buffers)


def _state(module: nn.Module) -> tuple[nn.Module, bool, dict[str, Any], dict[str, Any]]:
    return module, module.training, dict(module._parameters), dict(module._buffers)


def _offload(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    del block
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    with torch.autograd.graph.save_on_cpu(pin_memory=first is not None and first.is_cuda):
        return forward(*args, **kwargs)


def _measure(model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[int]:
    """The bytes that each block keeps for backward: every storage once, params not counted."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    sizes: list[int] = []
    contexts: dict[int, Any] = {}

    def enter(place: int, *_: Any) -> None:
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in params:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        contexts[place] = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), seen
        contexts[place][0].__enter__()

    def leave(place: int, *_: Any) -> None:
        hooks, seen = contexts[place]
        hooks.__exit__(None, None, None)
        sizes[place] += sum(seen.values())

    handles = []
    for place, block in enumerate(blocks):
        sizes.append(0)
        handles.append(block.register_forward_pre_hook(partial(enter, place)))
        handles.append(block.register_forward_hook(partial(leave, place)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return sizes
