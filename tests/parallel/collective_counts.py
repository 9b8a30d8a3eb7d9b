"""The collectives of one training step, by kind, as PyTorch's own CommDebugMode sees them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from tests.parallel import fsdp_nets, tensor_nets
from uneven.comm.group import Group
from uneven.config import STRATEGIES
from uneven.parallel.catalog import make_strategy
from uneven.parallel.reference import TorchFsdp, TorchReplicated

WRAPS: dict[str, Callable[[nn.Module, Any, Group], Any]] = {
    "torch-ddp": TorchReplicated,
    "torch-zero1": lambda model, make, group: TorchReplicated(model, make, group, is_sharded=True),
    "torch-fsdp": TorchFsdp,
}


def count_all(group: Group) -> dict[str, dict[str, int]]:
    """By strategy, ours on unequal shares with a zero among them."""
    found = {}
    shares = (5.0, 0.0, 2.0)[: group.world_size]
    for name in STRATEGIES:
        model: nn.Module = fsdp_nets.Tower() if name not in ("tensor", "sequence") else Planned()
        found[name] = count(make_strategy(name, model, fsdp_nets.make_adamw, group, shares))
    for name, wrap in WRAPS.items():
        found[name] = count(wrap(fsdp_nets.Tower(), fsdp_nets.make_adamw, group))
    return found


class Planned(tensor_nets.Gpt):
    def tensor_plan(self) -> Any:
        return tensor_nets.PLAN


def count(strategy: Any) -> dict[str, int]:
    """Of the second step: the first one may set up."""
    for _ in range(2):
        with CommDebugMode() as mode:
            loss_of(strategy.module).backward()
            strategy.optimizer.step()
            strategy.optimizer.zero_grad()
    strategy.close()
    return {str(kind).rpartition(".")[2]: many for kind, many in mode.get_comm_counts().items()}


def loss_of(model: nn.Module) -> Tensor:
    if isinstance(model, Planned):
        tokens = tensor_nets.tokens(0)
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    scores: Tensor = model(fsdp_nets.batch(0))
    return scores.square().sum()
