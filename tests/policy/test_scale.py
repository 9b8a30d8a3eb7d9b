import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.policy.scale import WARM_UP_SHARE, effective_ranks, lr_scale, ramp

speeds_of_ranks = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("speeds", "ranks"),
    [((1.0,), 1.0), ((5.0, 5.0), 2.0), ((2.0, 2.0, 2.0, 2.0), 4.0), ((3.0, 1.0), 1.6), ((7.0, 0.0), 1.0)],
)
def test_effective_ranks(speeds: tuple[float, ...], ranks: float) -> None:
    assert effective_ranks(speeds) == pytest.approx(ranks, rel=1e-12)


@given(speeds_of_ranks, st.floats(1e-3, 1e3))
def test_effective_ranks_depend_on_shares_alone_and_lie_between_one_and_all(speeds: list[float], unit: float) -> None:
    ranks = effective_ranks(speeds)
    assert 1.0 - 1e-9 <= ranks <= len(speeds) + 1e-9
    assert effective_ranks([unit * speed for speed in speeds]) == pytest.approx(ranks, rel=1e-9)
    shares = [speed / sum(speeds) for speed in speeds]
    assert ranks == pytest.approx(1 / sum(share**2 for share in shares), rel=1e-9)


@pytest.mark.parametrize(
    ("rule", "scale"), [("linear", 4.0), ("sqrt", 2.0), ("auto", 4.0), (1.5, 1.5), (3, 3.0), (1.0, 1.0)]
)
def test_rules_follow_the_speeds_and_numbers_do_not(rule: str | float, scale: float) -> None:
    found = lr_scale(rule, (10.0,) * 4)
    assert found == pytest.approx(scale, rel=1e-12)
    assert isinstance(found, float)
    if isinstance(rule, str):
        assert lr_scale(rule, (10.0, 1e-9)) == pytest.approx(1.0), "one rank does everything"


@given(st.floats(0.05, 20.0), st.integers(1, 10**6), st.integers(1, 300), st.lists(st.integers(0, 10**9), min_size=2))
def test_the_ramp_goes_from_one_to_the_scale_and_never_back(
    scale: float, epoch: int, epochs: int, places: list[int]
) -> None:
    total = epoch * epochs
    assert ramp(scale, 0, epoch, total) == 1.0
    values = [ramp(scale, samples, epoch, total) for samples in sorted(places)]
    upwards = values if scale >= 1.0 else values[::-1]
    assert upwards == sorted(upwards)
    assert all(min(1.0, scale) <= value <= max(1.0, scale) for value in values)


@pytest.mark.parametrize("scale", [4.0, 1.9, 0.1])
@pytest.mark.parametrize(("epochs", "length"), [(1, 60), (5, 300), (10, 600), (100, 600)])
def test_the_warm_up_is_a_tenth_of_the_run_and_one_epoch_at_most(scale: float, epochs: int, length: int) -> None:
    def at(samples: int) -> float:
        return ramp(scale, samples, 600, 600 * epochs)

    assert WARM_UP_SHARE == 0.1
    assert at(length // 2) == pytest.approx((1.0 + scale) / 2, rel=1e-12)
    assert at(length - 1) != scale
    assert at(length) == scale, "not one rounding away from it"
    assert at(600 * epochs) == scale


def test_a_scale_of_one_has_no_ramp() -> None:
    assert {ramp(1.0, samples, 100, 1000) for samples in range(0, 300, 7)} == {1.0}
