"""Ranks that average their params in the background."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tests.ranks import ThreadGroup, on_threads
from uneven.average.background import BackgroundAverage, RoundResult
from uneven.average.buffers import BufferAverage
from uneven.average.replica import Replica
from uneven.average.transport import make_transport
from uneven.comm.group import Group

T = TypeVar("T")


class Side:
    """One rank: a model whose params depend on the rank, and its average over a group of its own."""

    def __init__(
        self,
        group: Group,
        *,
        dtype: torch.dtype = torch.float64,
        make_model: Callable[[], nn.Module] = lambda: nn.Linear(5, 3),
        with_state: bool = False,
        verify: bool = False,
    ) -> None:
        self.rank, self.group = group.rank, group
        torch_random = torch.Generator().manual_seed(group.rank)
        self.model = make_model().to(dtype)
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(torch.randn(param.shape, generator=torch_random, dtype=torch.float64))
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        replica = Replica(self.model, self.optimizer, with_state)
        transport = make_transport(replica, is_nccl=False)
        self.average = BackgroundAverage(replica, transport, BufferAverage(self.model), group, verify)

    @property
    def params(self) -> Tensor:
        """All of them, as they are now."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def work(self, change: Tensor | float) -> None:
        """What training does between two rounds, without the training."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(self.params + change, self.model.parameters())

    def round(self, weight: float, row: Sequence[float] = (), is_unchanged: bool = True) -> RoundResult:
        self.average.start(weight, lambda: row)
        return self.average.finish(is_unchanged)

    def close(self) -> None:
        self.average.close()


def on_ranks(size: int, body: Callable[[Side], T], **options: Any) -> list[T]:
    def rank(group: ThreadGroup) -> T:
        with closing(Side(group.new_group(), **options)) as side:
            return body(side)

    return on_threads(size, rank)
