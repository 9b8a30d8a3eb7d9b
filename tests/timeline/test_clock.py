"""Clocks of several machines: off by minutes and drifting, all events stand in order within the error bound."""

import json
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.timeline.synthetic import make_run
from uneven.comm.clock import ClockSample
from uneven.timeline.clock import ClockReading, Machine, read_offset, unite
from uneven.timeline.record import Recorder
from uneven.timeline.sample import Sample
from uneven.timeline.timeline import Timeline

S = 1_000_000_000
MS = 1_000_000


def skewed(offset_s: float, ppm: float) -> Callable[[int], int]:
    """The clock of a machine by the true time: ahead by `offset_s` at 0, and faster by `ppm`."""
    return lambda true_ns: true_ns + int(offset_s * S) + int(true_ns * ppm / 1e6)


def ping(own: Callable[[int], int], true_ns: int, rng: random.Random, count: int = 8) -> ClockReading:
    """A reading at a true time, through a network whose two ways take times of their own."""
    samples = []
    for _ in range(count):
        there, back = rng.randrange(100_000, 20 * MS), rng.randrange(100_000, 20 * MS)
        samples.append(ClockSample(own(true_ns), true_ns + there, own(true_ns + there + back)))
        true_ns += there + back
    return read_offset(samples)


def test_the_offset_is_that_of_the_quickest_round_trip() -> None:
    slow, quick = ClockSample(100, 5_000, 900), ClockSample(1_000, 6_050, 1_101)
    assert read_offset([slow, quick]) == ClockReading(at_ns=1_050, offset_ns=5_000, error_ns=51)
    assert read_offset([slow]).error_ns == 400


@pytest.mark.parametrize("seed", range(20))
def test_the_error_is_within_its_bound_however_uneven_the_ways_are(seed: int) -> None:
    rng = random.Random(seed)
    offset_s = rng.uniform(-60, 60)
    reading = ping(skewed(offset_s, 0.0), rng.randrange(100 * S), rng)
    assert abs(reading.offset_ns + int(offset_s * S)) <= reading.error_ns < 20 * MS


CLOCKS = {0: (0.0, 0.0), 1: (60.0, 180.0), 2: (-60.0, -250.0)}  # seconds off, and ppm
PLACES = (0, 1, 1, 2)  # the machine of each rank


def record(rank: int, machine: Machine, times: list[int], own: Callable[[int], int]) -> Timeline:
    """A rank with a compute span and an event at each of these true times."""
    now = times[0]
    recorder = Recorder(rank, clock=lambda: own(now))
    for number, now in enumerate(times):  # `now` is read by the clock
        recorder.enter("compute" if number % 2 else "wait")
        recorder.event("beat", true=now)
    recorder.close()
    return Timeline.of(recorder, "cpu", [Sample(own(times[1]), 50.0, 100.0, 1, 1, ())], machine=machine)


def aligned_run(seed: int = 0, length_s: int = 600) -> tuple[Timeline, list[Timeline]]:
    """Four ranks on three machines for ten minutes: 250 ppm are 150 ms by then."""
    rng, parts = random.Random(seed), []
    hosts = ("anna", "bert", "carl")
    for rank, place in enumerate(PLACES):
        own = skewed(*CLOCKS[place])
        is_first = place > 0 and PLACES.index(place) == rank
        readings = tuple(ping(own, at, rng) for at in (100 * S, (100 + length_s) * S)) if is_first else ()
        times = sorted(rng.randrange(100 * S, (100 + length_s) * S) for _ in range(200))
        parts.append(record(rank, Machine(place, hosts[place], readings), times, own))
    return Timeline.merge(parts), parts


