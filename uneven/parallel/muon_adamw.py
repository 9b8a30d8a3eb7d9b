"""MuonAdamW: Muon for the matrices of a model, AdamW for the rest; the same class on one rank and on many.

Each rank owns part of the work: whole matrices for Muon, shared by speed, because orthogonalising them takes the time;
elements for AdamW, shared by memory. A step has three phases: start to reduce all gradients; group by group, wait for
the sums, update this rank's shards and start to send them; wait for everything sent. So communication of one group
overlaps with the update of another.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from uneven.comm.group import Group, SoloGroup
from uneven.parallel.sharded_optimizer import ShardedOptimizer, call_closure
from uneven.parallel.sharded_reducer import DeferredShardedReducer

KINDS = ("muon", "adamw")


class MuonAdamW(Optimizer):
    """Param groups name their kind: `[{"params": matrices, "kind": "muon", "lr": 0.02}, {"params": rest, "kind":
    "adamw"}]`; their other settings are those of torch.optim.Muon and AdamW.

    `sums_gradients=False` is for gradients that a DDP has summed; otherwise each rank's own, divided by the sample
    count of all ranks, are summed here. `memory` and `speed` are the ranks' shares. `state_dict()` is a collective,
    and its result does not depend on the number of ranks.
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
        self._is_initialized = False
        self._parts: list[ShardedOptimizer] = []
        for settings in groups:
            part = _make_part(dict(settings), ranks, memory, speed)
            if sums_gradients:
                part.take_gradients_from(DeferredShardedReducer(part.flat_shards, ranks))
            self._parts.append(part)
        # The parts' own groups, not copies, so that a scheduler changes the parts' settings.
        super().__init__([inner for part in self._parts for inner in part.param_groups], {})
        self._is_initialized = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_initialized:
            raise ValueError("MuonAdamW cannot take more params: make it again with all of them")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = call_closure(closure)
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
            own = part.state_dict()
            state |= {first + place: values for place, values in own["state"].items()}
            groups += [{**g, "params": [first + place for place in g["params"]]} for g in own["param_groups"]]
            first += sum(len(g["params"]) for g in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        first = 0
        for part in self._parts:
            own = [groups.pop(0) for _ in part.param_groups]
            stop = first + sum(len(settings["params"]) for settings in own)
            state = {place - first: v for place, v in state_dict["state"].items() if first <= place < stop}
            part.load_state_dict({"state": state, "param_groups": own})
            first = stop


def _make_part(
    settings: dict[str, Any], group: Group, memory: Sequence[float] | None, speed: Sequence[float] | None
) -> ShardedOptimizer:
    kind = settings.pop("kind", None)
    params: list[nn.Parameter] = list(settings.pop("params"))
    if kind == "muon":
        for param in params:
            if param.dim() != 2:
                raise ValueError(f"Muon is for matrices, not for a param of shape {tuple(param.shape)}: use kind adamw")
        return ShardedOptimizer(torch.optim.Muon(params, **settings), group, shares=speed, by_tensors=True)
    if kind == "adamw":
        return ShardedOptimizer(AdamW(params, **settings), group, shares=memory)
    raise ValueError(f"kind {kind!r} of a group of params must be one of {', '.join(KINDS)}")
