"""Autograd hooks for the reducers: before and after each gradient, and at the end of backward.

All hooks hold their object weakly: a strong reference would keep params, hooks and reducer alive for good.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class GradientHooks:
    """Calls `before(param)` before a gradient is accumulated into the param's, and `ready(param)` afterwards.

    With `before`, gradients that cannot be summed over ranks are refused; None spares every param one call a backward.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        before: Callable[[nn.Parameter], None] | None,
        ready: Callable[[nn.Parameter], None],
    ) -> None:
        self._handles: list[Any] = []
        for param in params:
            if before is not None:
                self._handles.append(param.register_hook(_checked(before, param)))
            self._handles.append(param.register_post_accumulate_grad_hook(weakly(ready)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def running_backward() -> int | None:
    """The id of the backward that runs in this thread, None outside of one. Ids are not used again."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def at_the_end_of_backward(method: Callable[[], None]) -> None:
    """Call the method when the running backward has computed everything, before it returns to its caller."""
    torch.autograd.Variable._execution_engine.queue_callback(weakly(method))


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method without a reference to its object; RuntimeError once that is gone, since no sum would take place."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = held()
        if alive is None:
            raise RuntimeError("the strategy of this model is gone: keep it while you train, or close() it")
        return alive(*args)

    return call


def _checked(before: Callable[[nn.Parameter], None], param: nn.Parameter) -> Callable[[Tensor], None]:
    call, held = weakly(before), weakref.ref(param)

    def hook(grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): second-order gradients are not summed over ranks; compute them inside "
                "the loss with torch.autograd.grad"
            )
        if grad.is_sparse:
            raise RuntimeError("a sparse gradient cannot be summed in buckets; make the embedding dense")
        call(held())

    return hook