@pytest.mark.parametrize("seed", range(5))
def test_events_of_all_machines_are_in_order_within_the_error_bound(seed: int) -> None:
    timeline, _ = aligned_run(seed)
    assert [machine.host for machine in timeline.machines] == ["anna", "bert", "carl"]
    errors = {lane.rank: timeline.machine(lane).error_ns or 0 for lane in timeline.lanes}
    assert all(0 < errors[rank] < 20 * MS for rank in (1, 2, 3))
    start = min(event.fields["true"] for event in timeline.events)
    for event in timeline.events:
        # The start itself is that of a rank, with an error of its own; 1 us for rounding and for the drift in a ping.
        assert abs(event.t_ns - (event.fields["true"] - start)) <= errors[event.rank] + max(errors.values()) + 20_000
    for before, after in pairwise(timeline.events):
        late_ns = before.fields["true"] - after.fields["true"]
        assert late_ns <= errors[before.rank] + errors[after.rank] + 40_000


def test_ranks_of_one_machine_keep_to_their_own_clock() -> None:
    """Both are moved by the same function: what happened at one moment stays at one moment."""
    timeline, parts = aligned_run()
    aligned = {event.fields["true"]: event.t_ns for event in timeline.events if event.rank in (1, 2)}
    assert list(aligned) == sorted(aligned)  # exactly, not only within the error bound
    first, second = (parts[rank].lanes[0].spans[0][1] for rank in (1, 2))
    moved = timeline.lanes[2].spans[0][1] - timeline.lanes[1].spans[0][1]
    assert abs(moved - (second - first)) <= abs(second - first) * 1e-3


def test_accounts_and_lanes_stay_whole() -> None:
    timeline, parts = aligned_run()
    assert timeline.accounts == [part.accounts[0] for part in parts]
    for account in timeline.accounts:
        assert sum(account.shares.values()) == pytest.approx(1.0, abs=1e-12)
    for lane, part in zip(timeline.lanes, parts, strict=True):
        assert [span[0] for span in lane.spans] == [span[0] for span in part.lanes[0].spans]
        assert all(before[2] == after[1] and before[1] <= before[2] for before, after in pairwise(lane.spans))
    assert min(lane.spans[0][1] for lane in timeline.lanes) == 0


def test_every_machine_has_samples_of_its_own() -> None:
    timeline, _ = aligned_run()
    assert sorted(sample.machine for sample in timeline.samples) == [0, 1, 2]


def test_drift_is_what_the_clocks_do() -> None:
    timeline, _ = aligned_run()
    drifts = [machine.drift_ppm for machine in timeline.machines]
    assert drifts == pytest.approx([0.0, -180.0, 250.0], abs=60)  # 20 ms of error in ten minutes are 33 ppm


def test_a_clock_that_stood_still_has_a_bound_that_says_so() -> None:
    slept = Machine(1, "laptop", (ClockReading(0, 5, 2), ClockReading(60 * S, 40 * S, 3)))
    assert slept.error_ns is not None
    assert slept.error_ns >= 40 * S - 5
    # A reference that slept for longer than the run: no line, and no time that goes backwards.
    still = Machine(1, "laptop", (ClockReading(0, 5, 2), ClockReading(60 * S, -70 * S, 3)))
    times = [still.alignment()(t) for t in range(0, 60 * S, S)]
    assert times == sorted(times)
    assert still.error_ns is not None
    assert still.error_ns >= 70 * S


def test_a_machine_that_was_never_compared_has_no_bound() -> None:
    alone = Machine(2, "carl")
    assert (alone.error_ns, alone.alignment()(7), Machine(0, "anna").error_ns) == (None, 7, 0)
    read = Machine(2, "carl", (ClockReading(0, 5, 2),))
    assert unite([alone, Machine(0, "anna"), read]) == [Machine(0, "anna"), read]
    assert read.alignment(3)(7) == 9


def test_json_reads_back_with_machines() -> None:
    timeline, _ = aligned_run()
    record = json.loads(json.dumps(timeline.to_json()))
    assert Timeline.from_json(record) == timeline
    assert [(rank["machine"], rank["host"]) for rank in record["ranks"]][1:3] == [(1, "bert")] * 2
    carl = record["machines"][2]
    assert carl["error_ns"] > 0
    assert carl["offset_ns"] == pytest.approx(60 * S, abs=S)
    assert make_run().name(make_run().lanes[0]) == "cpu@0"
    assert timeline.name(timeline.lanes[3]) == "cpu on carl"
