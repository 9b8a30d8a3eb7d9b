"""What is kept of a run's timeline."""

import json
from dataclasses import asdict

import pytest

from uneven.bench.single.folders import RunTimes
from uneven.files import read_as
from uneven.timeline.record import STATES, Account, Event
from uneven.timeline.timeline import Lane, Timeline

SECOND = 10**9


def event(kind: str, rank: int = 0, **fields: object) -> Event:
    return Event(0, rank, kind, dict(fields))


def test_the_mean_of_a_round_is_over_all_of_them() -> None:
    events = [event("round", round=n, transfer_ms=2.0 * n, wait_ms=1.0) for n in range(1001)]
    account = Account(0, dict.fromkeys(STATES, 0.0) | {"compute": 1.0})
    times = RunTimes.of(Timeline([Lane(0, "cpu", [("compute", 0, SECOND)])], [account], events, []))
    assert (times.rounds, times.communication_ms, times.wait_ms) == (1001, 1000.0, 1.0)


def test_times_are_the_same_after_json_and_what_is_not_known_is_passed_over() -> None:
    """Older published files have more in them."""
    account = Account(0, dict.fromkeys(STATES, 0.0) | {"compute": 1.0})
    times = RunTimes.of(Timeline([Lane(0, "cpu", [("compute", 0, SECOND)])], [account], [], []))
    assert times.utilisation == {"0: cpu": 1.0}
    assert read_as(RunTimes, json.loads(json.dumps({**asdict(times), "round_sample": {}}))) == times
    with pytest.raises(TypeError, match="has no usable rounds"):
        read_as(RunTimes, {**asdict(times), "rounds": "2"})
