"""Which optimizers treat every element by itself, and so can work on pieces of tensors.

ZeRO-1 and ZeRO-2 ask it how to shard; FSDP and tensor parallelism, which have pieces only, refuse the others, and so
does `fit` before a rank starts. Adafactor's rows and columns, Muon's matrices and LAMB's norm per tensor are wrong on
pieces without any error: with Adafactor by elements params ended 4e-2 from one device's. So only what is known to be
elementwise is cut, and everything else gets whole tensors.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from uneven.errors import InputError

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
)
# Whole tensors one by one, with nothing that joins them: what each owner computes is what one device would.
BY_TENSOR: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)
NEEDS_ELEMENTWISE = ("fsdp", "tensor", "sequence")  # strategies that have pieces of tensors only
Hook = TypeVar("Hook", bound=Callable[..., Any])
DECLARED = "is_elementwise"  # an attribute with which an optimizer of the user's own says what it is


def changes_nothing(hook: Hook) -> Hook:
    """Decorator of a step hook of ours that only looks or waits: it does not count as one that may do anything."""
    hook.changes_nothing = True  # type: ignore[attr-defined]
    return hook


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether pieces of tensors are updated as the whole tensors would be.

    True for the types of torch listed above, for subclasses that change nothing but how they are made, and for
    optimizers that say so (`is_elementwise = True`). A hook on the step may do anything, so it makes this False.
    """
    declared = getattr(optimizer, DECLARED, None)
    if declared is not None:
        return bool(declared)
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    has_hooks = any(not getattr(hook, "changes_nothing", False) for hook in hooks)
    return _inherits_from(type(optimizer), ELEMENTWISE) and not has_hooks


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's, which keep nothing in their param groups and never join tensors."""
    return _inherits_from(type(optimizer), (*ELEMENTWISE, *BY_TENSOR))


def refuse_by_elements(optimizer: Optimizer, what: str) -> None:
    """InputError where `what` (a strategy, say) has pieces of tensors for an optimizer that needs whole ones."""
    if is_elementwise(optimizer):
        return
    name = type(optimizer).__name__
    raise InputError(
        f"{what} gives the optimizer pieces of tensors, and {name} is not known to treat every element by itself; use "
        "strategy='zero1' or 'zero2', which give it whole tensors, or an optimizer such as AdamW; if yours is "
        f"elementwise, say so in its class: {DECLARED} = True"
    )


def refuse_joined(optimizer: Optimizer) -> None:
    """InputError for LBFGS, whose step joins all params and runs its closure several times between updates, and for
    an optimizer that is divided among ranks already.
    """
    if hasattr(optimizer, "inner_optimizers"):
        raise InputError(
            f"{type(optimizer).__name__} divides its state among the ranks by itself; use it with DDPFlat or "
            "DDPBucketed, or give ZeRO and FSDP a plain optimizer such as AdamW"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            f"{type(optimizer).__name__} cannot be sharded: its step joins all params and runs its closure several "
            "times; use strategy='ddp-bucketed', or an optimizer such as AdamW"
        )


def _inherits_from(kind: type[Optimizer], known: tuple[type[Optimizer], ...]) -> bool:
    """Whether the type is a known one, or has all of its methods but `__init__`."""
    for place, parent in enumerate(kind.__mro__):
        if parent in known:
            return not any(_overrides(one, parent) for one in kind.__mro__[:place])
    return False


def _overrides(kind: type, parent: type) -> bool:
    """Whether a class has another method than its parent; torch puts a wrapped `step` into every class it makes."""
    return any(
        callable(value) and name != "__init__" and unwrap(value) is not unwrap(getattr(parent, name, object))
        for name, value in vars(kind).items()
    )
