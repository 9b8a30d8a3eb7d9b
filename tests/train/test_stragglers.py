"""A device that becomes too slow to help, in a whole run: left out, tried again, told of; and the result is exact."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import Silent, ThreadGroup, on_threads
from uneven.config import Task, resolve
from uneven.data.sample_order import prove_exactly_once
from uneven.data.tensors import TensorData
from uneven.hardware.device import parse_devices
from uneven.policy.axis import Axis, Part
from uneven.policy.exact import Balanced
from uneven.policy.finish import Cost
from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Windows
from uneven.timeline.record import Recorder
from uneven.train.local_sgd import LocalSGD
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.requests import Requests
from uneven.train.synchronizer import MOST_LINES, Stragglers
from uneven.train.worker import Worker

USUAL = Cost(5.0, 0.2)
SLOW = range(20, 80)  # steps in which rank 1 is ten times slower
generator = torch.Generator().manual_seed(0)
X = torch.randn(130 * 16, 6, generator=generator, dtype=torch.float64)
Y = torch.randint(0, 3, (len(X),), generator=generator)


def make_model() -> nn.Module:
    model = nn.Linear(6, 3).double()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model


def train(size: int, batch_size: int, policy: str = "balanced") -> tuple[list[RankResult], list[str]]:
    config = resolve({"batch_size": batch_size, "epochs": 1, "seed": 3, "policy": policy})
    task = Task(
        make_model,
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        TensorData(X, Y),
    )
    said: list[str] = []

    class Said(Silent):
        def say(self, lines: Sequence[str]) -> None:
            said.extend(lines)

    def rank(group: ThreadGroup) -> RankResult:
        info = RankInfo(group.rank, parse_devices(["cpu"] * size))
        report = Said() if group.rank == 0 else Silent()
        return Worker(task, config, info, lambda _: group, Requests(), report).train()

    results = on_threads(size, rank)
    axis = Axis(len(X), config.slot_size(size), 1)
    prove_exactly_once(axis, [result.log for result in results], axis.total)
    return results, said


def test_balanced_leaves_out_a_straggler_says_so_once_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Balanced.note

    def on_a_simulated_cluster(self: Balanced, slot: int, samples: int, busy_ms: Sequence[float]) -> Any:
        self.costs = (USUAL, USUAL)
        shares = self.shares(slot, samples)
        busy = [USUAL.time_ms(share) * (10.0 if rank and slot in SLOW else 1.0) for rank, share in enumerate(shares)]
        return note(self, slot, samples, busy)

    monkeypatch.setattr(Balanced, "note", on_a_simulated_cluster)
    results, said = train(2, 8)
    told = [line for line in said if line.lstrip().startswith("rank 1 (cpu)")]
    assert ["left out" in line for line in told] == [True, False], said
    assert "takes part from step" in told[1]
    events = [event for event in results[1].timeline.events if event.kind == "straggler"]
    assert [event.fields["change"] for event in events] == ["left out", "back"]
    out, back = (event.fields["slot"] for event in events)
    assert SLOW.start < out <= SLOW.start + 20
    assert SLOW.stop < back < SLOW.stop + 50
    own = {slot: samples for slot, _, samples in results[1].log}
    assert sum(own.get(slot, 0) > 0 for slot in range(out, SLOW.stop)) <= 2, "probes alone"
    assert own[back] > 0
    assert not [event for event in results[0].timeline.events if event.kind == "straggler"], "in its own lane alone"
    monkeypatch.undo()
    alone, _ = train(1, 16)
    for name, value in alone[0].state.params.items():
        torch.testing.assert_close(results[0].state.params[name], value, rtol=1e-12, atol=1e-12)


def test_cadence_hands_over_the_slots_of_a_straggler_and_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs: every slot once (in `train`), replicas equal, and no slot waits for the rank that is late."""
    step = LocalSGD._step
    returned: list[float] = []
    merged = Windows.note

    def on_a_simulated_device(self: LocalSGD, part: Part, micros: Any) -> float:
        before, is_slow = self.tally.busy_ms, self.engine.rank_info.rank == 1 and part.slot.index >= 60
        step(self, part, micros)
        self.tally.busy_ms = before + (1000.0 if is_slow else 10.0)
        return 1000.0 if is_slow else 10.0

    def listen(self: Windows, reports: Sequence[RoundReport]) -> Any:
        returned.append(sum(report.returned for report in reports))
        return merged(self, reports)

    monkeypatch.setattr(LocalSGD, "_step", on_a_simulated_device)
    monkeypatch.setattr(Windows, "note", listen)
    results, said = train(2, 8, "cadence")
    assert max(returned) > 0, "nothing changed hands"
    told = [line for line in said if line.lstrip().startswith("rank 1 (cpu)")]
    assert "left out" in told[0]
    slow = [slot for slot, _, _ in results[1].log if slot >= 60]
    assert len(slow) < 20, "its slots were trained by the other"
    for name, value in results[0].state.params.items():
        assert torch.equal(results[1].state.params[name], value)


def test_a_rank_at_the_edge_of_use_is_told_of_a_few_times() -> None:
    devices = parse_devices(["cpu", "cpu", "cpu"])
    recorder = Recorder(1, lambda: 0)
    stragglers = Stragglers(recorder, RankInfo(1, devices), (4, 4, 0))
    lines = stragglers.follow(0, (5, 3, 0))
    assert lines == [], "a rank without samples from the start is no straggler"
    for slot in range(1, 21):
        lines += stragglers.follow(slot, (4, slot % 2 * 4, 0))
        assert stragglers.follow(slot, (5, slot % 2 * 3, 0)) == [], "nothing new"
    assert len(lines) == 2 * MOST_LINES
    assert [event.kind for event in recorder.events] == ["straggler"] * 19
    assert stragglers.follow(21, (4, 4, 4)) == []
    assert len(stragglers.follow(22, (4, 4, 0))) == 1
