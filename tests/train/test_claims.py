"""Claims that a thread makes while a rank trains: replies delayed by the test, failures, and the end of the thread.

Real workers on threads. The round trip is said to be 20 ms, so that ranks ask ahead; nothing here is measured.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.loops import make_loop, run_epochs
from tests.ranks import Silent, ThreadGroup, on_threads
from tests.train.exact_runs import OPTIMIZERS, Net, mean_loss
from tests.train.resumed_runs import DATA
from tests.train.resumed_runs import train as train_on
from tests.train.step_runs import EVALUATION
from tests.train.stream_runs import Plain, Shards
from tests.train.stream_runs import train as train_stream
from uneven.config import Evaluation, Task, resolve
from uneven.hardware.device import parse_devices
from uneven.launch.training import collect
from uneven.policy.finish import Cost
from uneven.policy.slot_schedule import SlotSchedule
from uneven.results.checkpoint import read_checkpoint
from uneven.results.state import TrainedState
from uneven.timeline.record import Recorder
from uneven.train import policies as claims_module
from uneven.train.policies import SlotClaims
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.worker import Worker

THREAD = "uneven-claims"
ASYNC = {"policy": "async", "batch_size": 8, "anchor": 50, "lr_scale": 1.0, "seed": 3}  # 9 slots an epoch
Claim = Callable[[int], int]


@pytest.fixture(autouse=True)
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one speed, 20 ms from the store."""
    monkeypatch.setattr("uneven.train.worker.measure", lambda _: Cost(0.0, 1.0))
    monkeypatch.setattr(SlotClaims, "trip_ms", property(lambda _: 20.0))
    _before[:] = claim_threads()


_before: list[threading.Thread] = []  # of other tests in this process


def claim_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD and thread not in _before]


class HeldReply:
    """The first claim that rank 0 asks for ahead is counted at once, and answered when rank 1 is in the event's round.

    Rank 1 claims nothing before that claim is counted, and all the rest up to the event afterwards.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_counted, self.is_answered = threading.Event(), threading.Event()
        self.held: list[int] = []
        enter = SlotSchedule.enter

        def watched(schedule: SlotSchedule) -> None:
            if schedule.rank == 1 and schedule.windows.due == schedule.windows.event:
                self.is_answered.set()
            enter(schedule)

        monkeypatch.setattr(SlotSchedule, "enter", watched)

    def join(self, group: ThreadGroup) -> ThreadGroup:
        count_on: Claim = group.claim

        def claim(count: int) -> int:
            if group.rank == 1:
                assert self.is_counted.wait(60)
                return count_on(count)
            first = count_on(count)
            if threading.current_thread().name == THREAD and not self.held:
                self.held += range(first, first + count)
                self.is_counted.set()
                assert self.is_answered.wait(60), "rank 1 did not get to the event"
            return first

        group.claim = claim  # type: ignore[method-assign]
        return group


def train(
    held: HeldReply | None, evaluation: Evaluation | None = None, change: Callable[[ThreadGroup], Any] = id, **more: Any
) -> tuple[TrainedState, list[list[tuple[int, int, int]]]]:
    """The state of a whole run on two ranks, checked to be exactly once, and the parts that each has trained."""
    config = resolve({**ASYNC, "epochs": 2, **more})
    logs: list[list[tuple[int, int, int]]] = [[], []]

    def rank(group: ThreadGroup) -> TrainedState:
        task = Task(partial(Net, torch.float64), OPTIMIZERS["sgd"], mean_loss, DATA, None, evaluation)
        info = RankInfo(group.rank, parse_devices(["cpu", "cpu"]))
        change(group)
        worker = Worker(task, config, info, lambda _: group if held is None else held.join(group), Requests(), Silent())
        result = worker.train()
        logs[group.rank] = result.log
        return collect(group, result, worker.axis)

    return on_threads(2, rank)[0], logs


@pytest.mark.parametrize("kind", ["evaluation", "checkpoint", "end"])
def test_a_reply_is_delayed_until_the_others_are_at_the_event(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    event = {"evaluation": 9, "checkpoint": 5, "end": 18}[kind]
    options: dict[str, Any] = {
        "evaluation": {"evaluation": EVALUATION},
        "checkpoint": {"save_every": "5 steps", "out": tmp_path},
        "end": {},
    }[kind]
    held = HeldReply(monkeypatch)
    state, (own, others) = train(held, **options)
    assert state.finished
    assert held.held, "nothing was asked for ahead"
    inside = [slot for slot in held.held if slot < event]
    assert inside, "the reply has to bring slots of before the event"
    assert set(inside) <= {slot for slot, _, _ in own}
    assert not set(inside) & {slot for slot, _, _ in others}
    dues = [[due for due, *_ in rounds] for rounds in state.rounds]
    assert dues[0] == dues[1]
    assert event in dues[0]
    assert dues[0] == sorted(set(dues[0])), "a rank has entered the event's round with slots to come"
    assert not claim_threads()
    if kind == "evaluation":
        assert [entry["epoch"] for entry in state.history] == [1, 2]
        assert all(entry["loss"] > 0 for entry in state.history)
    if kind == "checkpoint":
        checkpoint = read_checkpoint(tmp_path / "step-5")
        trained = sorted(part[0] for rank in checkpoint.ranks for part in rank.record["log"])
        assert trained == list(range(5)), "every slot before the checkpoint, once, and none after it"
        again = train_on(
            3, make_model=partial(Net, torch.float64), resume=tmp_path / "step-5", **{**ASYNC, "epochs": 2}
        )
        assert again.finished


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all claims that were asked for ahead."""
    sizes: list[int] = []
    ask = SlotClaims.ask

    def noted(claims: SlotClaims, count: int) -> None:
        sizes.append(count)
        ask(claims, count)

    monkeypatch.setattr(SlotClaims, "ask", noted)
    return sizes


