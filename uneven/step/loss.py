"""What a train step may return: the batch's mean loss, or (loss_sum, count). Anything else is refused in one line."""

import warnings
from typing import Any

from torch import Tensor

from uneven.errors import InputError

WANTED = "it must return the batch's mean loss as one scalar tensor, or (loss_sum, count)"


def read_loss(result: Any) -> tuple[Tensor, Any]:
    """The loss, and the count where the step returned one (else None); tensors come back without dimensions."""
    count: Any = None
    loss = result
    if isinstance(result, tuple):
        if len(result) != 2:
            raise InputError(f"the train step returned a tuple of {len(result)}; {WANTED}")
        loss, count = result
        if not is_number(count):
            raise InputError(f"the train step returned (loss, {describe(count)}); {WANTED}: nothing else beside it")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        hint = ": return its .loss" if isinstance(getattr(loss, "loss", None), Tensor) else ""
        hint = ": return the tensor, without .item()" if isinstance(loss, float) else hint
        hint = ': return its ["loss"]' if type(loss) is dict and isinstance(loss.get("loss"), Tensor) else hint
        raise InputError(f"the train step returned {describe(loss)}; {WANTED}{hint}")
    if not loss.requires_grad:
        raise InputError(
            "the train step returned a loss without a graph (detached, computed under no_grad, or not from the model's "
            "trained params): return the loss as the model's forward gave it, before detach or backward"
        )
    return _without_dimensions(loss), _without_dimensions(count)


def _without_dimensions(value: Any) -> Any:
    """A loss of shape (1,), as a head with one output gives it, adds to the others as any number does."""
    return value.squeeze() if isinstance(value, Tensor) and value.ndim else value


def warn_of_fraction(count: Any) -> None:
    """A count between 0 and 1 is most likely an accuracy: the losses would be divided by it, without an error."""
    if 0 < float(count) < 1:
        warnings.warn(
            f"the train step returned (loss, {float(count):g}), which is read as (loss_sum, count): the losses are "
            "divided by the count; return the loss alone if the second is a metric",
            stacklevel=2,
        )


def is_number(value: Any) -> bool:
    """Whether it is one number, of Python's, numpy's or torch's."""
    is_single = value.numel() == 1 if isinstance(value, Tensor) else getattr(value, "size", 1) == 1
    return hasattr(value, "__float__") and is_single


def describe(value: Any) -> str:
    """What a user's step returned, in words."""
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
