"""Autograd hooks for the reducers: before and after each gradient, and at the end of backward.

All hooks hold their object weakly: a strong reference would keep params, hooks and reducer alive for good.

[Note: backward inside backward] A checkpoint with use_reentrant=True runs a backward of its own for its segment, inside
the one that the user called: with another id, with callbacks that are called at its own end, and with a gradient for
each param that it used. A BackwardPass is all of them together. A param that several such segments use gets several
gradients in one pass, and nothing tells which is the last before the pass is over.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from uneven.errors import InputError


class GradientHooks:
    """Calls `before(param)` before a gradient is accumulated into the param's, and `ready(param)` afterwards.

    With `before`, gradients that cannot be summed over ranks are refused; None spares every param one call a backward.
    It hangs on the node that accumulates, not on the param: torch.autograd.grad comes to params, too, and adds nothing.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        before: Callable[[nn.Parameter], None] | None,
        ready: Callable[[nn.Parameter], None],
    ) -> None:
        self._handles: list[Any] = []
        # Params hold their nodes weakly, and hooks die with their node. The dicts that nodes keep hooks in are held,
        # too: torch shows them to the garbage collector only while the node has one owner, so that a collection on
        # another thread during backward may take them for garbage.
        self._held: list[Any] = []
        for param in params:
            if before is not None:
                with torch.enable_grad():
                    node = torch.autograd.graph.get_gradient_edge(param).node
                handle = node.register_prehook(_checked(before, param))
                self._held += [node, handle.hooks_dict_ref()]
                self._handles.append(handle)
            self._handles.append(param.register_post_accumulate_grad_hook(weakly(ready)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._held = [], []


def running_backward() -> int | None:
    """The id of the backward that runs in this thread, None outside of one. Ids are not used again."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


class BackwardPass:
    """The backward that the user called, with those inside it; `end` is called when it has computed everything.

    Life cycle: `enter` with every gradient. A pass that failed is never resumed: its callbacks die with it, and with
    them the token by which it is known, so the next backward is a new pass.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = weakly(end)
        self._number: int | None = None  # of the backward that entered last
        self._token: Callable[[], object] = lambda: None

    def enter(self) -> bool:
        """Called inside backward; whether a new pass begins with it."""
        number = running_backward()
        if number == self._number:
            return False
        self._number = number
        if self._token() is not None:
            return False
        token = _Token()
        self._token = weakref.ref(token)
        _queue(partial(_end_of_outermost, self._end, token))
        return True


class _Token:
    """Held by a callback of a backward: gone when that backward is."""


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _end_of_outermost(end: Callable[[], None], token: _Token) -> None:
    """At the end of a backward: call `end`, or where it ran inside a node of another one, wait for the end of that."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        end()
        return
    # Only what runs in the outer backward can add a callback to it: the node that follows does.
    following = next(after for after, _ in node.next_functions if after is not None)

    def go_on(_: Any) -> None:
        handle.remove()
        _queue(partial(_end_of_outermost, end, token))

    handle = following.register_prehook(go_on)


def refuse_repeated() -> InputError:
    """See [Note: backward inside backward]; to be raised where what has left cannot be added to."""
    return InputError(
        "a param had its gradient twice in one backward, after its sum over the ranks had begun: its layer is used by "
        "several checkpoints with use_reentrant=True; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    )


def refuse_removed(param: Tensor) -> InputError:
    """To be raised where a gradient is gone before it was summed."""
    return InputError(
        f"a hook has removed the gradient of a param of shape {tuple(param.shape)} before it was summed over the ranks "
        "(register_post_accumulate_grad_hook): leave gradients to the optimizer, or set them to zero instead"
    )


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method without a reference to its object; RuntimeError once that is gone, since no sum would take place."""
    held, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        alive = held()
        if alive is None:
            raise RuntimeError("the strategy of this model is gone: keep it while you train, or close() it")
        return function(alive, *args)

    return call


def _checked(before: Callable[[nn.Parameter], None], param: nn.Parameter) -> Callable[[tuple[Tensor, ...]], None]:
    call, held = weakly(before), weakref.ref(param)

    def hook(grads: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): second-order gradients are not summed over ranks; compute them inside "
                "the loss with torch.autograd.grad"
            )
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError("a sparse gradient cannot be summed in buckets; make the embedding dense")
        call(held())

    return hook
