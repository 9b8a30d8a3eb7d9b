"""Finds reads of params that are not here: with FSDP a param is whole only while its unit computes.

Used around the train step's first call. A step that reads params by itself, as for a penalty on their size in the loss,
would read freed memory: on a CPU the process dies of it, on a GPU it computes with whatever lies there.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uneven.errors import InputError


class AbsentParams(TorchDispatchMode):
    """Inside, an operation on a param that is not here is an InputError. What reads no more than its shape may."""

    def __init__(self, model: nn.Module, is_here: Callable[[nn.Parameter], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {param: name for name, param in model.named_parameters()}
        self._is_here = is_here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        operation = func.__name__.partition(".")[0]
        if not (operation == "detach" or operation.endswith("_like") or operation.startswith("new_")):
            for value in tree_leaves((args, kwargs)):
                self._check(value)
        return func(*args, **(kwargs or {}))

    def _check(self, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            is_absent = value in self._names and not self._is_here(value)
        else:  # what was made of one by detach
            is_absent = isinstance(value, Tensor) and value.numel() > 0 and not value.untyped_storage().nbytes()
        if is_absent:
            raise InputError(
                f"strategy='fsdp': the train step reads {self._names.get(value, 'a param')} outside of its block's "
                "forward, where it is not here; for a penalty in the loss use the optimizer's weight_decay, for a "
                "weight that two layers share leave its module out of the model's fsdp_units(), or use strategy='zero2'"
            )
