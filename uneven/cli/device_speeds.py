"""How fast each device trains while all train at the same time: `uneven devices --measure`, which loads it on request.

A run of a small network with policy async, in which no device waits for another, on cores of their own.
"""

import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import TensorDataset

from uneven.api.fit import fit
from uneven.bench.models.mnist import make_lenet
from uneven.hardware.device import Device
from uneven.train.callbacks import Callback, CallbackInfo

BATCH_SIZE = 64
BATCHES = 100  # an epoch's
MOST_EPOCHS = 1_000_000


class StopAfter(Callback):
    """Ends the run so many seconds after its start."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end_s = float("inf")

    def on_start(self, info: CallbackInfo) -> None:
        del info
        self._end_s = time.monotonic() + self._seconds

    def on_step(self, info: CallbackInfo) -> None:
        if time.monotonic() >= self._end_s:
            info.stop("measured")


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def measure_devices(devices: Sequence[Device], seconds: float) -> list[float]:
    """Samples/s of every device."""
    samples = BATCH_SIZE * BATCHES
    state = fit(
        model=make_lenet,
        optimizer=torch.optim.Adam,
        step=loss_of,
        dataset=TensorDataset(torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,))),
        batch_size=BATCH_SIZE,
        epochs=MOST_EPOCHS,
        devices=",".join(map(str, devices)),
        policy="async" if len(devices) > 1 else "sync",
        callbacks=[StopAfter(seconds)],
        progress="off",
    )
    timeline = state.timeline
    assert timeline is not None, "of a run that has trained"
    return [
        (lane.samples or 0) / account.training_s
        for lane, account in zip(timeline.lanes, timeline.accounts, strict=True)
    ]