def test_own_loops_ask_ahead_and_leave_out_what_a_late_reply_brings(asked: list[int]) -> None:
    """Epochs of the user's own loop are events: claims are kept, awaited and dropped at each of them."""

    def rank(group: ThreadGroup) -> TrainedState:
        changes = {"policy": "async", "batch_size": 4, "global_batch_size": None, "anchor": 5, "epochs": 3}
        with make_loop(group, **changes) as loop:
            run_epochs(loop, range(1))
            for epoch in (1, 2):
                for number, (x, y) in enumerate(loop.batches(epoch)):
                    if epoch == 1 and number == 2:
                        loop.skip_rest()
                        break
                    loop.step(mean_loss(loop, (x, y)))
        return loop.finish()

    states = on_threads(2, rank)
    assert states[0].finished
    assert asked, "nobody asked ahead"
    assert not claim_threads()


@pytest.mark.parametrize("source", [Plain, Shards])
def test_streams_ask_ahead(source: Any, asked: list[int]) -> None:
    """Their feeds read ahead, and the end of a plain one is known to nobody."""
    train_stream(2, source(), policy="async", batch_size=4, anchor=5, epochs=3)
    assert asked, "nobody asked ahead"
    assert not claim_threads()


def test_a_store_that_fails_in_the_thread_ends_the_training_thread() -> None:
    def breaks(group: ThreadGroup) -> None:
        count_on: Claim = group.claim

        def claim(count: int) -> int:
            if threading.current_thread().name == THREAD:
                raise ConnectionError("the store is gone")
            return count_on(count)

        group.claim = claim  # type: ignore[method-assign]

    with pytest.raises(ConnectionError, match="the store is gone"):
        train(None, change=breaks)
    assert not claim_threads()


# The thread by itself


class Store:
    """A counter whose answers wait for `free`."""

    def __init__(self) -> None:
        self.free, self.number = threading.Event(), 0
        self.free.set()

    def claim(self, count: int) -> int:
        first, self.number = self.number, self.number + count
        assert self.free.wait(60)
        return first


def test_waiting_is_communication_on_the_timeline_and_no_work_of_the_ranks() -> None:
    now = [0]
    recorder, store = Recorder(clock=lambda: now[0]), Store()
    claims = SlotClaims(store, recorder)
    recorder.enter("data")
    assert claims.claim(3) == 0
    claims.ask(2)
    thread = claim_threads()[0]
    claims._on_its_way.done.wait(60)  # type: ignore[union-attr]
    before = recorder.spans()
    assert claims.is_there()
    assert claims.take() == 3
    assert recorder.spans() == before, "a reply that is there costs nothing"
    store.free.clear()
    claims.ask(1)
    assert not claims.is_there()
    began = threading.Event()

    def note(enter: Any = recorder.enter) -> Any:
        def entered(state: Any, at_ns: int | None = None) -> int:
            found: int = enter(state, at_ns)
            if state == "communication":
                now[0] += 5_000_000
                store.free.set()
                began.set()
            return found

        return entered

    recorder.enter = note()  # type: ignore[method-assign]
    assert claims.take() == 5
    assert began.is_set()
    assert claims.take_waited_ns() == 5_000_000
    assert claims.take_waited_ns() == 0, "each wait once"
    assert recorder.state == "data"
    claims.close()
    claims.close()
    assert not thread.is_alive()


def test_near_the_store_there_is_no_thread() -> None:
    claims = SlotClaims(Store(), Recorder())
    assert [claims.claim(count) for count in (3, 1, 2)] == [0, 3, 4]
    assert not claim_threads()
    claims.close()


def test_closing_does_not_wait_for_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "CLOSE_S", 0.01)
    store = Store()
    store.free.clear()
    claims = SlotClaims(store, Recorder())
    claims.ask(1)
    thread = claim_threads()[0]
    claims.close()
    assert thread.is_alive()
    assert thread.daemon, "it must not hold up the end of the process"
    store.free.set()
    thread.join(60)
    assert not thread.is_alive()


def test_the_first_claim_connects_and_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = [0]
    took_ms = iter([900, 20, 30, 40])

    class Slow:
        def claim(self, count: int) -> int:
            now[0] += next(took_ms) * 1_000_000
            return count

    claims = SlotClaims(Slow(), Recorder(clock=lambda: now[0]))
    found = []
    for _ in range(4):
        claims.claim(1)
        found.append(claims.trip_ms)
    assert found == [0.0, 20.0, 20.0, 30.0]
