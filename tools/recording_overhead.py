"""What recording costs a training step: the same loop with it and without it, in turn, in one process.

Usage: python tools/recording_overhead.py [ROUNDS] [SECONDS]     (default: 30 rounds of 3 segments of 0.5 s)

Each round runs a segment without recording (a recorder that does nothing), one with the recorder, and one with the
recorder and the sampler, in an order that turns with every round. Prints per size of step the paired ratio of the
time of a step to that without recording, with its 95 % interval. 1.01 is 1 % slower.
"""

import sys
import threading
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
from uneven.policy.axis import Part
from uneven.results.progress import Reporter
from uneven.timeline.record import Recorder, State
from uneven.timeline.sample import Sampler
from uneven.train.rank_info import RankInfo
from uneven.train.worker import Worker

WAYS = ("off", "recorder", "recorder and sampler")
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
    """A rank that trains alone, stopped and continued at will."""

    def __init__(self, batch_size: int, width: int) -> None:
        def make_model() -> nn.Module:
            hidden = (nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            return nn.Sequential(*hidden, nn.Linear(width, CLASSES))

        torch.manual_seed(0)
        data = TensorData(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))
        config = resolve({"batch_size": batch_size, "epochs": 100_000, "devices": "cpu", "progress": "off"})
        task = Task(make_model, lambda params: torch.optim.SGD(params, lr=0.01), loss, data)
        rank_info = RankInfo(0, parse_devices("cpu"))
        self._worker = Worker(task, config, rank_info, lambda _: SoloGroup(), threading.Event(), Reporter("off"))
        self._pace = self._worker.prepare()
        self._recorders = {"off": SilentRecorder(), "on": self._worker.recorder}
        self._stream: Iterator[tuple[Part, Micros]] = iter(self._worker.engine.feed.stream(self._pace.parts()))

    def step_us(self, way: str, seconds: float) -> float:
        """Train for about so long; the time of a step."""
        worker = self._worker
        worker.recorder = worker.engine.recorder = self._recorders["off" if way == "off" else "on"]
        sampler = Sampler() if "sampler" in way else None
        if sampler is not None:
            sampler.start()
        self._pace.reset_timer()
        steps, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            part, micros = next(self._stream)
            worker.train_part(self._pace, part, micros)
            worker.recorder.enter("data")
            steps += 1
        if sampler is not None:
            sampler.stop()
        return 1e6 * (now - began) / steps


def main(rounds: int, seconds: float) -> None:
    for name, (batch_size, width) in SIZES.items():
        loop = Loop(batch_size, width)
        for way in WAYS:
            loop.step_us(way, seconds)  # kernels, allocations and caches: this round does not count
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            for place in range(len(WAYS)):
                way = WAYS[(turn + place) % len(WAYS)]
                found[way].append(loop.step_us(way, seconds))
        print(f"{name} step (batch {batch_size}, {rounds} rounds): {min(found['off']):,.0f} us without recording")
        for way in WAYS[1:]:
            mean, half = interval([on / off for on, off in zip(found[way], found["off"], strict=True)])
            print(f"  {way}: {mean:.4f} +- {half:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = sys.argv[1:3]
    main(int(given[0]) if given else 30, float(given[1]) if given[1:] else 0.5)
