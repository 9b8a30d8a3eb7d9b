"""The host waits for its device's compute stream, and only where it must."""

import pytest
import torch

from uneven.step.runahead import DEPTH, RunAhead


def test_on_cpu_a_step_is_done_when_it_returns() -> None:
    run_ahead = RunAhead(torch.device("cpu"))
    for _ in range(5):
        run_ahead.after_step()
    run_ahead.catch_up()
    run_ahead.drain()


class Clock:
    """A host and a device whose times the test sets, in ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.device = 1_000_000, 1_000_000
        clock = self

        class Event:
            def __init__(self, **_: bool) -> None:
                self.at = 0

            def record(self, _: object) -> None:
                self.at = max(clock.device, clock.host)

            def query(self) -> bool:
                return self.at <= clock.host

            def synchronize(self) -> None:
                clock.host = max(clock.host, self.at)

            def elapsed_time(self, other: "Event") -> float:
                return (other.at - self.at) / 1e6

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: setattr(clock, "host", max(clock.host, clock.device)))
        monkeypatch.setattr("time.perf_counter_ns", lambda: clock.host)
        monkeypatch.setattr("time.perf_counter", lambda: clock.host / 1e9)

    def step(self, run_ahead: RunAhead, enqueue: int, work: int) -> None:
        began = self.host
        self.host += enqueue
        self.device = max(self.device, began) + work
        run_ahead.after_step(began)


def test_the_devices_work_is_noted_without_gaps_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run_ahead = RunAhead(torch.device("cuda", 0))
    for _ in range(6):
        clock.step(run_ahead, enqueue=1_000, work=10_000)
    run_ahead.drain()
    assert run_ahead.busy == [(1_000_000, 1_060_000)]
    clock.host += 5_000  # an evaluation, say
    for _ in range(3):
        clock.step(run_ahead, enqueue=1_000, work=10_000)
        clock.host += 30_000  # fetching data
    run_ahead.drain()
    assert [end - start for start, end in run_ahead.busy] == [60_000, 10_000, 10_000, 10_000]
    assert run_ahead.behind == 0


def test_one_step_ahead_is_enough_where_enqueuing_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for enqueue, behind in ((1_000, 1), (8_000, DEPTH)):
        clock = Clock(monkeypatch)
        run_ahead = RunAhead(torch.device("cuda", 0))
        for _ in range(40):
            clock.step(run_ahead, enqueue=enqueue, work=10_000)
        assert run_ahead.behind == behind


@pytest.mark.cuda
def test_catching_up_does_not_wait_for_other_streams() -> None:
    run_ahead = RunAhead(torch.device("cuda", 0))
    torch.cuda.synchronize()
    own, others = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(2_000_000_000)  # about a second, as a collective that waits for a rank
        others.record()
    torch.cuda._sleep(50_000_000)
    own.record()
    run_ahead.catch_up()
    assert own.query()
    assert not others.query()
    run_ahead.drain()
    assert others.query()


@pytest.mark.cuda
def test_the_host_is_only_a_few_steps_ahead() -> None:
    run_ahead = RunAhead(torch.device("cuda", 0))
    steps = [torch.cuda.Event() for _ in range(5)]
    for step in steps:
        torch.cuda._sleep(20_000_000)
        step.record()
        run_ahead.after_step()
    assert all(step.query() for step in steps[:-DEPTH])
    run_ahead.drain()
