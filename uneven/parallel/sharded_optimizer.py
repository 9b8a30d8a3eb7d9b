"""ShardedOptimizer (ZeRO-1): each rank keeps the optimizer's state of its own piece of the params and updates that.

Gradients must be summed before (any DDP does); after the step the owners' pieces go to everyone. Shares may be unequal
or zero: they are about bytes, and have nothing to do with who trains how many samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.group import Group
from uneven.parallel.optimizer_state import cut_state, join_state
from uneven.parallel.pieces import Pieces, Segment
from uneven.share.apportion import check_shares


class ShardedOptimizer(Optimizer):
    """Takes the place of the optimizer it is made of, schedulers included: `param_groups` has all params.

    `by_tensors` gives every param to one owner as a whole; else pieces are cut by elements, which only suits optimizers
    that treat every element by itself. `state_dict()` is a collective: all ranks call it, and each gets the state that
    the plain optimizer would have.
    """

    def __init__(
        self, optimizer: Optimizer, group: Group, *, shares: Sequence[float] | None = None, by_tensors: bool = False
    ) -> None:
        shares = [1.0] * group.size if shares is None else list(shares)
        check_shares(shares)
        if len(shares) != group.size:
            raise ValueError(f"shares {tuple(shares)}: there must be one for each of {group.size} ranks")
        self._group = group
        self._inner: Optimizer | None = None
        super().__init__([dict(one) for one in optimizer.param_groups], dict(optimizer.defaults))
        before = {param: dict(state) for param, state in optimizer.state.items()}
        optimizer.state.clear()
        trained = [param for one in self.param_groups for param in one["params"] if param.requires_grad]
        kinds = dict.fromkeys((param.dtype, param.device) for param in trained)
        self.pieces = [
            Pieces([p for p in trained if (p.dtype, p.device) == kind], shares, by_tensors=by_tensors) for kind in kinds
        ]
        self._by_tensors = by_tensors
        self._leaves = {
            segment.param: (segment, self._leaf(segment))
            for pieces in self.pieces
            for segment in pieces.segments(group.rank)
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
        assert self._inner is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_down_settings()
        for param, (segment, leaf) in self._leaves.items():
            if leaf is not param:
                leaf.grad = None if param.grad is None else segment.of(_lying_as(param))
        self._inner.step()
        for param, (_, leaf) in self._leaves.items():
            if leaf is not param:
                leaf.grad = None
        for works in [pieces.gather(self._group) for pieces in self.pieces]:
            works.wait()
        return loss

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

    def _leaf(self, segment: Segment) -> nn.Parameter:
        if self._by_tensors:
            return segment.param
        return nn.Parameter(segment.of(segment.param.detach()))

    def _hand_down_settings(self) -> None:
        """What a scheduler or a user changed in `param_groups`."""
        assert self._inner is not None
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})


def _lying_as(param: nn.Parameter) -> Tensor:
    """The gradient, in memory as its param is; a foreign one may lie otherwise and is copied."""
    grad = param.grad
    assert grad is not None
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)
