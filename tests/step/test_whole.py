"""Steps of several ranks as one graph each, with the sum inside: the same runs as one process, by the same decisions.

On CPU a stand-in for the graph runs the captured function anew; NCCL and its graphs are in test_whole_cuda.py.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import OneCycleLR

from tests.ranks import Silent, ThreadGroup, on_threads
from tests.step.test_captured import captures as captures
from tests.train.test_gradient_sync import OPTIMIZERS, Net, X, Y, assert_exact, loss_and_count, train
from uneven import TensorData
from uneven.config import Task, resolve
from uneven.errors import InputError, RankError
from uneven.hardware.device import parse_devices
from uneven.policy.exact import Balanced, Move
from uneven.step.capture import Capture, InputMicros
from uneven.step.finite import OwnCheck, find_fault, judge, total_count
from uneven.step.whole import Times, WholeStep
from uneven.train.capture_ahead import around_split
from uneven.train.rank_info import RankInfo, RankResult
from uneven.train.worker import Worker

T = TypeVar("T")
NAN, INF = float("nan"), float("inf")


class OnCpu(Capture):
    """A record computes nothing; a replay runs what was recorded on the fixed inputs."""

    alive: int
    is_refused: Callable[[], bool]

    def record(self, run: Callable[[InputMicros], T], beside: Capture | None = None) -> T:
        if OnCpu.is_refused():
            raise InputError("operation not permitted when stream is capturing")
        self._run: Any = run
        OnCpu.alive += 1
        return None  # type: ignore[return-value]

    def replay(self, inputs: InputMicros) -> None:
        self._copy_inputs(inputs)
        self._run(self.inputs)

    def close(self) -> None:
        OnCpu.alive -= 1


class HostMoments:
    """Milliseconds that a test can tell from any others."""

    def began(self) -> None:
        self._ns = time.perf_counter_ns()

    def own_done(self) -> None: ...
    def summed(self) -> None: ...
    def ended(self) -> None: ...

    def read(self) -> Times:
        return Times(1000.0, 100.0, 10.0)


@pytest.fixture
def replays(captures: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The steps that each rank replayed, by the names of its threads' groups."""
    found: dict[str, list[Any]] = {}
    OnCpu.alive, OnCpu.is_refused = 0, lambda: False
    monkeypatch.setattr("uneven.step.whole.Capture", OnCpu)
    monkeypatch.setattr("uneven.step.whole.Moments", HostMoments)
    monkeypatch.setattr(ThreadGroup, "pretends_nccl", True)
    call = WholeStep.__call__

    def counted(self: WholeStep, key: Any, *args: Any) -> Any:
        found.setdefault(threading.current_thread().name, []).append(key)
        return call(self, key, *args)

    monkeypatch.setattr(WholeStep, "__call__", counted)
    return found


