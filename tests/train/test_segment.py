"""Training in segments, on threads: real workers, a few milliseconds each; no time is asserted."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import Silent, ThreadGroup, on_threads
from uneven.config import RunConfig, Task
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.step.eager import DerivedStep, EagerStep
from uneven.train.requests import Requests
from uneven.train.segment import Segment, train_in_segments
from uneven.train.worker import RankInfo, Worker

SAMPLES, BATCH = 90, 8


def make_worker(group: ThreadGroup, policy: str, epochs: int = 10**6) -> Worker:
    generator = torch.Generator().manual_seed(0)
    data = TensorData(torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 1, generator=generator))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    task = Task(lambda: nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.01), step, data)
    config = RunConfig(batch_size=BATCH, epochs=epochs, policy=policy)
    rank_info = RankInfo(group.rank, parse_devices(["cpu"] * group.world_size))
    return Worker(task, config, rank_info, lambda _: group, Requests(), Silent())


@pytest.mark.parametrize("policy", ["sync", "balanced", "cadence", "async"])
def test_segments_continue_each_other_and_report_no_epochs(policy: str) -> None:
    def rank(group: ThreadGroup) -> tuple[list[Segment], list[tuple[int, int, int]], Worker]:
        worker = make_worker(group, policy)
        with train_in_segments(worker, "policy", "solo") as trainer:
            segments = []
            for _ in range(4):  # more slots than an epoch has
                segments.append(trainer.joint.run(0.0))
                before = [param.clone() for param in worker.engine.model.parameters()]
                trainer.reference.run(0.0)
                assert all(map(torch.equal, before, worker.engine.model.parameters())), "solo has a model of its own"
            assert trainer.all_gather(float(trainer.rank)) == [0.0, 1.0]
        return segments, worker.engine.state.log, worker

    first, second = on_threads(2, rank)
    parts = sorted((slot, start, samples) for _, log, _ in (first, second) for slot, start, samples in log if samples)
    trained = [slot for slot, _, _ in parts]
    assert set(trained) == set(range(max(trained) + 1)), "no slot is left out between two segments"
    assert len(set(parts)) == len(parts), "and none is trained twice"
    slots_per_epoch = first[2].axis.slots_per_epoch
    assert max(trained) > slots_per_epoch
    assert first[2].history == [], "epochs ended inside segments without an evaluation or a report"
    for mine, yours in zip(first[0], second[0], strict=True):
        assert mine.speed + yours.speed > 0, "of one rank it may be 0: a share may be empty"


def test_a_local_policy_ends_its_segments_with_a_round_of_all_ranks() -> None:
    def rank(group: ThreadGroup) -> list[tuple[int, int]]:
        worker = make_worker(group, "cadence")
        with train_in_segments(worker, "policy", "solo") as trainer:
            found = []
            for _ in range(3):
                segment = trainer.joint.run(0.0)
                found.append((worker.engine.state.trained, len(segment.rounds)))
        return found

    first, second = on_threads(2, rank)
    assert first == second
    assert [trained for trained, _ in first] == sorted({trained for trained, _ in first})
    assert all(rounds >= 1 for _, rounds in first)


def test_a_worker_trains_with_the_step_that_it_was_given() -> None:
    class CountingStep(DerivedStep):
        calls = 0

        def forward_backward(self, *args: Any, **settings: Any) -> Any:
            CountingStep.calls += 1
            return super().forward_backward(*args, **settings)

    def make_step(worker: Worker) -> EagerStep:
        own = worker.engine.step
        step = CountingStep(own)
        step.reducer = own.reducer
        return step

    def rank(group: ThreadGroup) -> tuple[int, bool]:
        worker = make_worker(group, "sync", epochs=1)
        result = worker.train(make_step=make_step)
        return worker.axis.total, result.state.finished

    (slots, is_finished), _ = on_threads(2, rank)
    assert is_finished
    assert CountingStep.calls == 2 * slots
