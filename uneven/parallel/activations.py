"""What forward keeps for backward: everything, or less memory for more time. Goes with every strategy.

Per block of a model: keep all, compute it again in backward, or keep it on the host. `selective` measures how many
bytes each block keeps and computes the largest again, until what is kept fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from uneven.parallel.units import blocks_of

POLICIES = ("none", "blocks", "selective", "offload")


@dataclass(frozen=True)
class Kept:
    """What becomes of one block's activations: 'keep', 'again' or 'host'; `bytes` where it was measured."""

    name: str
    treatment: str
    bytes: int | None = None


class Activations:
    """Applies a policy to the blocks of a model, in place; `kept` says what was done, `close()` undoes it.

    `selective` needs `measure`, a function that runs one forward on a batch of the usual size, and `budget_bytes`.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str,
        *,
        blocks: Sequence[nn.Module] | None = None,
        measure: Callable[[], Any] | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"activation policy {policy!r} must be one of {', '.join(POLICIES)}")
        if (policy == "selective") != (measure is not None and budget_bytes is not None):
            raise ValueError("measure and budget_bytes belong to the policy 'selective', which needs both")
        chosen = blocks_of(model) if blocks is None else list(blocks)
        names = {id(module): name for name, module in model.named_modules()}
        self._changed: list[nn.Module] = []
        self.kept: list[Kept] = []
        sizes = [None] * len(chosen) if measure is None else _measure(model, chosen, measure)
        treatments = _choose(policy, sizes, budget_bytes)
        for block, treatment, size in zip(chosen, treatments, sizes, strict=True):
            self.kept.append(Kept(names[id(block)], treatment, size))
            if treatment != "keep":
                how = _compute_again if treatment == "again" else _keep_on_host
                block.forward = partial(how, block.forward)
                self._changed.append(block)

    def close(self) -> None:
        for block in self._changed:
            del block.forward
        self._changed = []


def _choose(policy: str, sizes: Sequence[int | None], budget: int | None) -> list[str]:
    if policy != "selective":
        return [{"none": "keep", "blocks": "again", "offload": "host"}[policy]] * len(sizes)
    assert budget is not None
    known = [size or 0 for size in sizes]
    treatments = ["keep"] * len(sizes)
    left = sum(known)
    for place in sorted(range(len(sizes)), key=lambda place: (-known[place], place)):
        if left <= budget:
            break
        treatments[place] = "again"
        left -= known[place]
    return treatments


def _compute_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _keep_on_host(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
    with torch.autograd.graph.save_on_cpu(pin_memory=first is not None and first.is_cuda):
        return forward(*args, **kwargs)


def _measure(model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[int | None]:
    """The bytes that each block keeps for backward: every storage once, params not counted."""
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}
    sizes: list[int | None] = []
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
        sizes[place] = (sizes[place] or 0) + sum(seen.values())

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
