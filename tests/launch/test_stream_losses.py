"""A stream that one rank reads for all, where the process that reads it is killed and may be started again."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.launch.small_runs import SAMPLES, make, make_optimizer, step
from uneven import Callback, TrainedState, fit

KNOWN_S = 1.5  # until the launcher knows that the run can go on


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


class KillReader(Callback):
    """Process 0 kills itself; the run stops once the last of `processes` has trained on for some steps."""

    def __init__(self, folder: Path, last: int) -> None:
        self._killed, self._last = folder / "killed", last
        self._began_s, self._steps = 0.0, 0

    def on_step(self, info: Any) -> None:
        number = int(sys.argv[2])
        time.sleep(0.005)
        self._began_s = self._began_s or time.monotonic()
        if number == 0 and time.monotonic() - self._began_s > KNOWN_S:
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self._last and self._killed.exists():
            self._steps += 1
            if self._steps == 10:
                info.stop("enough")


def train(folder: Path, devices: str, **settings: Any) -> TrainedState:
    last = settings.get("restarts", 0) + devices.count(",")
    return fit(
        model=make, optimizer=make_optimizer, step=step, dataset=Lines(), epochs=100_000, seed=3, progress="off",
        devices=devices, callbacks=[KillReader(folder, last)], **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    "workers", [pytest.param(0, marks=pytest.mark.soak), pytest.param(1, id="in a loader process")]
)
def test_the_process_that_reads_is_killed(workers: int, tmp_path: Path) -> None:
    state = train(tmp_path, "cpu,cpu,cpu", policy="sync", batch_size=4, num_workers=workers)
    assert [len(segment["devices"]) for segment in state.segments] == [3, 2]
    assert sum(state.rank_samples) == state.samples  # each once: a state with gaps is refused
    alone = fit(
        model=make, optimizer=make_optimizer, step=step, dataset=Lines(), batch_size=12, epochs=100_000, seed=3,
        progress="off", devices="cpu", max_steps=state.slot,
    )  # fmt: skip
    assert alone.samples == state.samples
    for name, value in alone.params.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["balanced", "cadence", "async"])
def test_the_one_that_read_joins_again(policy: str, tmp_path: Path) -> None:
    state = train(tmp_path, "cpu,cpu", policy=policy, batch_size=4, restarts=1)
    assert [len(segment["devices"]) for segment in state.segments] == [2, 1, 2]
    assert sum(state.rank_samples) == state.samples
