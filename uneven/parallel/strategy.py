"""A strategy decides which rank holds what. All have the same methods, so that a loop works with any of them.

    strategy = DDPBucketed(model, torch.optim.AdamW, group)  # a factory, or an optimizer that was made before
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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from uneven.comm.collectives import broadcast_params
from uneven.comm.fingerprint import describe_tensors, refuse_differences
from uneven.comm.gather import gather_json
from uneven.comm.group import Group
from uneven.errors import InputError
from uneven.policy.redundancy import Copies

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
AnyOptimizer = MakeOptimizer | Optimizer | None  # None: `use_optimizer` follows


@dataclass(frozen=True)
class FullState:
    """Model and optimizer as one process without any strategy would have them, on the host.

    Both are what PyTorch's `load_state_dict` takes, so a state can be loaded by any number of ranks with any shares.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class FitOptions:
    """How `fit` makes a strategy, beside what a loop of your own may ask of it.

    `overlap=False` sends no gradients before backward has ended. With `num_stats` the caller ends every reduction, in
    which each rank's row of so many numbers travels (see Reducer). `init_sync=False` is for ranks whose models are
    known to be equal already. `copies`: whose shards each rank keeps a copy of (policy/redundancy.py).
    """

    overlap: bool = True
    num_stats: int | None = None
    init_sync: bool = True
    copies: Copies | None = None


NO_OPTIONS = FitOptions()


class Strategy:
    """A model and its optimizer over the ranks of a group. Making one changes the model in place; `close` undoes it.

    What is here is right where params are whole on every rank and their summed gradients are in `.grad`. The optimizer
    comes from a factory, was made before the strategy, or is given later.
    """

    module: nn.Module
    _optimizer: Optimizer | None = None

    @property
    def optimizer(self) -> Optimizer:
        """Steps, zeroes and schedules as the optimizer that the strategy was given."""
        if self._optimizer is None:
            raise InputError(f"{type(self).__name__} has no optimizer yet: call use_optimizer(optimizer) first")
        return self._optimizer

    def use_optimizer(self, optimizer: MakeOptimizer | Optimizer) -> Optimizer:
        """Take an optimizer that was made after the strategy; returns the one to step with. All ranks call it."""
        if self._optimizer is not None:
            raise InputError(f"{type(self).__name__} has its optimizer already: make the strategy with None to add one")
        self._optimizer = self._applied(optimizer_of(self.module, optimizer))
        return self._optimizer

    def _applied(self, optimizer: Optimizer) -> Optimizer:
        """What steps in place of the plain optimizer."""
        return optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward only accumulates; the first backward outside sums what was accumulated.

        It changes nothing for a strategy that sums in every backward or only when the optimizer steps.
        """
        return nullcontext()

    def backward_without_samples(self) -> None:
        """Take part in the collectives of a step in place of backward, on a rank that has no samples for it."""

    def scale(self, factor: Tensor) -> None:
        """Multiply all summed gradients."""
        scale_all(gradients_of(self.module), factor)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most this; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def full_params(self) -> dict[str, Tensor]:
        """Every param whole, by its name in the model, as a copy on its device. A collective."""
        return {name: param.detach().clone() for name, param in self.module.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every summed gradient whole, by its param's name, as a copy; None where no rank used the param.

        To be read after the last backward of a step and before `optimizer.zero_grad()`. A collective.
        """
        params = self.module.named_parameters()
        return {name: None if param.grad is None else param.grad.detach().clone() for name, param in params}

    def full_state(self) -> FullState:
        return FullState(on_host(dict(self.module.state_dict())), on_host(self.optimizer.state_dict()))

    def load_full_state(self, state: FullState) -> None:
        self.module.load_state_dict(state.model)
        self.optimizer.load_state_dict(on_host(state.optimizer))  # PyTorch takes tensors that fit without a copy

    def close(self) -> None:
        """Remove all hooks; gradients are not summed any more."""


def optimizer_of(module: nn.Module, optimizer: MakeOptimizer | Optimizer) -> Optimizer:
    """The optimizer itself, made where a factory was given; InputError where it holds another model's params."""
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(module.parameters())
    own = set(module.parameters())
    for param in (param for settings in made.param_groups for param in settings["params"]):
        if param not in own:
            raise InputError(
                f"optimizer: {type(made).__name__} holds a param of shape {tuple(param.shape)} that is not the "
                "model's; make it from model.parameters() of the model that the strategy gets"
            )
    return made


def check_same_model(model: nn.Module, group: Group) -> None:
    """InputError on every rank if the ranks' models differ: their collectives would mix up data or hang."""
    params = list(model.named_parameters())
    trained = [f"{name} is trained" for name, param in params if param.requires_grad]
    lines = [*describe_tensors([*params, *model.named_buffers()]), *trained]
    refuse_differences(gather_json(group, lines))


def check_trainable(model: nn.Module) -> None:
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("the model has no param that requires a gradient")


def sync_initial_state(model: nn.Module, group: Group) -> None:
    """Check that all ranks have built the same model, then give all of them rank 0's params and buffers."""
    check_same_model(model, group)
    broadcast_params(group, (*model.parameters(), *model.buffers()))


def on_host(state: Any) -> Any:
    """A copy of nested dicts and lists, with all tensors copied to the host."""
    return tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf), state
    )


def square_of(grad: Tensor) -> Tensor:
    """The square of a gradient's norm, as a double; of both parts where it is complex."""
    values = torch.view_as_real(grad) if grad.is_complex() else grad
    return values.double().square().sum()


def scale_to_norm(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """As torch's clip_grad_norm_ does, for a norm that is known already."""
    scale_all(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def scale_all(gradients: Iterable[Tensor], factor: Tensor) -> None:
    for grad in gradients:
        grad.mul_(factor.to(grad.device))  # in its own precision: half of it would round the factor


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def full_model_state(module: nn.Module, gather: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """A module's state dict on the host; `gather` makes a whole param, and is called once for tied ones."""
    params = {param: gather(param) for param in module.parameters()}
    tensors = module.state_dict(keep_vars=True)
    return {key: params[t] if isinstance(t, nn.Parameter) else on_host(t) for key, t in tensors.items()}


def tensors_by_name(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's own tensors, without `get_extra_state`; ValueError if the state has other names."""
    tensors: dict[str, Tensor] = _without_extra(module.state_dict(keep_vars=True))
    if differing := tensors.keys() ^ _without_extra(state).keys():
        raise ValueError(f"the state and the model differ in these names: {sorted(differing)}")
    return tensors


def _without_extra(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if not name.endswith("_extra_state")}
