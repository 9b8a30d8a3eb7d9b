"""A strategy: who holds what. One contract for all of them, so that a loop need not know which one it trains with.

    strategy = DDPBucketed(model, make_optimizer, group)
    loss = loss_sum(strategy.module(x), y) / count_of_all_ranks
    loss.backward()
    strategy.clip(1.0)
    strategy.optimizer.step()
    strategy.optimizer.zero_grad()

Losses are divided by the count of all ranks, gradients are summed: so ranks may bring different numbers of samples, or
none (`sit_out`). All ranks make the same calls in the same order.
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

    `model` is what a module's `load_state_dict` takes, `optimizer` what an optimizer's does: so a state goes from any
    number of ranks and any shares to any other, and into plain PyTorch.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]


class Strategy(Protocol):
    """A model and its optimizer over the ranks of a group, wrapped by making one."""

    module: nn.Module
    optimizer: Optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward only accumulates; the first backward outside sums what has come together."""
        ...

    def sit_out(self) -> None:
        """In the place of backward, on a rank that has no samples for this step."""
        ...

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients, once they are summed."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm, over the whole model, is at most this; the norm before."""
        ...

    def full_state(self) -> FullState: ...
    def load_full_state(self, state: FullState) -> None: ...

    def close(self) -> None:
        """Give the model back as it was made: no hooks, and nothing is summed any more."""
        ...


def _check_same_model(model: nn.Module, group: Group) -> None:
    """Collectives of different models would corrupt or hang."""
    params = list(model.named_parameters())
    trained = [f"{name} is trained" for name, param in params if param.requires_grad]
    lines = [*describe_tensors([*params, *model.named_buffers()]), *trained]
    refuse_differences([text.decode().splitlines() for text in gather_bytes(group, "\n".join(lines).encode())])


def start_alike(model: nn.Module, group: Group) -> None:
    """Every rank begins with rank 0's params and buffers.

    ValueError where there is nothing to train, InputError where ranks brought different models: on every rank alike.
    """
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("the model has no param that requires a gradient")
    _check_same_model(model, group)
    broadcast_params(group, (*model.parameters(), *model.buffers()))


def on_host(state: Any) -> Any:
    """A copy of nested dicts and lists whose tensors lie on the host, for themselves."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(on_host(value) for value in state)
    return copy.deepcopy(state)


def scale_to_norm(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """As torch's clip_grad_norm_ does, for gradients whose norm was found by other means."""
    scale_all(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def scale_all(gradients: Iterable[Tensor], factor: Tensor) -> None:
    for one in gradients:
        one.mul_(factor.to(one.device, one.dtype))


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def whole_state(module: nn.Module, whole: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """A module's state by name, on the host, of params that `whole` puts together; tied ones only once."""
    params = {param: whole(param) for param in module.parameters()}
    held = module.state_dict(keep_vars=True)
    return {key: params[one] if isinstance(one, nn.Parameter) else on_host(one) for key, one in held.items()}


def held_by_name(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's own tensors, of the very names that the state has; ValueError else."""
    held: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if held.keys() != state.keys():
        raise ValueError(f"the state has other names than the model: {sorted(held.keys() ^ state.keys())}")
    return held
