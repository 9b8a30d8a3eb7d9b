"""The part of a probe that runs in the rank processes: the user's own model for some seconds, by real steps.

`probe_rank` is the program of every rank (see launch/training.py). It times the rank's own steps with all ranks at work
and with the others idle, then a stretch of joint steps, then one of windows and rounds. Nothing that it trains is kept.
"""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from uneven.comm.gather import gather_json, gather_rows
from uneven.config import RunConfig
from uneven.plan.probe import with_values
from uneven.policy.axis import Part
from uneven.policy.finish import Cost, fitted
from uneven.step.measure import measure_sum_ms
from uneven.train.engine import Engine
from uneven.train.gradient_sync import GradientSync
from uneven.train.local_sgd import LocalSGD
from uneven.train.prepare import capture, warm_up
from uneven.train.rank_info import RankInfo
from uneven.train.segment import LEAST_WINDOWS, GradientSyncSegments, LocalSGDSegments, Segment
from uneven.train.worker import Worker

CHUNKS = 3  # each kind of stretch comes so often, in turn, unless steps are long: the machine's speed drifts
MOST_ALONE = 8  # ranks that are timed with the others idle, one after the other
LEAST_STEPS = 3
ANCHOR = 4  # of the windows that are timed; fewer where steps are long ...
WINDOW_MS = 60.0  # ... and more where they are short: what a round costs beside its sum must not count as slots
MESSAGE = 16  # numbers in a sum that shows the latency
MOST_JITTER = 0.5  # what the simulation takes


@dataclass(frozen=True)
class ProbeOrder:
    """How long to measure, in seconds, and what: `local` is the policy whose rounds are timed, None for none."""

    seconds: float
    local: str | None = None


def probe_rank(order: ProbeOrder, worker: Worker, folder: Path) -> None:
    """The program of every rank; rank 0 leaves probe.json with what all of them found."""
    found: dict[str, Any] = {"began": time.time()}
    with worker.recording():
        own = _Own(worker)
        synchronizer = worker.prepare()
        assert isinstance(synchronizer, GradientSync), "a probe begins with an exact policy"
        found |= own.facts()
        is_alone = worker.rank_info.world_size == 1
        if not is_alone:
            found |= own.time_costs(0.4 * order.seconds)
            found["sum_ms"] = measure_sum_ms(worker.group, worker.engine.model)
            found["latency_ms"] = _latency_ms(worker)
        seconds = order.seconds if is_alone else (0.25 if order.local else 0.6) * order.seconds
        found["exact"] = _probe_exact(worker, synchronizer, own, seconds)
        synchronizer.close()
    if order.local is not None and not is_alone:
        found["local"] = _probe_local(worker, order.local, 0.35 * order.seconds, own.slowest_ms)
    rows = gather_json(worker.group, found)
    if worker.rank_info.rank == 0:
        (folder / "probe.json").write_text(json.dumps(rows))


