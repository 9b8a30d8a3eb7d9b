"""How many digits the demo trains: on a slow machine fewer in each mode, and no mode is missing."""

from dataclasses import replace
from typing import Any

import pytest

from uneven.bench.demo import DIGITS, LEAST, DemoOrder, Results, check, fit_length, train_modes
from uneven.bench.models.sets import load_set
from uneven.errors import RankError, StoppedError


class Machine:
    """A machine by its speed on the fast device, and the seconds around each training; its clock does not wait."""

    def __init__(self, speed: float, around_s: float = 4.0) -> None:
        fast, slow = speed, 0.4 * speed
        equal, together = 2 * slow, fast + slow
        self.speeds = {"solo-0": fast, "solo-1": slow, "torch-ddp": equal, "cpu-sync": equal}
        self.speeds |= dict.fromkeys(("cpu-async", "cpu-balanced", "cpu-cadence"), together)
        self.around_s, self.now = around_s, 0.0
        self.trained: list[tuple[str, int | None]] = []

    def clock(self) -> float:
        return self.now

    def train(self, order: DemoOrder, mode: str, limit_s: float) -> dict[str, Any]:
        self.trained.append((mode, order.samples))
        speed = self.speeds[mode]
        seconds = order.epochs * (order.samples or DIGITS) / speed
        self.now += min(seconds + self.around_s, limit_s)
        if seconds + self.around_s > limit_s:
            raise StoppedError("not finished")
        shares = [1.0] if mode.startswith("solo") else [0.7, 0.3]
        quality = {"accuracy": 0.97}
        return {
            "mode": mode,
            "quality": quality,
            "train_seconds": seconds,
            "samples_per_s": speed,
            "sample_shares": shares,
        }


def run_demo(machine: Machine, order: DemoOrder) -> tuple[DemoOrder, Results]:
    results = check(order)
    order = fit_length(order, results, machine.train, machine.clock)
    machine.trained.clear()
    train_modes(order, results, lambda _: None, machine.train, machine.clock)
    return order, results


def test_a_machine_with_time_for_all_digits_trains_them() -> None:
    order, results = run_demo(Machine(2500.0), DemoOrder())
    assert (order.samples, results.shortened) == (None, None)
    assert results.not_run == {}


@pytest.mark.parametrize("speed", [1000.0, 500.0, 250.0, 100.0])
def test_a_slow_machine_measures_every_mode_with_fewer_digits(speed: float) -> None:
    machine = Machine(speed)
    order, results = run_demo(machine, DemoOrder())
    assert results.not_run == {}
    assert machine.now <= DemoOrder().budget_s
    assert order.samples is not None
    assert LEAST <= order.samples < DIGITS
    assert {samples for _, samples in machine.trained} == {order.samples}, "the same samples in each mode"
    assert results.shortened is not None
    assert f"{order.samples:,} of 10,000 digits" in results.shortened


def test_where_even_that_is_too_long_the_modes_that_make_the_point_are_measured_and_the_others_named() -> None:
    order, results = run_demo(Machine(60.0, 15.0), DemoOrder())
    assert (order.samples, order.epochs) == (LEAST, 1)
    assert list(results.summaries)[:3] == ["solo-0", "solo-1", "torch-ddp"]
    assert "cpu-sync" in results.not_run
    assert all(results.not_run.values())


def test_what_is_short_already_or_fails_is_left_as_it_is() -> None:
    machine, order = Machine(10.0), DemoOrder(samples=LEAST)
    assert fit_length(order, check(order), machine.train, machine.clock) == order
    assert machine.trained == []

    def fail(order: DemoOrder, mode: str, limit_s: float) -> dict[str, Any]:
        raise RankError("it died")

    assert fit_length(DemoOrder(), check(DemoOrder()), fail) == DemoOrder()
    more = replace(DemoOrder(), samples=4_000, epochs=1)
    assert run_demo(Machine(2500.0), more)[0].samples == 4_000


def test_modes_without_a_result_are_named_with_the_reason() -> None:
    results = Results(("cpu", "cpu@0.4"), ("solo-0", "solo-1", "torch-ddp"))
    results.failures["solo-1"] = "rank 1 died\nIts own traceback"
    results.skipped["torch-ddp"] = "no time"
    assert results.not_run == {
        "solo-0": "the demo was ended before",
        "solo-1": "failed: rank 1 died",
        "torch-ddp": "no time",
    }


def test_the_package_has_so_many_digits() -> None:
    assert len(load_set("mnist-mini").train) == DIGITS
