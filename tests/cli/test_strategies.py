"""`uneven bench strategies` as a user types it; what it measures is tested in tests/bench."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.cli.documents import check_document
from uneven.bench.orders import StrategiesOrder
from uneven.bench.strategies import measure as module
from uneven.bench.strategies.measure import Paired, StrategyRow
from uneven.cli.main import app
from uneven.errors import InputError

MB = 1_000_000


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["bench", "strategies", *map(str, words)])


def rank(held: int, **changes: Any) -> dict[str, Any]:
    return {
        "held": {"params": 100 * MB, "gradients": 100 * MB, "state": held * MB, "other": 0},
        "predicted": {"params": 100 * MB, "gradients": 100 * MB, "state": held * MB, "other": 0},
        "uncut": 200 * MB,
        "peak": 600 * MB,
        "rss": 900 * MB,
        "seconds": 0.25,
        "wire": 150.0 * MB,
        "payload": 204.0 * MB,
        "losses": [5.5, 5.25],
        "unequal": [],
        "drift": 2e-6,
        "worst": ["head.bias", 1e-6],
        **changes,
    }


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[StrategiesOrder]:
    """zero1 by 15:6, and a row that failed unless it was not asked for."""
    seen: list[StrategiesOrder] = []

    def measured(order: StrategiesOrder, tell: Any) -> list[StrategyRow]:
        seen.append(order)
        tell("row 1 of 2: zero1")
        rows = [StrategyRow("zero1", [rank(150), rank(60)], loss_difference=1e-7)]
        return rows if order.only == ("zero1",) else [*rows, StrategyRow("fsdp", cause="rank 1: no [memory]")]

    monkeypatch.setattr(module, "measure_strategies", measured)
    return seen


def test_tables_show_the_largest_rank_and_whose_part_is_whose(orders: list[StrategiesOrder]) -> None:
    done = call("--shares", "15,6", "--only", "zero1")
    assert done.exit_code == 0, done.output
    assert orders == [StrategiesOrder(model="gpt", ranks=2, steps=6, shares=(15.0, 6.0), only=("zero1",))]
    assert "150.0/150.0   0.0 350.0/350.0 +0.0% 250.0 600.0 900" in done.output
    assert "150.0   204.0 250 5.25000 +1.0e-07 2.0e-06 1.0e-06     yes" in done.output
    assert "71.4%  28.6%" in done.output
    assert max(map(len, done.output.splitlines())) <= 100


def test_communication_is_shown_hidden_and_exposed_of_the_rank_that_waits_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ranks(*exposed: float) -> list[dict[str, Any]]:
        found = [{"in_flight_s": 0.04, "hidden_s": 0.04 - seconds, "exposed_s": seconds} for seconds in exposed]
        return [rank(100, communication=one) for one in found]

    rows = [
        StrategyRow("zero1", ranks(0.01, 0.025), loss_difference=0.0),
        StrategyRow("torch-tensor", [rank(100, communication=None)], loss_difference=0.0),
    ]
    monkeypatch.setattr(module, "measure_strategies", lambda order, tell: rows)
    lines = call("--only", "zero1").output.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("Collectives, ms a step"))
    assert lines[start + 2].split() == ["in", "flight", "hidden", "exposed"]
    assert lines[start + 3].split() == ["zero1", "40.0", "15.0", "25.0"]
    assert lines[start + 4].split() == ["torch-tensor", "-", "-", "-"]
    found = json.loads(call("--only", "zero1", "--json").output)
    check_document("bench strategies", found)
    (row, _) = found["rows"]
    assert [one["communication"]["exposed_s"] for one in row["ranks"]] == [0.01, 0.025]


def test_a_failed_row_is_told_and_the_exit_code_says_so(orders: list[StrategiesOrder]) -> None:
    done = call("--quick")
    assert done.exit_code == 1
    assert "fsdp failed: rank 1: no [memory]" in done.output
    assert (orders[0].model, orders[0].ranks, orders[0].steps, orders[0].is_quick) == ("gpt-small", 2, 4, True)


@pytest.mark.usefixtures("orders")
def test_json_has_every_rank_and_no_progress() -> None:
    done = call("--only", "zero1", "--json")
    (row,) = json.loads(done.output)["rows"]
    assert [one["held"]["state"] for one in row["ranks"]] == [150 * MB, 60 * MB]
    assert row["is_good"]


def test_pairs_are_printed_with_their_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []

    def measured(order: StrategiesOrder, tell: Any) -> list[Paired]:
        orders.append(order)
        return [Paired("fsdp", "torch-fsdp", [0.1, 0.1], [0.12, 0.12]), Paired("zero1", "x", [0.1] * 3, [0.09] * 3)]

    monkeypatch.setattr(module, "measure_pairs", measured)
    done = call("--paired", "--pairs", 2)
    assert done.exit_code == 0, done.output
    assert "100    120 1.200 +- 0.000     2              yes" in done.output
    assert done.output.rstrip().endswith("no")
    assert (orders[0].model, orders[0].ranks, orders[0].steps) == ("gpt-medium", 2, 3)
    found = json.loads(call("--paired", "--json").output)
    check_document("bench strategies", found)
    assert len(found["pairs"]) == 2


def test_disturbed_times_are_marked_and_get_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Paired("fsdp", "torch-fsdp", [0.1, 0.1], [0.12, 0.12], is_disturbed=True)
    monkeypatch.setattr(module, "measure_pairs", lambda order, tell: [pair])
    done = call("--paired")
    assert "1.200 +- 0.000*" in done.output
    assert "yes" not in done.output
    assert "* disturbed" in done.output
    (found,) = json.loads(call("--paired", "--json").output)["pairs"]
    assert (found["is_disturbed"], found["is_as_fast"]) == (True, None)
    row = StrategyRow("zero1", [rank(150)], loss_difference=0.0, is_disturbed=True)
    monkeypatch.setattr(module, "measure_strategies", lambda order, tell: [row])
    assert "250*" in call("--quick").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shares", "15;6"), "must be numbers with commas"),
        (("--shares", "15,6", "--nproc", "3"), "one share per rank"),
        (("--paired", "--shares", "15,6"), "equal shares only"),
        (("--only", "zero3"), "'zero3' must be one of"),
    ],
)
def test_bad_words_are_refused(words: tuple[str, ...], message: str) -> None:
    done = call(*words)
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)