class _Own:
    """This rank's device by itself, with a model of its own: its steps need no other rank."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # Before the group forms: a captured step must be recorded while nobody waits for this rank.
        alone = RankInfo(0, (worker.rank_info.device,))
        config = own_config(worker.config)
        self.engine = Engine(worker.task, config, alone, worker.recorder)
        warm_up(self.engine)
        self.cost = Cost(0.0, 1.0)
        self.slowest_ms = 0.0  # a step of the slowest rank; the same on all of them
        self.batch = min(config.batch_size * config.accumulate, self.engine.axis.samples)
        self._seen: set[int] = set()  # sizes that have run before

    def facts(self) -> dict[str, Any]:
        engine, worker = self.engine, self._worker
        self._time(self.batch, 0.0)  # a step: the optimizer has its state
        params = list(engine.model.parameters())
        state = [v for s in engine.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        cap = worker.engine.caps[worker.rank_info.rank]
        return {
            "device": str(worker.rank_info.device),
            "threads": torch.get_num_threads(),
            "param_bytes": _bytes(params),
            "gradient_bytes": _bytes([param for param in params if param.requires_grad]),
            "state_bytes": _bytes(state),
            "samples": engine.axis.samples,
            "cap": None if cap == float("inf") else int(cap),
        }

    def time_costs(self, seconds: float) -> dict[str, Any]:
        """Steps of two sizes with all ranks at work, and of the full size with the others idle."""
        worker, batch = self._worker, self.batch
        half = max(min(self.engine.least, batch), batch // 2)
        ranks = worker.rank_info.world_size
        is_timed_alone = ranks <= MOST_ALONE
        kinds = 2 + (ranks if is_timed_alone else 0)
        self._time(half, 0.0)  # whatever is new for that size is done before anybody is timed
        self.slowest_ms = max(_gather(worker, self._time(batch, 0.0)[-1]))
        chunks = max(1, min(CHUNKS, int(seconds * 1e3 / (kinds * LEAST_STEPS * self.slowest_ms))))
        each_s = seconds / chunks / kinds
        whole: list[float] = []
        small: list[float] = []
        alone: list[float] = []
        for _ in range(chunks):
            _barrier(worker)
            whole += self._time(batch, each_s)
            _barrier(worker)
            small += self._time(half, each_s)
            for rank in range(ranks if is_timed_alone else 0):
                _barrier(worker)
                if rank == worker.rank_info.rank:
                    alone += self._time(batch, each_s)
        _barrier(worker)
        means = [(batch, statistics.fmean(whole)), (half, statistics.fmean(small))]
        self.cost = fitted(means)
        return {
            "fixed_ms": self.cost.fixed_ms,
            "sample_ms": self.cost.sample_ms,
            "jitter": relative_deviation(whole),
            "at_once": 1e3 * batch / means[0][1],
            "alone": 1e3 * batch / statistics.fmean(alone or whole),
        }

    def _time(self, samples: int, seconds: float) -> list[float]:
        """ms of steps with so many samples, for so long; reading the batches included."""
        engine, clock = self.engine, self._worker.recorder.clock
        stream = engine.feed.stream(self._parts(samples))
        times: list[float] = []
        part = next(self._parts(samples))
        if not engine.step.is_prepared(part.sizes, samples):
            capture(engine, part)  # eagerly half the samples would seem to take as long as all
        if samples not in self._seen:
            self._step(stream)
            engine.run_ahead.drain()
            self._seen.add(samples)
        began = time.perf_counter()
        while len(times) < LEAST_STEPS or time.perf_counter() - began < seconds:
            step_ns = clock()
            self._step(stream)
            times.append((clock() - step_ns) / 1e6)
        engine.run_ahead.drain()
        # On a GPU the host runs ahead of the device: the whole stretch has the true mean.
        total_ms = (time.perf_counter() - began) * 1e3
        return [ms * total_ms / sum(times) for ms in times]

    def _step(self, stream: Iterator[Any]) -> None:
        engine = self.engine
        began_ns = self._worker.recorder.clock()
        part, micros = next(stream)
        engine.local_step(part, engine.open(micros), began_ns)
        engine.run_ahead.after_step()

    def _parts(self, samples: int) -> Iterator[Part]:
        engine = self.engine
        room = engine.axis.samples - samples
        for index in count():
            slot = engine.axis.slot(index % engine.axis.slots_per_epoch)
            yield Part(slot, min(slot.first, room), samples, engine.micro_batch_size(samples))


def relative_deviation(times: list[float]) -> float:
    """The relative standard deviation of what is typical: a few outliers of a busy machine are not part of it."""
    ordered = sorted(times)
    low, middle, high = (ordered[int(part * (len(ordered) - 1))] for part in (0.16, 0.5, 0.84))
    return min(MOST_JITTER, 0.5 * (high - low) / middle) if middle else 0.0


def _probe_exact(worker: Worker, synchronizer: GradientSync, own: _Own, seconds: float) -> dict[str, Any]:
    """Joint steps: how fast, what a step costs beyond its ranks' work, and how much slower that work is beside sums."""
    segments = GradientSyncSegments(worker, synchronizer)
    segments.run(0.2 * seconds)
    segments.run(0.2 * seconds)  # the shares have settled
    first = len(worker.engine.state.log)
    segment = segments.run(0.6 * seconds)
    counts = [samples for _, _, samples in worker.engine.state.log[first:]]
    rank, is_alone = worker.rank_info.rank, worker.rank_info.world_size == 1
    if is_alone:
        return {"speed": segment.speed, "shares": [], "steps": segment.steps}
    busy_ms = sum(step[rank] for step in segment.busy)
    # Where a share is 0 the rank is busy with nothing but the step around it: that would tell a factor of 100.
    is_busy = sum(samples > 0 for samples in counts) == segment.steps
    return {
        "speed": segment.speed,
        "steps": segment.steps,
        "samples": sum(counts),
        "factor": busy_ms / sum(own.cost.time_ms(samples) for samples in counts) if is_busy else None,
        "longest_ms": sum(max(step) for step in segment.busy) / segment.steps,
        "shares": segment.shares,
    }


