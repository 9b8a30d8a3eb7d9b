"""Finds reads of params where the train step must not read them. Used around its first call.

With FSDP a param is whole only while its unit computes: a step that reads params by itself, as for a penalty on their
size in the loss, would read freed memory; on a CPU the process dies of it, on a GPU it computes with whatever lies
there. With sequence parallelism such a penalty would count once for every rank.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uneven.errors import InputError


class ParamReads(TorchDispatchMode):
    """Inside, an operation on a param that must not be read is an InputError. What reads no more than its shape may.

    `refusal`: its text, for the param's name.
    """

    def __init__(
        self, model: nn.Module, may_be_read: Callable[[nn.Parameter], bool], refusal: Callable[[str], str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {param: name for name, param in model.named_parameters()}
        self._may_be_read, self._refusal = may_be_read, refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        operation = func.__name__.partition(".")[0]
        if not (operation == "detach" or operation.endswith("_like") or operation.startswith("new_")):
            for value in tree_leaves((args, kwargs)):
                self._check(value)
        return func(*args, **(kwargs or {}))

    def _check(self, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            is_refused = value in self._names and not self._may_be_read(value)
        else:  # what was made of one by detach
            is_refused = isinstance(value, Tensor) and value.numel() > 0 and not value.untyped_storage().nbytes()
        if is_refused:
            raise InputError(self._refusal(self._names.get(value, "a param")))
