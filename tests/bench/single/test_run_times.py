"""What is kept of a run's timeline: GPUs by NVML, and what the policy settled upon epoch by epoch."""

import json
from dataclasses import asdict

from uneven.bench.single.folders import RunTimes, calibration_of
from uneven.timeline.record import STATES, Account, Event
from uneven.timeline.sample import Sample
from uneven.timeline.timeline import Lane, Timeline

SECOND = 10**9


def event(kind: str, rank: int = 0, **fields: object) -> Event:
    return Event(0, rank, kind, dict(fields))


def test_calibration_is_what_held_at_the_end_of_each_epoch() -> None:
    events = [
        event("shares", slot=0, shares=[20, 10], alone=[]),
        event("lr_scale", scale=1.8),
        event("anchor", slot=30, anchor=12.0),
        event("epoch", epoch=1),
        event("counts", rank=1, slot=60, counts=[1, 1], anchor=1.0),
        event("counts", slot=60, counts=[31, 12], anchor=12.4),
        event("lr_scale", scale=1.7),
        event("epoch", epoch=2),
    ]
    assert calibration_of(events) == [
        {"epoch": 1, "anchor": 12.0, "shares": [20.0, 10.0], "lr_scale": 1.8},
        {"epoch": 2, "anchor": 12.4, "shares": [31.0, 12.0], "lr_scale": 1.7},
    ]
    assert calibration_of(events[:2]) == [{"epoch": None, "shares": [20.0, 10.0], "lr_scale": 1.8}]
    assert calibration_of([]) == []


def test_gpus_count_while_devices_train() -> None:
    """One second at 4 %, which is idle, and three at 80 %; what came before the first step does not count."""
    lane = Lane(0, "cuda:0", [("setup", 0, 2 * SECOND), ("compute", 2 * SECOND, 6 * SECOND)])
    percent = [0.0, 0.0, 0.0, 4.0, 80.0, 80.0, 80.0]
    samples = [Sample(at * SECOND, 50.0, 100.0, 1, 1, ((0, busy, 1),)) for at, busy in enumerate(percent)]
    account = Account(0, dict.fromkeys(STATES, 0.0) | {"compute": 4.0, "setup": 2.0})
    times = RunTimes.of(Timeline([lane], [account], [], samples))
    assert times.gpus == {"gpu 0": [61.0, 1.0]}
    assert times.utilisation == {"0: cuda:0": 1.0}
    assert RunTimes.from_json(json.loads(json.dumps(asdict(times)))) == times


def test_the_mean_of_a_round_is_over_all_of_them() -> None:
    events = [event("round", round=n, transfer_ms=2.0 * n, wait_ms=1.0) for n in range(1001)]
    account = Account(0, dict.fromkeys(STATES, 0.0) | {"compute": 1.0})
    times = RunTimes.of(Timeline([Lane(0, "cpu", [("compute", 0, SECOND)])], [account], events, []))
    assert (times.rounds, times.communication_ms, times.wait_ms) == (1001, 1000.0, 1.0)
