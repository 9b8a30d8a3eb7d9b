"""A strategy decides which rank holds what. One protocol for all, so that a loop works with any of them.

    strategy = DDPBucketed(model, make_optimizer, group)
    loss = loss_sum(strategy.module(x), y) / count_of_all_ranks
    loss.backward()
    strategy.clip(1.0)
    strategy.optimizer.step()
    strategy.optimizer.zero_grad()

Losses are divided by the sample count of all ranks and gradients are summed, so ranks may train different numbers of
samples, or none (`backward_without_samples`). All ranks make the same calls in the same order.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.collectives import broadcast_params
from uneven.comm.fingerprint import describe_tensors, refuse_differences
from uneven.comm.gather import gather_bytes
from uneven.comm.group import Group

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class FullState:
    """Model and optimizer as one process without any strategy would have them, on the host.

    Both are what PyTorch's `load_state_dict` takes, so a state can be loaded by any number of ranks with any shares.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]


class Strategy(Protocol):
    """A model and its optimizer over the ranks of a group. Making one changes the model in place; `close` undoes it."""

    module: nn.Module
    optimizer: Optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward only accumulates; the first backward outside sums what was accumulated."""
        ...

    def backward_without_samples(self) -> None:
        """Take part in the collectives of a step in place of backward, on a rank that has no samples for it."""
        ...

    def scale(self, factor: Tensor) -> None:
        """Multiply all summed gradients."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most this; returns the norm before."""
        ...

    def full_state(self) -> FullState: ...
    def load_full_state(self, state: FullState) -> None: ...

    def close(self) -> None:
        """Remove all hooks; gradients are not summed any more."""
        ...


def _check_same_model(model: nn.Module, group: Group) -> None:
    """InputError on every rank if the ranks' models differ: their collectives would mix up data or hang."""
    params = list(model.named_parameters())
    trained = [f"{name} is trained" for name, param in params if param.requires_grad]
    lines = [*describe_tensors([*params, *model.named_buffers()]), *trained]
    refuse_differences([text.decode().splitlines() for text in gather_bytes(group, "\n".join(lines).encode())])


def check_trainable(model: nn.Module) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("the model has no param that requires a gradient")


def sync_initial_state(model: nn.Module, group: Group) -> None:
    """Check that all ranks have built the same model, then give all of them rank 0's params and buffers."""
    _check_same_model(model, group)
    broadcast_params(group, (*model.parameters(), *model.buffers()))


def on_host(state: Any) -> Any:
    """A copy of nested dicts and lists, with all tensors copied to the host."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(on_host(value) for value in state)
    return copy.deepcopy(state)


def scale_to_norm(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """As torch's clip_grad_norm_ does, for a norm that is known already."""
    scale_all(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def scale_all(gradients: Iterable[Tensor], factor: Tensor) -> None:
    for grad in gradients:
        grad.mul_(factor.to(grad.device, grad.dtype))


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def full_model_state(module: nn.Module, gather: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """A module's state dict on the host; `gather` makes a whole param, and is called once for tied ones."""
    params = {param: gather(param) for param in module.parameters()}
    tensors = module.state_dict(keep_vars=True)
    return {key: params[t] if isinstance(t, nn.Parameter) else on_host(t) for key, t in tensors.items()}


def tensors_by_name(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's own tensors; ValueError if the state has other names."""
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if tensors.keys() != state.keys():
        raise ValueError(f"the state and the model differ in these names: {sorted(tensors.keys() ^ state.keys())}")
    return tensors
