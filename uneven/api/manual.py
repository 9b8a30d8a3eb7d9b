"""`Ddp.wrap`: the user's own optimizer, data and loop, with the collectives over all ranks at hand.

All ranks must make the same calls in the same order. In a process alone every call does nothing, so the same script
trains on one device. Invariant: no rank steps by gradients that only it has computed. Where `all_reduce_gradients` or
`weighted_all_reduce_gradients` was forgotten, `ReduceCheck` raises instead of training separate replicas.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from uneven.average.buffers import BufferAverage
from uneven.comm.collectives import broadcast_params
from uneven.errors import InputError
from uneven.train.rank_info import RankInfo


class Wrapped:
    """Made by `Ddp.wrap`: the model, this process's rank, and what ranks do together. `close()` closes the group."""

    def __init__(self, model: nn.Module, rank_info: RankInfo, end_run: Callable[[], None]) -> None:
        """`rank_info` has joined its group, which `end_run` closes. A collective: all ranks take rank 0's values.

        As in DDP, and for the same reason: ranks that have drawn their own params would train different models, and
        nothing later would tell.
        """
        self.model = model
        self._rank_info = rank_info
        self._end_run = end_run
        self.sync_params()
        self._weight = 0.0  # samples counted since the buffers were last averaged
        self._has_counted = False
        self._check = None if rank_info.world_size == 1 else ReduceCheck(model)

    @property
    def rank(self) -> int:
        return self._rank_info.rank

    @property
    def world_size(self) -> int:
        return self._rank_info.world_size

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def sync_params(self) -> None:
        """Broadcast rank 0's params and buffers to every rank, as `Ddp.wrap` has done; after a change of them."""
        if self.world_size > 1:
            broadcast_params(self._rank_info.group, (*self.model.parameters(), *self.model.buffers()))
        self._buffers = BufferAverage(self.model)

    def all_reduce_gradients(self) -> None:
        """Gradients become the mean over ranks of the local mean gradients: right for batches of equal size."""
        self._average(1.0)

    def weighted_all_reduce_gradients(self, count: float | Tensor) -> None:
        """Gradients become those of the mean over all ranks' samples, exactly.

        `count` is the number of samples (or tokens) this rank's loss was the mean of. With 0 this rank's gradients, if
        it has any, do not count.
        """
        try:
            weight = float(count)
        except (TypeError, ValueError):
            weight = float("nan")  # refused with the others
        if not 0.0 <= weight < float("inf"):
            raise InputError(f"count={count!r} must be a number of samples of at least 0")
        self._average(weight)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate over several backward passes; as in DDP the last one comes after this block.

        with wrapped.no_sync():
            loss_of(first_half).backward()
        loss_of(second_half).backward()
        wrapped.all_reduce_gradients()
        """
        if self._check is None:
            yield
            return
        with self._check.suspended():
            yield

    def sync_buffers(self) -> None:
        """Average float buffers by the samples counted since the last call; integer ones take the maximum."""
        # Calls are the same on all ranks, so all of them know whether anything was counted.
        weight = self._weight if self._has_counted else 1.0
        self._weight, self._has_counted = 0.0, False
        self._buffers.run(self._rank_info.group, weight)

    def close(self) -> None:
        """Remove all hooks and close the group: the next run of this process may form its own."""
        if self._check is not None:
            self._check.close()
        self._end_run()

    def _average(self, weight: float) -> None:
        self._weight += weight
        self._has_counted = True
        if self._check is None:
            return
        group = self._rank_info.group
        params = [param for param in self.model.parameters() if param.requires_grad]
        # A mean over no samples is NaN, and 0 times NaN too: without weight there is nothing to send.
        is_used = [weight > 0 and param.grad is not None for param in params]
        head = torch.tensor([weight, *(float(used) for used in is_used)], dtype=torch.float64)
        total, *flags = group.all_reduce(head).wait().tolist()
        flats = self._flatten(params, is_used, weight / (total or 1.0))
        works = [group.all_reduce(flat) for flat, _ in flats]
        for work, (flat, flat_params) in zip(works, flats, strict=True):
            work.wait()
            for param, part in zip(flat_params, flat.split([p.numel() for p in flat_params]), strict=True):
                param.grad = part.view(param.shape).clone()
        for param, flag in zip(params, flags, strict=True):
            if flag == 0.0:
                param.grad = None  # used by no rank: weight decay must not touch it
        self._check.reduced()

    @torch.no_grad()
    def _flatten(
        self, params: list[nn.Parameter], is_used: list[bool], scale: float
    ) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """One flat buffer per dtype and device, in the same order on every rank."""
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        used = dict(zip(params, is_used, strict=True))
        for param in params:
            kinds.setdefault((param.dtype, param.device), []).append(param)
        return [
            (
                torch.cat([_gradient(p).flatten() * scale if used[p] else p.new_zeros(p.numel()) for p in same_kind]),
                same_kind,
            )
            for same_kind in kinds.values()
        ]


class ReduceCheck:
    """Raises where a gradient that was not reduced is applied by an optimizer, or accumulated onto.

    Life cycle: hooks are registered when it is made and removed by `close()`, or with the object itself: they hold it
    weakly. A gradient set to None by `zero_grad` was thrown away and is forgotten.

    [Note: two checks] The step is the certain sign: separate replicas begin there. The second backward also finds
    loops that update params without a torch optimizer. A reentrant checkpoint makes one backward accumulate into a
    param several times, so passes are counted where autograd ends one, not by accumulations.
    """

    def __init__(self, model: nn.Module) -> None:
        self._unreduced: dict[int, int] = {}  # id of a param -> the backward pass that last accumulated into it
        self._in_no_sync: set[int] = set()  # those of them whose gradient may be accumulated onto
        self._passes = 0  # backward passes that have ended
        self._is_end_awaited = False
        self._is_suspended = False
        self._handles: list[RemovableHandle] = [register_optimizer_step_pre_hook(_weakly(self.before_step))]
        for param in model.parameters():
            if param.requires_grad:
                self._handles.append(param.register_hook(_weakly(self.before_accumulation, param)))
                self._handles.append(param.register_post_accumulate_grad_hook(_weakly(self.after_accumulation)))
        weakref.finalize(self, _remove, self._handles).atexit = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, nothing raises, and what is accumulated may be accumulated onto."""
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before

    def reduced(self) -> None:
        """Every rank holds the same gradients."""
        self._unreduced.clear()
        self._in_no_sync.clear()
        self._is_end_awaited = False  # a backward that raised never came to its end

    def close(self) -> None:
        self.reduced()
        _remove(self._handles)

    def before_accumulation(self, param: Tensor) -> None:
        last = self._unreduced.get(id(param), self._passes)
        if param.grad is None or last == self._passes or id(param) in self._in_no_sync or self._is_suspended:
            return
        raise InputError(_forgotten("a second backward() accumulates onto gradients that only this rank has"))

    def after_accumulation(self, param: Tensor) -> None:
        self._unreduced[id(param)] = self._passes
        if self._is_suspended:
            self._in_no_sync.add(id(param))
        else:
            self._in_no_sync.discard(id(param))
        if not self._is_end_awaited:
            self._is_end_awaited = True
            Variable._execution_engine.queue_callback(self._end_pass)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._unreduced or self._is_suspended:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        if any(id(param) in self._unreduced and param.grad is not None for param in params):
            raise InputError(_forgotten("optimizer.step() would apply gradients that only this rank has"))

    def _end_pass(self) -> None:
        self._is_end_awaited = False
        # Inside a node: it was the backward of a reentrant checkpoint, and the pass that contains it goes on.
        if torch._C._current_autograd_node() is None:
            self._passes += 1


def _weakly(method: Callable[..., None], param: nn.Parameter | None = None) -> Callable[..., None]:
    """A hook that keeps neither the method's object alive, nor the param that it is called with in place of torch's."""
    find_method, find_param = weakref.WeakMethod(method), None if param is None else weakref.ref(param)

    def hook(*arguments: Any) -> None:
        call = find_method()
        if find_param is not None:
            arguments = (find_param(),)
        if call is not None and arguments[0] is not None:
            call(*arguments)

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _forgotten(what: str) -> str:
    return (
        f"{what}, and the ranks would train different models: after backward() call all_reduce_gradients() or "
        "weighted_all_reduce_gradients(count) on what Ddp.wrap gave, on every rank; to accumulate over several "
        "batches, run all backward passes but the last inside its no_sync()"
    )


def _gradient(param: nn.Parameter) -> Tensor:
    assert param.grad is not None, "called only for params with a gradient"
    return param.grad
