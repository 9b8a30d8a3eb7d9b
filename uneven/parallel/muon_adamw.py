"""MuonAdamW: Muon for the matrices of a model, AdamW for the rest; the same class on one rank and on many.

On several ranks each owns part of the work: whole matrices for Muon, by speed, since orthogonalising them is what costs
time; elements for AdamW, by memory. A step has three phases: all sums of gradients are started; part by part the sums
are waited for, what is owned is updated, and sending it is started; then all of that is waited for. So one part's
numbers travel while another part computes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from uneven.comm.group import Group, SoloGroup
from uneven.parallel.sharded_optimizer import ShardedOptimizer, called
from uneven.parallel.step_reducer import StepReducer

KINDS = ("muon", "adamw")


class MuonAdamW(Optimizer):
    """Groups of params name their kind: `[{"params": matrices, "kind": "muon", "lr": 0.02}, {"params": rest, "kind":
    "adamw"}]`; what else a group may set is what torch.optim.Muon and AdamW take.

    `sums_gradients` says that every rank brings gradients of its own, divided by the count of all ranks' samples; False
    is for gradients that a DDP has summed before. `memory` and `speed` are the ranks' shares. `state_dict()` is a
    collective, and its result does not depend on how many ranks there are.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        group: Group | None = None,
        *,
        memory: Sequence[float] | None = None,
        speed: Sequence[float] | None = None,
        sums_gradients: bool = True,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"MuonAdamW needs torch 2.9 or newer, this is {torch.__version__}")
        ranks = SoloGroup() if group is None else group
        self._is_made = False
        self._parts: list[ShardedOptimizer] = []
        for one in groups:
            part = _part(dict(one), ranks, memory, speed)
            if sums_gradients:
                part.take_gradients_from(StepReducer(part.pieces, ranks))
            self._parts.append(part)
        # The parts' own groups, not copies: a scheduler that changes them reaches the parts.
        super().__init__([inner for part in self._parts for inner in part.param_groups], {})
        self._is_made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            raise ValueError("MuonAdamW cannot take more params: make it again with all of them")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = called(closure)
        for part in self._parts:
            part.start()
        sent = [works for part in self._parts for works in part.update()]
        for works in sent:
            works.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for part in self._parts:
            found = part.state_dict()
            state |= {first + place: one for place, one in found["state"].items()}
            groups += [{**one, "params": [first + place for place in one["params"]]} for one in found["param_groups"]]
            first += sum(len(one["params"]) for one in found["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        first = 0
        for part in self._parts:
            own = [groups.pop(0) for _ in part.param_groups]
            many = sum(len(one["params"]) for one in own)
            state = {place - first: one for place, one in state_dict["state"].items() if first <= place < first + many}
            part.load_state_dict({"state": state, "param_groups": own})
            first += many


def _part(
    one: dict[str, Any], group: Group, memory: Sequence[float] | None, speed: Sequence[float] | None
) -> ShardedOptimizer:
    kind = one.pop("kind", None)
    params: list[nn.Parameter] = list(one.pop("params"))
    if kind == "muon":
        for param in params:
            if param.dim() != 2:
                raise ValueError(f"Muon is for matrices, not for a param of shape {tuple(param.shape)}: use kind adamw")
        return ShardedOptimizer(torch.optim.Muon(params, **one), group, shares=speed, by_tensors=True)
    if kind == "adamw":
        return ShardedOptimizer(AdamW(params, **one), group, shares=memory)
    raise ValueError(f"kind {kind!r} of a group of params must be one of {', '.join(KINDS)}")
