"""What a loop of the user's own can be asked about itself; the loop is in api/loop.py."""

import torch
from torch import nn
from torch.optim import Optimizer

from uneven.step.several import OptimizerGroup
from uneven.train.worker import Worker


class LoopFacts:
    """The read-only part of a Loop, which makes the worker."""

    worker: Worker

    @property
    def model(self) -> nn.Module:
        return self.worker.engine.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; of several, all of them as one."""
        return self.worker.engine.optimizer

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By name, or by their places "0", "1", ..."""
        made = self.worker.engine.optimizer
        return dict(made.members) if isinstance(made, OptimizerGroup) else {"0": made}

    @property
    def device(self) -> torch.device:
        return self.worker.engine.device

    @property
    def rank(self) -> int:
        return self.worker.rank_info.rank

    @property
    def world_size(self) -> int:
        return self.worker.rank_info.world_size

    @property
    def epochs(self) -> int:
        """Of this run: `for epoch in range(ddp.epochs)` follows the `--epochs` of `uneven run`, too."""
        return self.worker.config.epochs

    @property
    def global_step(self) -> int:
        """Optimizer steps of the whole run until here; in cadence and async this rank's place on the axis."""
        return self.worker.engine.trained - self.worker.engine.skipped_slots

    @property
    def samples(self) -> int:
        """Samples that all ranks together have trained until `global_step`."""
        return self.worker.engine.samples_before(self.worker.engine.trained)