def check_replays(replays: dict[str, list[Any]], ranks: int) -> list[Any]:
    """All ranks replayed the same steps; NCCL would hang otherwise. Nothing is left when the group closes."""
    assert len(replays) == ranks
    first, *others = replays.values()
    assert all(other == first for other in others)
    assert OnCpu.alive == 0
    return first


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sync"},
        {"policy": "sync", "optimizer": "adamw"},
        {"policy": "balanced"},
        {"shares": (3, 0, 1)},
        {"policy": "sync", "accumulate": 3, "max_grad_norm": 0.1},
        {"shares": (5, 2, 1), "step": loss_and_count},
        {"shares": (1, 0, 0), "step": loss_and_count, "bucket_mb": 0.0001},
    ],
)
def test_runs_of_three_ranks_equal_one_process(options: dict[str, Any], replays: dict[str, list[Any]]) -> None:
    """Tail slots of 70 samples in slots of 24, an unused layer, weight decay, ranks without samples."""
    alone = {name: options[name] for name in ("step", "optimizer", "max_grad_norm") if name in options}
    dense = train(1, global_batch_size=24, epochs=3, **alone)[0]
    ours = train(3, compile="graph", global_batch_size=24, epochs=3, **options)
    assert_exact(ours, dense, options.get("optimizer", "sgd"), torch.float64)
    for mine, reference in zip(ours[2].state.history, dense.state.history, strict=True):
        assert mine["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-9)
    steps = check_replays(replays, 3)
    if options.get("policy") != "balanced":
        assert len(steps) == 9, "all of them, tails too"


def move_shares(patch: pytest.MonkeyPatch) -> None:
    """Slots of 32, 32 and 6 samples in every epoch; shares move in the middle of one, to a split that was captured
    ahead, and twice to one that was not: it is captured when the epoch has ended."""
    plan = {0: (16, 16), 4: (20, 12), 7: (24, 8), 10: (3, 29)}

    def shares(self: Balanced, slot: int, samples: int) -> tuple[int, ...]:
        return next(plan[start] for start in sorted(plan, reverse=True) if start <= slot) if samples == 32 else (6, 0)

    patch.setattr(Balanced, "shares", shares)
    patch.setattr(Balanced, "note", lambda *_: None)


def test_shares_that_move_stay_exact(replays: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    move_shares(monkeypatch)
    ours = train(2, compile="graph", policy="balanced", batch_size=16, epochs=5)
    assert_exact(ours, train(1, batch_size=32, epochs=5)[0], "sgd", torch.float64)
    steps = check_replays(replays, 2)
    assert len(steps) == 15 - 2, "all but the first of the two new splits"
    assert {split for split, samples in steps if samples == 32} == {(16, 16), (20, 12), (24, 8), (3, 29)}


def test_the_splits_around_the_present_one_are_those_of_all_ranks() -> None:
    assert around_split((40, 24)) == [(16, 48), (56, 8), (24, 40), (48, 16), (32, 32), (40, 24)]
    assert around_split((64, 0)) == [(64, 0)]
    assert around_split((40, 16, 8)) == [(40, 16, 8)]


def run(poisoned: tuple[int, ...] = (), stop_at: int | None = None, **changes: Any) -> list[RankResult]:
    """Two ranks; samples whose loss is NaN; rank 1 is asked to stop after a slot."""
    x = X.double().clone()
    x[list(poisoned)] = NAN
    config = resolve({"batch_size": 8, "epochs": 3, "policy": "sync", **changes})
    task = Task(lambda: Net(torch.float64), OPTIMIZERS["sgd"], loss_and_count, TensorData(x, Y))

    def rank(group: ThreadGroup) -> RankResult:
        stop = threading.Event()
        worker = Worker(task, config, RankInfo(group.rank, parse_devices("cpu,cpu")), lambda _: group, stop, Silent())
        record = worker.engine.record_part

        def record_part(part: Any, *rest: Any) -> Any:
            if group.rank == 1 and part.slot.index == stop_at:
                stop.set()
            return record(part, *rest)

        worker.engine.record_part = record_part  # type: ignore[method-assign]
        return worker.train()

    return on_threads(2, rank)


def test_steps_that_are_not_finite_leave_no_trace(replays: dict[str, list[Any]]) -> None:
    """Found on the device, by both ranks alike, from the check of one of them."""
    ours, eager = run((3, 60), compile="graph"), run((3, 60))
    check_replays(replays, 2)
    for mine, right in zip(ours, eager, strict=True):
        assert mine.dropped == right.dropped
        assert mine.run.history[-1]["dropped"] > 0
        for name, value in mine.state.params.items():
            torch.testing.assert_close(value, right.state.params[name], rtol=1e-12, atol=1e-12)
        assert mine.run.history[-1]["train_loss"] == pytest.approx(right.run.history[-1]["train_loss"], rel=1e-12)
    events = [event.fields for event in ours[0].timeline.events if event.kind == "dropped"]
    assert {fields["by"] for fields in events} <= {0, 1}
    assert all("nan" in fields["cause"] for fields in events)


def test_all_ranks_stop_after_the_same_slot(replays: dict[str, list[Any]]) -> None:
    results = run(stop_at=6, compile="graph")
    check_replays(replays, 2)
    assert [result.log[-1][0] for result in results] == [7, 7], "rank 0 hears of it with the next sum"


def test_where_one_rank_cannot_capture_none_does(
    replays: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda _, lines: said.extend(lines))
    refusing: list[str] = []  # the first thread that asks
    OnCpu.is_refused = lambda: (
        threading.current_thread().name in refusing
        or not (refusing or refusing.append(threading.current_thread().name))
    )
    ours = train(2, compile="graph", policy="sync", batch_size=12)
    assert_exact(ours, train(1, batch_size=24)[0], "sgd", torch.float64)
    assert replays == {}
    assert OnCpu.alive == 0
    told = [line for line in said if "NCCL's sum could not be captured" in line]
    assert len(told) == 2, "once by each rank"
    assert sum("stream is capturing" in line for line in told) == 1, "the reason by the one that failed"


def test_where_one_rank_has_no_events_in_graphs_none_captures_the_sum(
    replays: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of torch on another machine."""
    first = iter([True])
    monkeypatch.setattr("uneven.step.captured.can_time_graphs", lambda: next(first, False))
    ours = train(2, compile="graph", policy="sync", batch_size=12)
    assert_exact(ours, train(1, batch_size=24)[0], "sgd", torch.float64)
    assert replays == {}


def test_what_is_a_constant_in_a_graph_takes_another_way(replays: dict[str, list[Any]]) -> None:
    """OneCycleLR changes momentum in every step: no step is like the captured one."""

    def one_cycle(optimizer: Any, steps: int) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=1 / 16, total_steps=steps + 1)

    ours = train(2, compile="graph", policy="sync", batch_size=12, scheduler=one_cycle)
    assert_exact(ours, train(1, batch_size=24, scheduler=one_cycle)[0], "sgd", torch.float64)
    assert sum(map(len, replays.values())) <= 2, "the first, which has the settings of the capture"


def test_only_the_time_of_a_step_that_was_alike_tells_the_speed(
    replays: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is written before its step: its time is that of the step before, if that was of the same split."""
    noted: list[tuple[int, list[float]]] = []

    def note(self: Balanced, slot: int, samples: int, busy_ms: Any) -> Move | None:
        noted.append((slot, [ms // 1000 for ms in busy_ms]))
        return None

    monkeypatch.setattr(Balanced, "note", note)
    results = train(2, compile="graph", policy="balanced", batch_size=10, epochs=1)
    assert len(check_replays(replays, 2)) == 4
    first = [times for slot, times in sorted(noted) if slot == 0]
    assert first == [[0.0, 0.0]] * 2, "nothing came before"
    like = [times for slot, times in sorted(noted) if slot in (1, 2)]
    assert all(ms >= 1.0 for times in like for ms in times), "own work and update, without the sum"
    tail = [times for slot, times in sorted(noted) if slot == 3]
    assert tail == [[0.0, 0.0]] * 2, "the step before was larger"
    assert all(result.state.params for result in results)


def test_a_device_that_decides_otherwise_is_found(
    replays: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uneven.step.whole.judge", lambda *_: (torch.tensor(False), torch.tensor(1.0)))
    with pytest.raises(RankError, match=r"0 steps were applied on the device, but .* should be 1"):
        train(2, compile="graph", policy="sync")


numbers = st.one_of(st.sampled_from([0.0, 1.0, -1.0, NAN, INF, -INF, 3e38]), st.floats(0, 100, width=32))
rows = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), numbers, numbers, numbers), min_size=1, max_size=4)


@given(rows)
def test_the_device_finds_the_same_faults_as_the_host(found: list[tuple[float, ...]]) -> None:
    checks = [OwnCheck(*row) for row in found]
    limit = torch.finfo(torch.float32).max
    is_good, total = judge(torch.tensor(found, dtype=torch.float64), limit)
    assert bool(is_good) == (find_fault(checks, limit) is None)
    if is_good:
        assert float(total) == (1.0 if (count := total_count(checks)) is None else pytest.approx(count))
