"""What a loop of the user's own shows of its run: model, optimizer, device, rank, and how far it is."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from uneven.api.batch_steps import BatchSteps
from uneven.results.state import TrainedState
from uneven.step.several import OptimizerGroup
from uneven.train.synchronizer import Synchronizer
from uneven.train.worker import Worker


class LoopView:
    """The read-only part of Loop (api/loop.py)."""

    worker: Worker
    _steps: BatchSteps
    _state: TrainedState | None

    @property
    def _synchronizer(self) -> Synchronizer:
        """Of the present generation of ranks."""
        assert self.worker.synchronizer is not None, "made when the group has formed"
        return self.worker.synchronizer

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

    @property
    def sync_gradients(self) -> bool:
        """Whether the present batch is the last of its step: with accumulate=k only there the optimizer steps."""
        return self._steps.is_last

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model, in the run's precision."""
        with self.autocast():
            return self.worker.engine.model(*inputs, **named)

    def autocast(self) -> AbstractContextManager[Any]:
        """The run's precision, around a forward that is not `ddp(x)`."""
        return self.worker.engine.eager.precision.region()
