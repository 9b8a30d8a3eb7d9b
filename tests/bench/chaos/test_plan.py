"""The plan of `uneven chaos` follows from seed, rates and ranks alone, and what cannot be read is refused in words."""

from collections.abc import Callable, Sequence
from itertools import islice, takewhile

import pytest

from uneven.bench.chaos.plan import Fault, check_ranks, draw_plan, parse_fault, parse_rate, parse_time
from uneven.errors import InputError

RATES = {"kill": 0.1, "pause": 0.5}


def first(count: int, *given: object, **options: object) -> list[Fault]:
    return list(islice(draw_plan(*given, **options), count))  # type: ignore[arg-type]


def test_the_plan_follows_from_seed_rates_and_ranks() -> None:
    plan = first(50, 3, RATES, 4)
    assert plan == first(50, 3, RATES, 4)
    assert plan == sorted(plan)
    assert plan != first(50, 4, RATES, 4)
    assert {fault.rank for fault in plan} == set(range(4))
    assert {fault.kind for fault in plan} == {"kill", "pause"}


def test_another_kind_or_rank_leaves_the_others_where_they_were() -> None:
    end = first(50, 3, RATES, 4)[-1].at_s

    def kills(rates: dict[str, float], ranks: int) -> list[Fault]:
        plan = takewhile(lambda fault: fault.at_s < end, draw_plan(3, rates, ranks))
        return [fault for fault in plan if fault.kind == "kill" and fault.rank < 4]

    assert kills(RATES, 4) == kills({"kill": 0.1}, 4) == kills({**RATES, "stop": 2.0}, 6) != []


def test_a_rate_is_met_on_average() -> None:
    plan = takewhile(lambda fault: fault.at_s < 10_000.0, draw_plan(0, {"kill": parse_rate("--kill", "6/min")}, 2))
    assert sum(1 for _ in plan) == pytest.approx(2 * 1000, rel=0.1)


def test_named_faults_take_their_place_and_without_rates_the_plan_ends() -> None:
    given = [parse_fault("30s:stop:1"), parse_fault("500ms:kill:0")]
    assert list(draw_plan(0, {"kill": 0.0}, 2, given)) == [Fault(0.5, 0, "kill"), Fault(30.0, 1, "stop")]
    merged = first(20, 0, RATES, 2, given)
    assert merged == sorted(merged)
    assert Fault(0.5, 0, "kill") in merged


@pytest.mark.parametrize(
    ("text", "seconds"), [("10s", 10.0), ("250ms", 0.25), ("1.5min", 90.0), (".5 h", 1800.0), ("2.s", 2.0)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time("--pause-for", text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (lambda text: parse_rate("--kill", text), ("", "1", "-1/min", "1/day", "x/min", "nan/s", "1/min/s")),
        (parse_fault, ("", "10s", "10s:kill", "10s:shoot:1", "10s:kill:x", "10:kill:1", "10s:kill:1:2")),
    ],
)
def test_what_cannot_be_read_is_refused(parse: Callable[[str], object], texts: Sequence[str]) -> None:
    for text in texts:
        with pytest.raises(InputError, match="must be"):
            parse(text)


def test_ranks_that_the_run_does_not_have() -> None:
    check_ranks([Fault(1.0, 1, "kill")], 2)
    with pytest.raises(InputError, match="ranks 0 to 1"):
        check_ranks([Fault(1.0, 2, "kill")], 2)
    with pytest.raises(InputError, match="one rank"):
        check_ranks([], 1)
