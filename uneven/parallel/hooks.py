"""Hooks on gradients that keep nobody alive, and the end of backward."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class GradientHooks:
    """`before(param)` is called when a gradient is about to be added to the param's, `arrived(param)` when it has been.

    Both are methods, and held weakly: a hook that held its object would keep params, hooks and object alive for good.
    Gradients that cannot be summed over ranks are refused.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        before: Callable[[nn.Parameter], None],
        arrived: Callable[[nn.Parameter], None],
    ) -> None:
        self._handles: list[Any] = []
        for param in params:
            self._handles.append(param.register_hook(_checking(before, param)))
            self._handles.append(param.register_post_accumulate_grad_hook(weakly(arrived)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def running_backward() -> int | None:
    """Which backward runs in this thread, by a number of its own; None outside. One that failed never comes again."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def at_the_end_of_backward(method: Callable[[], None]) -> None:
    """Call it when the backward that is running has computed everything, before it returns to its caller."""
    torch.autograd.Variable._execution_engine.queue_callback(weakly(method))


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call it while its object lives; RuntimeError afterwards, since a sum over ranks would be missing."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = held()
        if alive is None:
            raise RuntimeError("the strategy of this model is gone: keep it while you train, or close() it")
        return alive(*args)

    return call


def _checking(before: Callable[[nn.Parameter], None], param: nn.Parameter) -> Callable[[Tensor], None]:
    call, held = weakly(before), weakref.ref(param)

    def hook(grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): gradients of gradients do not pass over ranks; take them inside the loss "
                "by torch.autograd.grad"
            )
        if grad.is_sparse:
            raise RuntimeError("a sparse gradient cannot be summed in buckets; make the embedding dense")
        call(held())

    return hook
