"""DDPBucketed: gradients leave in buckets while backward is still computing the next ones."""

from torch import nn

from uneven.comm.group import Group
from uneven.parallel.replicated import Replicated
from uneven.parallel.strategy import MakeOptimizer


class DDPBucketed(Replicated):
    """Buckets of at most `bucket_mb` (a param that is larger has one of its own); 0 sends every param by itself."""

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: Group, *, bucket_mb: float = 25.0
    ) -> None:
        super().__init__(model, make_optimizer, group, int(bucket_mb * (1 << 20)), overlaps=True)
