"""What is refused of params that a strategy holds: converting them, and reading them where they cannot be read.

A model is converted by `model.to(torch.float64)`, `.half()`, `.cuda()`: torch would give its params other memory than
the flat buffers that gradients and updates are in. ZeRO-2 then trained nothing, and FSDP, whose params have no memory
between uses, ended the process.

With FSDP a param is whole only while its unit computes: a train step that reads params by itself, as for a penalty on
their size in the loss, would read freed memory; on a CPU the process dies of it, on a GPU it computes with whatever
lies there. With sequence parallelism such a penalty would count once for every rank.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uneven.errors import InputError
from uneven.parallel.flat_shards import has_no_memory


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


Convert = Callable[[Tensor], Tensor]


class NoConversion:
    """From now on until `remove`, or until the strategy is gone, what would convert a param raises an InputError.

    Nothing is converted then. Frozen params that are whole on every rank may be.
    """

    def __init__(self, strategy: Any) -> None:
        modules = strategy.module.modules()
        self._modules = [one for one in modules if next(one.parameters(recurse=False), None) is not None]
        for module in self._modules:
            module._apply = _Apply(module, strategy)  # torch has no hook for it

    def remove(self) -> None:
        for module in self._modules:
            if isinstance(module.__dict__.get("_apply"), _Apply):
                del module._apply
        self._modules = []


class _Apply:
    """In place of a module's `_apply`, by which torch converts. A copy of the module has torch's own."""

    def __init__(self, module: nn.Module, strategy: Any) -> None:
        self._module, self._strategy = weakref.ref(module), weakref.ref(strategy)

    def __call__(self, convert: Convert, *args: Any, **options: Any) -> Any:
        module, strategy = self._module(), self._strategy()
        assert module is not None
        if strategy is not None:
            convert = _checked(convert, type(strategy).__name__)
        return type(module)._apply(module, convert, *args, **options)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "_apply")


def _checked(convert: Convert, name: str) -> Convert:
    def checked(tensor: Tensor) -> Tensor:
        is_here = not (isinstance(tensor, nn.Parameter) and has_no_memory(tensor))
        if is_here and not (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            return convert(tensor)
        seen = tensor if is_here else _small(tensor)
        found = convert(seen)
        if _kind(found) == _kind(seen) and (not is_here or found.data_ptr() == tensor.data_ptr()):
            return found if is_here else tensor
        format_ = "" if found.stride() == seen.stride() else ", in another memory format"
        raise InputError(
            f"{name} holds the model's params, and one of shape {tuple(tensor.shape)} would change from {seen.dtype} "
            f"on {seen.device} to {found.dtype} on {found.device}{format_}: convert the model before {name} is made, "
            "or call close(), convert it, and make strategy and optimizer again"
        )

    return checked


def _kind(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.device, tensor.stride()


def _small(tensor: Tensor) -> Tensor:
    """A few elements, laid out in memory as the tensor's would be."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    few = torch.empty_like(like[(slice(2),) * like.dim()])
    return torch.empty_strided(few.shape, few.stride(), dtype=tensor.dtype, device=tensor.device)
