"""Claims that are asked for ahead: how many, when, and what holds whatever the replies take, on simulated clusters."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.clusters import ASYNC, clusters
from tests.policy.simulation import Cluster, Simulation
from uneven.policy.claims import MIN_TRIP_MS, Claiming, typical_ms
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.windows import LocalSGDConfig, Windows

FAR = 1e6  # slots left before the next event


# How many, and when


def test_a_round_trip_that_is_cheap_is_waited_for() -> None:
    assert not Claiming(trip_ms=0.1, slot_ms=2.0, count=10, left=FAR).is_ahead, "loopback: a thread costs as much"
    assert not Claiming(trip_ms=3.0, slot_ms=100.0, count=20, left=FAR).is_ahead, "1 % of five slots"
    assert Claiming(trip_ms=20.0, slot_ms=2.0, count=10, left=FAR).is_ahead
    assert Claiming(trip_ms=20.0, slot_ms=100.0, count=10, left=FAR).is_ahead
    assert not Claiming(trip_ms=20.0, slot_ms=2.0, count=10, left=FAR, can_ask=False).is_ahead


@given(st.floats(0.0, MIN_TRIP_MS), st.floats(0.1, 100.0), st.integers(1, 200), st.floats(0.0, FAR))
def test_near_the_store_claims_have_the_size_they_always_had(
    trip_ms: float, ms: float, count: int, left: float
) -> None:
    claiming = Claiming(trip_ms, ms, count, left)
    assert claiming.size == max(1, min(int(trip_ms / (0.01 * ms)) + 1, count // 4, int(0.5 * left)))
    assert claiming.size_to_ask(0, 0) == 0
    assert claiming.most_held == max(1, count // 4)


@pytest.mark.parametrize(("slot_ms", "trips"), [(2.0, 20), (5.0, 8), (30.0, 2), (100.0, 1)])
def test_far_from_events_a_claim_lasts_two_round_trips_and_is_asked_for_in_time(slot_ms: float, trips: int) -> None:
    claiming = Claiming(trip_ms=20.0, slot_ms=slot_ms, count=40, left=FAR)
    assert claiming.size_to_ask(0, 0) == trips
    assert claiming.size_to_ask(trips, trips - 1) == trips
    assert claiming.size_to_ask(trips + 1, trips) == 0
    assert claiming.size_to_ask(trips + 7, trips - 1) == trips, "what a feed has got is no reserve for it"


def test_towards_an_event_claims_shrink_to_one_slot() -> None:
    sizes = [Claiming(trip_ms=20.0, slot_ms=15.0, count=100, left=left).size for left in (8.0, 5.0, 3.0, 1.0, 0.2, -4)]
    assert sizes == [3, 2, 1, 1, 1, 1]
    short = [Claiming(trip_ms=20.0, slot_ms=2.0, count=100, left=left).size for left in (60.0, 30.0, 12.0, 8.0, 1.9)]
    assert short == [20, 15, 10, 8, 1], "a part that lasts less than a round trip is claimed whole"


def test_a_rank_with_its_part_asks_for_one_slot_and_not_early() -> None:
    slow = Claiming(trip_ms=20.0, slot_ms=100.0, count=10, left=2.5)
    assert slow.size_to_ask(8, 0) == 0, "its feed holds 800 ms"
    short = Claiming(trip_ms=20.0, slot_ms=2.0, count=100, left=-3.0)
    assert [short.size_to_ask(held, held - 1) for held in (30, 20, 19, 1)] == [0, 0, 1, 1]


@given(st.floats(0.3, 1e4), st.floats(0.01, 1e3), st.integers(1, 200), st.floats(-10.0, FAR), st.integers(0, 500))
def test_nothing_measured_makes_a_rank_hold_more_than_four_windows(
    trip_ms: float, slot_ms: float, count: int, left: float, held: int
) -> None:
    claiming = Claiming(trip_ms, slot_ms, count, left)
    asked = claiming.size_to_ask(held, held)
    assert asked == 0 or held + asked <= 4 * count
    assert not asked or held + asked <= claiming.most_held


def test_an_outlier_does_not_change_the_measured_round_trip() -> None:
    assert typical_ms([]) == 0.0
    assert typical_ms([20.0, 3000.0]) == 20.0
    assert typical_ms([1.0, 1.0, 1.0, 20.0, 21.0, 500.0, 19.0, 20.0]) == 20.0, "of the last ones"


# Whatever replies take (every slot once, events respected, limits kept: checked in the simulation)


@st.composite
def far_clusters(draw: st.DrawFn) -> Cluster:
    return replace(
        draw(clusters()),
        trip_ms=draw(st.sampled_from([0.3, 3.0, 20.0, 300.0])),
        trip_jitter=draw(st.sampled_from([0.0, 0.5, 0.99])),
        late=draw(st.sampled_from([0.0, 0.05, 0.5])),
    )


@settings(deadline=None)
@given(
    far_clusters(),
    st.sampled_from([1, 3, 10]),
    st.sampled_from([None, 0.3, 1.0]),
    st.integers(0, 4),
    st.sets(st.integers(0, 12)),
    st.booleans(),
)
def test_every_slot_once_whatever_the_replies_take(
    cluster: Cluster, anchor: int, hint: float | None, max_staleness: int, wishes: set[int], freezes: bool
) -> None:
    cluster = replace(cluster, freeze=(0, 0.1, 2000.0) if freezes else None)
    hints = None if hint is None else [ms * (hint if rank else 1.0) for rank, ms in enumerate(cluster.slot_ms)]
    config = LocalSGDConfig(is_async=True, anchor=anchor)
    outcome = Simulation(cluster, config, hints, max_staleness or None, wishes=wishes).run()
    assert outcome.most_lead <= (max_staleness or 10**6)
    assert outcome.requested <= {one.due for one in outcome.rounds}, "an event without a round"


def test_a_rank_that_is_left_out_with_a_claim_past_the_end_waits_for_its_round() -> None:
    """It asked again and again whether the average was there: its claim lay beyond the event, and it held nothing."""
    cluster = Cluster([0.5, 1.5, 1.5], 55, seed=24, jitter=0.3, trip_ms=300.0, lookahead=1, claim_ms=0.0, short=1)
    cluster = replace(cluster, stop=(2, 0, 2000.0), freeze=(0, 0.1, 2000.0), change=(0, 18, 100.0), recovers=36)
    config = LocalSGDConfig(is_async=True, anchor=1)
    assert Simulation(cluster, config, [0.5, 0.45, 0.45], wishes={0}).run().rounds


@settings(max_examples=settings().max_examples // 2, deadline=None)
@given(far_clusters(), st.sampled_from([1, 10]), st.integers(0, 4), st.booleans())
def test_streams_whose_ends_nobody_knows_whatever_the_replies_take(
    cluster: Cluster, anchor: int, max_staleness: int, hinted: bool
) -> None:
    hints = list(cluster.slot_ms) if hinted else None
    config = LocalSGDConfig(is_async=True, anchor=anchor)
    Simulation(replace(cluster, hides_ends=True), config, hints, max_staleness or None).run()


# Little waited


FAST = ([2.0, 5.0], [5.0, 5.0], [2.0, 2.0, 2.0, 5.0])


def link(slot_ms: list[float], *, asks: bool, epoch: int | None, lookahead: int = 0, trip_ms: float = 20.0) -> float:
    """The share of their time that ranks wait for claims, over a link like that; averages take 100 ms."""
    cluster = Cluster(slot_ms, 2000, transfer_ms=100.0, touch_ms=1.0, epoch=epoch, lookahead=lookahead, trip_jitter=0.2)
    cluster = replace(cluster, trip_ms=trip_ms if asks else None, claim_ms=trip_ms)
    outcome = Simulation(cluster, ASYNC, list(slot_ms)).run()
    return outcome.claims_ms / (cluster.ranks * outcome.makespan_ms)


@pytest.mark.parametrize("slot_ms", FAST, ids=str)
def test_over_20_ms_claims_cost_little(slot_ms: list[float]) -> None:
    """Two epochs of 1,000 slots. Where every claim is waited for they cost 22 to 44 % of the time."""
    assert link(slot_ms, asks=False, epoch=1000) > 0.2
    assert link(slot_ms, asks=True, epoch=1000) < 0.06
    assert link(slot_ms, asks=True, epoch=1000, lookahead=8) < 0.06


@pytest.mark.parametrize("slot_ms", [[10.0, 25.0, 14.0], [100.0, 250.0], [1.0, 1.0, 10.0]], ids=str)
@pytest.mark.parametrize("trip_ms", [0.1, 0.5, 20.0])
def test_asking_ahead_is_never_slower_than_waiting(slot_ms: list[float], trip_ms: float) -> None:
    cluster = Cluster(slot_ms, 1000, transfer_ms=10.0, touch_ms=1.0, epoch=500, claim_ms=trip_ms)
    waited = Simulation(cluster, ASYNC, list(slot_ms)).run()
    asked = Simulation(replace(cluster, trip_ms=trip_ms), ASYNC, list(slot_ms)).run()
    assert asked.makespan_ms < 1.02 * waited.makespan_ms


def test_a_link_that_becomes_slow_is_followed() -> None:
    """A reply that is 50 times late now and then is outlasted or waited for once, and nothing else follows from it."""
    cluster = Cluster([2.0, 5.0], 2000, transfer_ms=20.0, trip_ms=20.0, late=0.01)
    outcome = Simulation(cluster, ASYNC, list(cluster.slot_ms)).run()
    late_ms = 50 * 20.0 * 0.01 * outcome.claims
    assert outcome.claims_ms < 1.5 * late_ms + 200.0


# One schedule


class Replies:
    """Claims whose replies come when the test says so; others have claimed `taken` slots before each of them."""

    trip_ms = 20.0

    def __init__(self, taken: Callable[[], int] = lambda: 0) -> None:
        self.taken, self.counter, self.is_here = taken, 0, False
        self.asked: deque[tuple[int, int]] = deque()  # (first, count)
        self.sizes: list[int] = []

    def claim(self, count: int) -> int:
        self.counter += self.taken()
        self.counter += count
        self.sizes.append(count)
        return self.counter - count

    def ask(self, count: int) -> None:
        assert not self.asked, "one claim on its way"
        self.asked.append((self.claim(count), count))
        self.is_here = False

    def is_there(self) -> bool:
        return self.is_here

    def take(self) -> int:
        return self.asked.popleft()[0]


def alone(total: int, event: int, replies: Replies, slot_ms: float = 2.0) -> tuple[Windows, SlotSchedule]:
    """Rank 0 of two of one speed."""
    windows = Windows(ASYNC, 2, 64, lambda slot: event if slot < event else total, [slot_ms, slot_ms])
    return windows, SlotSchedule(windows, 0, total, replies.claim, ahead=replies)


def test_a_claim_on_its_way_is_waited_for_only_when_nothing_is_left() -> None:
    replies = Replies()
    _, schedule = alone(10_000, 10_000, replies)
    first = [schedule.hand()]
    assert replies.sizes == [20, 20], "the first is waited for, the next one asked for at once"
    for _ in range(19):
        schedule.trained()
        first.append(schedule.hand())
    assert first == list(range(20))
    assert schedule.next_slot == 19, "held, so nothing has to be known of the claim on its way"
    assert len(replies.asked) == 1
    schedule.trained()
    assert schedule.next_slot == 20
    assert not replies.asked


def test_a_feed_that_reads_ahead_gets_nothing_instead_of_waiting() -> None:
    replies = Replies()
    _, schedule = alone(10_000, 10_000, replies)
    held = [schedule.hand() for _ in range(23)]
    assert held == [*range(20), None, None, None]
    replies.is_here = True
    assert [schedule.hand() for _ in range(3)] == [20, 21, 22]


def test_a_reply_that_comes_late_is_awaited_before_the_round_at_an_event() -> None:
    """The others have trained all the rest: the event's round needs this rank's slots, and its next one beyond it."""
    replies = Replies(taken=lambda: 4)
    windows, schedule = alone(60, 20, replies)
    assert windows.due == windows.event == 20
    trained = []
    while not schedule.is_due():
        slot = schedule.hand()
        assert slot is not None
        trained.append(slot)
        schedule.trained()
    schedule.await_claim()
    assert not replies.asked
    assert trained == sorted(trained)
    assert schedule.next_slot >= 20
    report = RoundReport(next_slot=schedule.next_slot, limit=schedule.set_limit())
    schedule.enter()
    windows.note([report, RoundReport(next_slot=20)])
    schedule.merged()
    assert windows.last_event == 20
    assert schedule.hand() == report.next_slot, "a claim past the event is kept"


def test_a_claim_on_its_way_when_a_round_is_entered_keeps_to_the_limit() -> None:
    replies = Replies()
    windows, schedule = alone(100_000, 100_000, replies)
    while not schedule.is_due():
        assert schedule.hand() is not None
        schedule.trained()
    assert len(replies.asked) == 1
    limit = schedule.set_limit()
    schedule.enter()
    replies.asked[0] = (limit - 2, replies.asked[0][1])  # the others have gone on meanwhile
    handed = []
    while (slot := schedule.hand()) is not None:
        handed.append(slot)
        schedule.trained()
    assert handed[-2:] == [limit - 2, limit - 1]
    assert schedule.may_merge(has_arrived=False), "it waits for the average"
    windows.note([RoundReport(next_slot=limit, limit=limit), RoundReport(next_slot=windows.due, limit=limit - 9)])
    schedule.merged()
    assert schedule.hand() == limit


def test_slots_left_out_while_a_claim_was_on_its_way_are_dropped() -> None:
    replies = Replies()
    _, schedule = alone(200, 50, replies)
    assert schedule.hand() == 0
    assert replies.asked[0][0] == 12
    schedule.drop_before(50)
    assert schedule.next_slot >= 50, "what comes with the late reply lies before it"
    assert not replies.asked
