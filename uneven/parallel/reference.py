"""PyTorch's own way, in our harness: the thing to beat. The only file outside comm/ that touches torch.distributed."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from uneven.config import TrainStep


class TorchDdp:
    """DistributedDataParallel with equal batches: gradients averaged over ranks, overlapped with backward.

    The process group must exist and all ranks must bring batches of one size.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, train_step: TrainStep, max_grad_norm: float | None
    ) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = optimizer
        self.train_step = train_step
        self.max_grad_norm = max_grad_norm

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.train_step(self.model, batch)
        loss.backward()
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
