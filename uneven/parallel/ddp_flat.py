"""DDPFlat: all gradients in one flat buffer, one collective after backward. The plainest there is, without overlap."""

from torch import nn

from uneven.comm.group import Group
from uneven.parallel.buckets import UNLIMITED
from uneven.parallel.replicated import Replicated
from uneven.parallel.strategy import MakeOptimizer


class DDPFlat(Replicated):
    """One buffer for each type and device of params, sent when backward ends."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, group: Group) -> None:
        super().__init__(model, make_optimizer, group, UNLIMITED, overlaps=False)
