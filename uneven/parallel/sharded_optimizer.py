"""ShardedOptimizer (ZeRO-1): each rank keeps the optimizer's state of its own piece of the params and updates that.

Gradients must be summed before (any DDP does); after the step the owners' pieces go to everyone. Shares may be unequal
or zero: they are about bytes, and have nothing to do with who trains how many samples.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.group import Group
from uneven.comm.work import Works
from uneven.parallel.buckets import view_like
from uneven.parallel.optimizer_state import cut_state, join_state
from uneven.parallel.pieces import Pieces, Segment, by_kind, checked_shares, lying_as


class Source(Protocol):
    """Whoever holds the summed gradients of what this rank owns."""

    def start(self) -> None:
        """A step begins."""
        ...

    def gradient_of(self, segment: Segment) -> Tensor | None: ...
    def finish(self) -> None:
        """The step has used all gradients."""
        ...

    def zero(self) -> None: ...


class ShardedOptimizer(Optimizer):
    """Takes the place of the optimizer it is made of, schedulers included: `param_groups` has all params.

    `by_tensors` gives every param to one owner as a whole; else pieces are cut by elements, which only suits optimizers
    that treat every element by itself. `state_dict()` is a collective: all ranks call it, and each gets the state that
    the plain optimizer would have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: Group,
        *,
        shares: Sequence[float] | None = None,
        by_tensors: bool = False,
        pieces: Sequence[Pieces] | None = None,  # where somebody has cut the params already
    ) -> None:
        self._group = group
        self._inner: Optimizer | None = None
        self._source: Source | None = None
        super().__init__([dict(one) for one in optimizer.param_groups], dict(optimizer.defaults))
        before = {param: dict(state) for param, state in optimizer.state.items()}
        optimizer.state.clear()
        if pieces is None:
            trained = [param for param in self._all_params() if param.requires_grad]
            own = checked_shares(shares, group)
            pieces = [Pieces(kind, own, by_tensors=by_tensors) for kind in by_kind(trained)]
        self.pieces = list(pieces)
        self._by_tensors = by_tensors
        self._leaves = {
            segment.param: (segment, one.leaf_of(segment)) for one in pieces for segment in one.segments(group.rank)
        }
        for one in optimizer.param_groups:
            one["params"] = [self._leaves[param][1] for param in one["params"] if param in self._leaves]
        self._inner = optimizer
        for param, (segment, leaf) in self._leaves.items():
            if param in before:  # by an optimizer that makes its state at once
                optimizer.state[leaf] = cut_state(before[param], segment, by_tensors)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._inner is not None:
            raise ValueError("a sharded optimizer cannot take more params: make it again with all of them")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = called(closure)
        self.start()
        for works in self.update():
            works.wait()
        return loss

    def start(self) -> None:
        """The first part of a step: whatever gradients still need on the wire is started."""
        if self._source is not None:
            self._source.start()

    @torch.no_grad()
    def update(self) -> list[Works]:
        """The second part: update what this rank owns, and start to send it to everyone."""
        assert self._inner is not None
        self._hand_down_settings()
        for param, (segment, leaf) in self._leaves.items():
            if self._source is not None:
                grad = self._source.gradient_of(segment)
                leaf.grad = grad if grad is None or leaf is not param else view_like(param, grad, 0)
            elif leaf is not param:
                leaf.grad = None if param.grad is None else segment.of(lying_as(param))
        self._inner.step()
        for param, (_, leaf) in self._leaves.items():
            if leaf is not param or self._source is not None:
                leaf.grad = None
        if self._source is not None:
            self._source.finish()
        return [pieces.gather(self._group) for pieces in self.pieces]

    def take_gradients_from(self, source: Source) -> None:
        """From now on gradients are not those of the params."""
        self._source = source

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._source is not None:
            self._source.zero()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        assert self._inner is not None
        numbers = {param: place for place, param in enumerate(self._all_params())}
        own = {
            numbers[param]: (segment, dict(self._inner.state.get(leaf, {})))
            for param, (segment, leaf) in self._leaves.items()
        }
        groups = [
            {
                **{key: value for key, value in one.items() if key != "params"},
                "params": [numbers[p] for p in one["params"]],
            }
            for one in self.param_groups
        ]
        return {"state": join_state(self._group, self._all_params(), own, self._by_tensors), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a plain optimizer's state, or that of any number of ranks; each rank cuts out its own."""
        assert self._inner is not None
        params = self._all_params()
        sizes = [len(one["params"]) for one in state_dict["param_groups"]]
        if sizes != [len(one["params"]) for one in self.param_groups]:
            raise ValueError(f"the state has groups of {sizes} params, this optimizer has others")
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        self._inner.state.clear()
        for place, state in state_dict["state"].items():
            found = self._leaves.get(params[int(place)])
            if found is not None:
                segment, leaf = found
                self._inner.state[leaf] = cut_state(state, segment, self._by_tensors)

    def _all_params(self) -> list[nn.Parameter]:
        return [param for one in self.param_groups for param in one["params"]]

    def _hand_down_settings(self) -> None:
        """What a scheduler or a user changed in `param_groups`."""
        assert self._inner is not None
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})


def called(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure says of the loss, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
