"""The demo's logic, on made-up summaries; only the last test trains."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.demo_results import PAIR, SPEEDS, make_results, summary
from uneven import InputError
from uneven.bench import demo
from uneven.bench.demo import (
    DIGITS,
    LEAST,
    OURS,
    Results,
    check,
    fit_length,
    folder_of,
    notes,
    threads,
    train_modes,
)
from uneven.bench.models.sets import load_set
from uneven.bench.modes import limit_threads
from uneven.bench.orders import DemoOrder, Order
from uneven.bench.single.folders import Summary
from uneven.bench.single.run import run_single
from uneven.errors import MachineError, RankError, StoppedError


@pytest.mark.parametrize("modes", [("solo-0", "cpu-async"), ("solo-1", "cpu-async"), ("cpu-async",), ()])
def test_figures_that_cannot_be_derived_are_none(modes: tuple[str, ...]) -> None:
    results = make_results(*modes)
    assert results.alone is None
    assert all(row.speedup is None and row.efficiency is None for row in results.rows)


def test_rows_compare_every_mode_with_the_devices_alone() -> None:
    rows = {row.mode: row for row in make_results(*SPEEDS).rows}
    assert list(rows) == list(SPEEDS)
    assert rows["solo-0"].speedup == 1.0
    assert rows["solo-0"].efficiency == pytest.approx(2500 / 3500)
    assert rows["solo-0"].shares == (1.0, 0.0)
    assert rows["solo-1"].shares == (0.0, 1.0)
    assert rows["cpu-async"].speedup == pytest.approx(1.372)
    assert rows["cpu-async"].efficiency == pytest.approx(0.98)
    assert rows["cpu-async"].shares == (0.72, 0.28)


def test_the_fast_device_is_the_one_that_was_faster_not_the_first() -> None:
    results = Results(PAIR, (), {"solo-0": summary("solo-0", 500.0), "solo-1": summary("solo-1", 2000.0)})
    assert [row.speedup for row in results.rows] == [0.25, 1.0]


def test_three_devices_have_three_solos() -> None:
    results = check(DemoOrder(devices="cpu,cpu@0.5,cpu@0.25"))
    assert results.modes[:4] == ("solo-0", "solo-1", "solo-2", "torch-ddp")
    speeds = (3000.0, 1500.0, 750.0)
    for place, speed in enumerate(speeds):
        assert results.alone is None
        results.summaries[f"solo-{place}"] = summary(f"solo-{place}", speed)
    assert results.alone == speeds
    assert results.rows[1].shares == (0.0, 1.0, 0.0)


def test_by_default_everything_runs_and_the_comparison_comes_first() -> None:
    assert check(DemoOrder()).modes == ("solo-0", "solo-1", "torch-ddp", *OURS)
    assert OURS == ("cpu-async", "cpu-balanced", "cpu-cadence", "cpu-sync")
    assert check(DemoOrder(modes=("cpu-async", "solo-0", "cpu-async"))).modes == ("cpu-async", "solo-0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": "cpu"}, ("'cpu'", "at least two", "uneven bench run --model lenet")),
        ({"devices": "cpu,gpu"}, ("'gpu'", "uneven devices")),
        ({"modes": ("solo-0", "fast")}, ("'fast'", "cpu-async")),
        ({"modes": ("solo-2",)}, ("'solo-2'", "cpu,cpu@0.4")),
        ({"modes": ("",)}, ("''", "solo-0")),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(changes: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        check(DemoOrder(**changes))
    assert all(word in str(caught.value) for word in words), caught.value


def test_slices_are_refused_at_once_and_a_gpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "check_device", lambda device: None)
    with pytest.raises(InputError, match="takes whole devices"):
        check(DemoOrder(devices="cuda:0%60,cuda:0%24"))
    assert check(DemoOrder(devices="cuda:0,cpu")).devices == ("cuda:0", "cpu")


def test_notes_warn_if_both_devices_share_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "available_cores", lambda: (0,))
    lines = notes(DemoOrder())
    assert "2 ranks on 1 core" in lines[0]
    assert "the figures below mean little" in lines[0]
    monkeypatch.setattr(demo, "available_cores", lambda: (0, 1))
    assert notes(DemoOrder(devices="cpu,cpu")) == []


def test_a_device_alone_has_the_threads_that_it_has_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.setenv("MKL_NUM_THREADS", "16")
    monkeypatch.setattr(demo, "available_cores", lambda: (0,))
    limit_threads(threads(DemoOrder()))
    assert os.environ["OMP_NUM_THREADS"] == "16"
    monkeypatch.setattr(demo, "available_cores", lambda: tuple(range(7)))
    limit_threads(threads(DemoOrder()))
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "3"


def test_the_threads_are_set_before_torch_is_loaded() -> None:
    code = (
        "import sys; from uneven.bench.demo import check, notes, threads; from uneven.bench.orders import DemoOrder\n"
        "order = DemoOrder(); check(order); notes(order); threads(order); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


def test_a_mode_whose_ranks_fail_is_recorded_and_the_others_run() -> None:
    def train(order: DemoOrder, mode: str, limit_s: float) -> Summary:
        if mode == "torch-ddp":
            raise RankError("rank 1 died\nIts own traceback: ...")
        return summary(mode, SPEEDS[mode])

    lines: list[str] = []
    results = check(DemoOrder(modes=("solo-0", "torch-ddp", "cpu-async")))
    train_modes(DemoOrder(), results, lines.append, train)
    assert list(results.summaries) == ["solo-0", "cpu-async"]
    assert results.failures == {"torch-ddp": "rank 1 died\nIts own traceback: ..."}
    assert lines == [
        "1/3 solo-0: 97.00 % right, 12.0 s of training",
        "2/3 torch-ddp failed: rank 1 died",
        "3/3 cpu-async: 97.00 % right, 8.7 s of training",
    ]


class Clock:
    """Modes that take so many seconds each, by a clock that does not wait."""

    def __init__(self, seconds: dict[str, float], disturbed: tuple[str, ...] = ()) -> None:
        self.now, self.seconds, self.disturbed = 0.0, seconds, disturbed
        self.trained: list[str] = []

    def __call__(self) -> float:
        return self.now

    def train(self, order: DemoOrder, mode: str, limit_s: float) -> Summary:
        self.trained.append(mode)
        self.now += min(self.seconds[mode], limit_s)
        if self.seconds[mode] > limit_s:
            raise StoppedError("not finished")
        return summary(mode, SPEEDS[mode], is_disturbed=mode in self.disturbed)


def run_on(clock: Clock, *modes: str, budget_s: float = 240.0) -> Results:
    order = DemoOrder(modes=modes, minutes=budget_s / 60)
    results = check(order)
    train_modes(order, results, lambda _: None, clock.train, clock)
    assert clock.now <= budget_s
    return results


def test_a_mode_that_would_take_all_the_time_is_given_up_and_the_others_are_measured() -> None:
    clock = Clock({"solo-0": 15.0, "solo-1": 35.0, "torch-ddp": 193.0, "cpu-async": 15.0})
    results = run_on(clock, "solo-0", "solo-1", "torch-ddp", "cpu-async")
    assert list(results.summaries) == ["solo-0", "solo-1", "cpu-async"]
    assert list(results.skipped) == ["torch-ddp"]
    assert "not finished after 95 s" in results.skipped["torch-ddp"]


def test_modes_are_skipped_once_the_budget_is_nearly_spent() -> None:
    clock = Clock(dict.fromkeys(SPEEDS, 40.0))
    results = run_on(clock, *SPEEDS, budget_s=100.0)
    assert list(results.summaries) == ["solo-0", "solo-1"]
    assert all("nearly spent" in why for why in results.skipped.values())
    assert set(results.skipped) == set(results.not_run) == set(SPEEDS) - {"solo-0", "solo-1"}


def test_a_disturbed_mode_is_measured_again_once_where_the_budget_allows_it() -> None:
    clock = Clock(dict.fromkeys(SPEEDS, 10.0), disturbed=("solo-1",))
    results = run_on(clock, "solo-0", "solo-1", "cpu-async")
    assert clock.trained == ["solo-0", "solo-1", "solo-1", "cpu-async"]
    assert results.disturbed == ["solo-1"]
    assert results.undisturbed_alone is None
    clock = Clock(dict.fromkeys(SPEEDS, 10.0), disturbed=("solo-1",))
    run_on(clock, "solo-0", "solo-1", "cpu-async", budget_s=35.0)
    assert clock.trained == ["solo-0", "solo-1", "cpu-async"], "the repeat would have taken the last mode's time"


@pytest.mark.parametrize("end", [KeyboardInterrupt, MachineError])
def test_finished_modes_are_kept_if_the_demo_ends_early(end: type[BaseException]) -> None:
    def train(order: DemoOrder, mode: str, limit_s: float) -> Summary:
        if mode == "solo-1":
            raise end("no more")
        return summary(mode, SPEEDS[mode])

    results = check(DemoOrder())
    with pytest.raises(end):
        train_modes(DemoOrder(), results, lambda _: None, train)
    assert list(results.summaries) == ["solo-0"]
    assert next(iter(results.not_run)) == "solo-1"


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

    def train(self, order: DemoOrder, mode: str, limit_s: float) -> Summary:
        self.trained.append((mode, order.samples))
        speed = self.speeds[mode]
        seconds = order.epochs * (order.samples or DIGITS) / speed
        self.now += min(seconds + self.around_s, limit_s)
        if seconds + self.around_s > limit_s:
            raise StoppedError("not finished")
        return summary(mode, speed, (0.7, 0.3), train_seconds=seconds)


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
    assert machine.now <= 60 * DemoOrder().minutes
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

    def fail(order: DemoOrder, mode: str, limit_s: float) -> Summary:
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


def test_the_folder_is_that_of_the_run() -> None:
    order = DemoOrder(out=Path("x"))
    assert folder_of(order, "solo-1") == Order(model="lenet", mode="solo-1", out=Path("x")).folder


def test_a_solo_run_gives_the_cores_back_so_that_the_next_mode_has_them(tmp_path: Path) -> None:
    """Really trains, for a moment, alone on its part of the cores."""
    before = os.sched_getaffinity(0), torch.get_num_threads()
    order = Order(model="logistic", data="mnist-mini", mode="solo-1", devices="cpu,cpu@0.4", epochs=1, samples=128)
    run_single(Order(**{**vars(order), "out": tmp_path, "progress": "off", "repeat": False}))
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
