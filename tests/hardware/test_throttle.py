import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.errors import InputError
from uneven.hardware.throttle import Throttle


class OverSleeper:
    """A clock whose sleep takes a given extra time."""

    def __init__(self, extra: float) -> None:
        self.now = 0.0
        self.extra = extra
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds + self.extra


@given(
    st.floats(0.05, 0.95),
    st.lists(st.floats(0.001, 0.1), min_size=1, max_size=60),
    st.floats(0.0, 0.05),
)
def test_the_debt_is_what_is_missing(speed: float, steps: list[float], extra: float) -> None:
    machine = OverSleeper(extra)
    throttle = Throttle(speed, clock=machine.clock, sleep=machine.sleep)
    slept = sum(throttle.pause(step) for step in steps)
    assert slept == pytest.approx(machine.now)
    assert slept + throttle.debt_s == pytest.approx(sum(steps) * (1 / speed - 1))
    assert -extra - 1e-9 <= throttle.debt_s <= 1e-9


def test_oversleep_is_paid_back_by_the_next_steps() -> None:
    machine = OverSleeper(extra=0.15)
    throttle = Throttle(0.5, clock=machine.clock, sleep=machine.sleep)
    assert throttle.pause(0.1) == pytest.approx(0.25)
    assert throttle.pause(0.1) == 0.0
    assert throttle.pause(0.1) == pytest.approx(0.2)
    assert machine.slept == pytest.approx([0.1, 0.05])


def test_full_speed_never_sleeps() -> None:
    machine = OverSleeper(extra=0.0)
    assert Throttle(1.0, clock=machine.clock, sleep=machine.sleep).pause(5.0) == 0.0
    assert machine.slept == []


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5, float("nan")])
def test_a_speed_outside_its_range_is_refused(speed: float) -> None:
    with pytest.raises(InputError, match="0 < SPEED <= 1"):
        Throttle(speed)


def test_a_slow_rank_may_spin_instead_of_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNEVEN_SLOW", "spin")
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it slept"))
    throttle = Throttle(0.5)
    slept = throttle.pause(0.002)
    assert slept >= 0.002
    assert slept + throttle.debt_s == pytest.approx(0.002)