def _probe_local(worker: Worker, policy: str, seconds: float, slowest_ms: float) -> dict[str, Any]:
    """Windows and rounds on a model of their own, over the group that the ranks have already formed."""
    # Two or three segments of at least so many windows.
    slot_ms = max(slowest_ms, 1e-3)
    wanted = max(ANCHOR, int(WINDOW_MS / slot_ms))
    anchor = max(1, min(wanted, int(seconds * 1e3 / (2 * LEAST_WINDOWS * slot_ms))))
    config = local_config(worker.config, policy, anchor)
    info, group = worker.rank_info, worker.group
    local = Worker(worker.task, config, info, lambda _: group, worker.requests, worker.report)
    with local.recording():
        synchronizer = local.prepare()
        assert isinstance(synchronizer, LocalSGD), "local policies train by it"
        segments = LocalSGDSegments(local, synchronizer)
        segments.run(0.6 * seconds)
        if anchor == wanted:  # a segment's length is fixed by the one before it, which now knows how long a slot takes
            segments.run(0.6 * seconds)
        segment, samples = _timed_local(local, segments, 0.6 * seconds)
        segments.close()
    waits = [wait for wait, _, _ in segment.rounds]
    own_ms = [transfer - max(0.0, latency - wait) for wait, transfer, latency in segment.rounds]
    spent_ms = sum(wait + transfer for wait, transfer, _ in segment.rounds)
    total_ms = 1e3 * samples / segment.speed if segment.speed else 0.0
    return {
        "speed": segment.speed,
        "slot_ms": max(0.0, total_ms - spent_ms) / segment.steps if segment.steps else 0.0,
        "round_ms": max(0.0, statistics.median(own_ms)) if own_ms else 0.0,
        "average_ms": statistics.median(max(0.0, late - wait) for wait, _, late in segment.rounds) if waits else 0.0,
        "anchor": anchor,
    }


def own_config(config: RunConfig) -> RunConfig:
    """The settings of a rank's steps by itself: nothing that is of all ranks together."""
    return with_values(
        config,
        policy="balanced",
        global_batch_size=None,
        max_global_batch_size=None,
        memory_cap=None,
        shares=None,
    )


def local_config(config: RunConfig, policy: str, anchor: int) -> RunConfig:
    """The settings of a stretch with rounds: short windows, so that some seconds hold many of them."""
    return with_values(
        config,
        policy=policy,
        anchor=anchor,
        max_anchor=anchor,
        global_batch_size=None,
        max_global_batch_size=None,
        memory_cap=None,
        strategy=None,
        bucket_mb=None,
        sync_batchnorm=False,
    )


def _timed_local(worker: Worker, segments: LocalSGDSegments, seconds: float) -> tuple[Segment, int]:
    first = len(worker.engine.state.log)
    segment = segments.run(seconds)
    return segment, sum(samples for _, _, samples in worker.engine.state.log[first:])


def _latency_ms(worker: Worker) -> float:
    times = []
    for _ in range(20):
        began = time.perf_counter()
        worker.group.all_reduce(torch.zeros(MESSAGE)).wait()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _gather(worker: Worker, value: float) -> list[float]:
    return [number for (number,) in gather_rows(worker.group, [value])]


def _barrier(worker: Worker) -> None:
    worker.group.all_reduce(torch.zeros(1)).wait()


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
