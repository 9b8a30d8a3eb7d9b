"""Models and optimizers that are made already, as factories: every rank trains a deep copy of its own.

Called by api/builder.py. `Ddp.setup` needs none of this: its model is trained in place.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from uneven.api.loop_inputs import check_params
from uneven.errors import InputError


def as_factories(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """(make_model, make_optimizer); what is a function already is returned as it is."""
    is_made = isinstance(optimizer, Optimizer)
    if not isinstance(model, nn.Module):
        if is_made:
            raise InputError(
                f"optimizer={type(optimizer).__name__}(...) is made already, of params that no device trains, since "
                "model is a function; pass a function, as in optimizer=lambda params: "
                f"{type(optimizer).__name__}(params, ...), or the model itself as well"
            )
        return model, optimizer
    try:
        copy.deepcopy(model)
    except Exception as error:
        raise InputError(
            f"model={type(model).__name__}(...) cannot be copied for each device ({error}); pass a function that makes "
            "it, as in model=lambda: Net()"
        ) from error
    if is_made:
        check_params(model, optimizer, "optimizer")
    return (lambda: copy.deepcopy(model)), _copier(model, optimizer) if is_made else optimizer


def _copier(model: nn.Module, optimizer: Optimizer) -> Callable[[Any], Optimizer]:
    """make_optimizer(params): a copy of the optimizer that holds the params of a copy of the model."""

    def make(params: Any) -> Optimizer:
        mine, theirs = list(model.parameters()), list(params)
        if [param.shape for param in mine] != [param.shape for param in theirs]:
            raise InputError(
                f"optimizer={type(optimizer).__name__}(...) is made already, and this strategy makes it of other "
                f"tensors; pass a function: optimizer=lambda params: {type(optimizer).__name__}(params, ...)"
            )
        # What deepcopy finds in its memo it takes as copied: the copy's params in place of the model's.
        return copy.deepcopy(optimizer, {id(own): new for own, new in zip(mine, theirs, strict=True)})

    return make
