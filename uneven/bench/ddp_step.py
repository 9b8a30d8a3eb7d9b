"""A step whose gradients PyTorch's DDP averages, so that whole runs can be compared in one harness."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uneven.errors import InputError
from uneven.parallel.reference import TorchDdp
from uneven.step.eager import EagerStep
from uneven.train.gradient_sync import Row
from uneven.train.worker import Worker

ASK_EVERY = 20  # steps between two questions whether to stop: DDP itself carries no such numbers


class DdpStep:
    """Stands in for the step of a worker that has joined its group."""

    def __init__(self, worker: Worker) -> None:
        self._eager: EagerStep = worker.engine.eager
        self._worker = worker
        if self._eager.reducer is not None:
            self._eager.reducer.close()
        self._ddp = TorchDdp(
            worker.engine.model, worker.engine.optimizer, worker.task.train_step, worker.config.max_grad_norm
        )
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._eager, name)

    def sum_gradients(
        self, batches: Sequence[tuple[Any, int]], slot_samples: int, row: Callable[[], Sequence[float]]
    ) -> tuple[list[list[float]], Tensor | None]:
        if len(batches) != 1:
            raise InputError("torch-ddp needs at least one sample per rank in every step: choose another batch size")
        ((batch, samples),) = batches
        self._worker.engine.optimizer.zero_grad(set_to_none=True)
        loss = self._worker.task.train_step(self._ddp.model, batch)
        self._eager.meter.add(loss.detach() * samples, samples)
        # DDP averages over ranks; a short last slot may be cut into unequal parts, which this makes exact.
        (loss * (samples * self._worker.rank_info.world_size / slot_samples)).backward()
        own = Row(*row())
        self._steps += 1
        asked = (
            float(self._worker.group.all_reduce(torch.tensor([own.word])).wait())
            if self._steps % ASK_EVERY == 0
            else 0.0
        )
        return [list(own._replace(word=asked)) for _ in range(self._worker.rank_info.world_size)], None


def train_with_ddp(worker: Worker, home: Path) -> None:
    """The program of a rank in mode torch-ddp: the worker's own loop, with PyTorch's gradient sum."""

    def take_over(joined: Worker) -> None:
        joined.engine.eager = DdpStep(joined)  # type: ignore[assignment]  # it has all that the worker uses

    worker.after_joining = take_over
    worker.train().save(home, is_lead=worker.rank_info.rank == 0)
