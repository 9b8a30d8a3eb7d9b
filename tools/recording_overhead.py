"""Measure the overhead of recording on a training step: the same loop with and without it, in one process.

Usage: python tools/recording_overhead.py [ROUNDS] [SECONDS]     (default: 30 rounds of 3 segments of 0.5 s)

Each round runs a segment without recording (a recorder that does nothing), one with the recorder, and one with the
recorder and the sampler, in an order that rotates with every round. Prints for each step size the paired ratio of the
step time to that without recording, with its 95 % interval. 1.01 is 1 % slower.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from uneven.bench.interval import interval
from uneven.comm.group import SoloGroup
from uneven.config import Task, resolve
from uneven.data.feed import Micros
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.launch.run_status import RankReport
from uneven.policy.axis import Part
from uneven.results.progress import Reporter
from uneven.timeline.record import Recorder, State
from uneven.timeline.sample import Sampler
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

MODES = ("off", "recorder", "recorder and sampler")
SIZES = {"small": (8, 16), "large": (256, 512)}  # (batch size, width of the model)
FEATURES, CLASSES, SAMPLES = 64, 10, 65_536


class SilentRecorder(Recorder):
    """A recorder that does nothing."""

    def enter(self, state: State, at_ns: int | None = None) -> int:
        del state, at_ns
        return 0

    def event(self, kind: str, **fields: Any) -> None: ...


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


class Loop:
    """A training run of a single rank that can be advanced in segments."""

    def __init__(self, batch_size: int, width: int) -> None:
        def make_model() -> nn.Module:
            hidden = (nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            return nn.Sequential(*hidden, nn.Linear(width, CLASSES))

        torch.manual_seed(0)
        data = TensorData(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))
        config = resolve({"batch_size": batch_size, "epochs": 100_000, "devices": "cpu", "progress": "off"})
        task = Task(make_model, lambda params: torch.optim.SGD(params, lr=0.01), loss, data)
        rank_info = RankInfo(0, parse_devices("cpu"))
        report = RankReport("cpu", Reporter("off"))
        self._worker = Worker(task, config, rank_info, lambda _: SoloGroup(), Requests(), report)
        self._trainer = self._worker.prepare()
        self._recorders = {"off": SilentRecorder(), "on": self._worker.recorder}
        self._stream: Iterator[tuple[Part, Micros]] = iter(self._worker.engine.feed.stream(self._trainer.parts()))

    def step_us(self, mode: str, seconds: float) -> float:
        """Train for about `seconds`; returns the mean time of a step in us."""
        worker = self._worker
        worker.recorder = worker.engine.recorder = self._recorders["off" if mode == "off" else "on"]
        sampler = Sampler() if "sampler" in mode else None
        if sampler is not None:
            sampler.start()
        self._trainer.reset_timer()
        steps, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            part, micros = next(self._stream)
            worker.train_part(self._trainer, part, micros)
            worker.recorder.enter("data")
            steps += 1
        if sampler is not None:
            sampler.stop()
        return 1e6 * (now - began) / steps


def main(rounds: int, seconds: float) -> None:
    for name, (batch_size, width) in SIZES.items():
        loop = Loop(batch_size, width)
        for mode in MODES:
            loop.step_us(mode, seconds)  # warm-up of kernels, allocator and caches: not counted
        times_us: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(rounds):
            for place in range(len(MODES)):
                mode = MODES[(turn + place) % len(MODES)]
                times_us[mode].append(loop.step_us(mode, seconds))
        print(f"{name} step (batch {batch_size}, {rounds} rounds): {min(times_us['off']):,.0f} us without recording")
        for mode in MODES[1:]:
            mean, half = interval([on / off for on, off in zip(times_us[mode], times_us["off"], strict=True)])
            print(f"  {mode}: {mean:.4f} +- {half:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = sys.argv[1:3]
    main(int(arguments[0]) if arguments else 30, float(arguments[1]) if arguments[1:] else 0.5)
