"""The controller of the local policies: windows tile the axis, counts and anchor settle and follow, the guard holds."""

import json
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Decision, LocalSGDConfig, Windows

FAR = 10**9


def far(slot: int) -> int:
    del slot
    return FAR


def every(epoch: int, total: int) -> Callable[[int], int]:
    return lambda slot: min((slot // epoch + 1) * epoch, total)


class Ranks:
    """Ranks of given speeds that meet in rounds at once: what the controller sees of them, without a clock."""

    def __init__(self, windows: Windows, ms: Sequence[float], jitter: float = 0.0, seed: int = 0) -> None:
        self.windows, self.ms, self.jitter = windows, list(ms), jitter
        self.rng = random.Random(seed)
        self.transfer_ms = self.latency_ms = self.divergence = 0.0
        self.made: list[tuple[int, Decision]] = []

    def rows(self) -> list[RoundReport]:
        cut = self.windows.cut()
        rows = []
        for count, ms in zip(cut, self.ms, strict=True):
            # Independent slots: the error of their sum falls with the root of the count.
            noise = self.rng.uniform(-1, 1) * self.jitter / max(1, count) ** 0.5
            rows.append(
                RoundReport(
                    next_slot=self.windows.due,
                    samples=64.0 * count,
                    busy_ms=count * ms * (1.0 + noise),
                    transfer_ms=self.transfer_ms,
                    latency_ms=self.latency_ms,
                    divergence=self.divergence,
                )
            )
        return rows

    def meet(self, rounds: int = 1) -> list[Decision]:
        found = []
        for _ in range(rounds):
            made = self.windows.note(self.rows())
            self.made += [(self.windows.rounds, one) for one in made]
            found += made
        return found

    def moves(self, kind: str, since: int = 0) -> int:
        return sum(one.kind == kind for number, one in self.made if number >= since)

    def loss(self) -> float:
        """The part of a window that ranks wait for the last one, by their true speeds."""
        busy_ms = [count * ms for count, ms in zip(self.windows.counts, self.ms, strict=True)]
        return 1.0 - sum(busy_ms) / (len(busy_ms) * max(busy_ms))


def random_ms(rng: random.Random, ranks: int) -> list[float]:
    gap = rng.choice([1.0, 1.5, 2.0, 2.5, 4.0, 10.0])
    return [10.0 * rng.uniform(1.0, gap) for _ in range(ranks - 1)] + [10.0 * gap]


def make(
    ms: list[float] | None, ranks: int = 2, next_event: Callable[[int], int] = far, is_async: bool = False
) -> Windows:
    return Windows(LocalSGDConfig(is_async=is_async), ranks if ms is None else len(ms), 64, next_event, ms)


# Counts and windows


def test_counts_let_all_ranks_finish_together() -> None:
    windows = make([10.0, 25.0])
    assert windows.counts == windows.cut() == (25, 10)
    assert windows.due == 35


def test_fixed_shares_give_the_documented_counts_and_nothing_moves() -> None:
    windows = Windows(LocalSGDConfig(shares=(5.0, 2.0)), 2, 64, far)
    assert windows.counts == (25, 10)
    ranks = Ranks(windows, [30.0, 10.0], jitter=0.3)
    ranks.transfer_ms, ranks.divergence = 500.0, 3.0
    assert ranks.meet(20) == []
    assert windows.counts == windows.cut() == (25, 10)
    assert windows.start == 20 * 35


def test_a_share_of_nothing_gets_nothing() -> None:
    windows = Windows(LocalSGDConfig(shares=(3.0, 0.0, 1.0)), 3, 64, every(8, 16))
    assert windows.counts == (30, 0, 10)
    assert windows.cut() == (6, 0, 2)


@settings(max_examples=settings().max_examples // 2)
@given(
    st.lists(st.floats(0.1, 100.0), min_size=1, max_size=12),
    st.integers(1, 80),
    st.integers(1, 400),
    st.sampled_from([1, 3, 10]),
    st.booleans(),
)
def test_windows_tile_the_axis_and_stop_at_every_event(
    ms: list[float], epoch: int, total: int, anchor: int, has_hints: bool
) -> None:
    windows = Windows(LocalSGDConfig(anchor=anchor), len(ms), 64, every(epoch, total), ms if has_hints else None)
    ranks = Ranks(windows, ms, jitter=0.1)
    at, passed = 0, []
    while not windows.is_over:
        assert windows.start == at < windows.due <= windows.event
        assert windows.due - windows.start <= max(sum(windows.counts), len(ms))
        cut = windows.cut()
        assert sum(cut) == windows.due - windows.start
        assert min(cut) >= 0
        passed += [windows.due] if windows.due == windows.event else []
        at = windows.due
        ranks.meet()
    assert passed == [*range(epoch, total, epoch), total]


def test_the_last_two_windows_before_an_event_are_equally_long() -> None:
    windows = make([10.0, 25.0], next_event=every(36, 72))
    ranks = Ranks(windows, [10.0, 25.0])
    assert windows.cut() == (13, 5)
    ranks.meet()
    assert windows.cut() == (13, 5)
    assert windows.due == windows.event == 36


def test_a_window_shorter_than_the_ranks_leaves_some_without_slots() -> None:
    windows = make([10.0, 10.0, 100.0], next_event=every(2, 4))
    assert windows.cut() == (1, 1, 0)


def test_a_round_before_an_event_does_not_pass_it() -> None:
    # A stop request is such a round: ranks enter it wherever they are.
    windows = make([10.0, 25.0], next_event=every(20, 40))
    assert windows.due == windows.event == 20
    windows.note([RoundReport(next_slot=20), RoundReport(next_slot=18)])
    assert windows.event == 20
    assert not windows.is_over


def test_rounds_go_on_from_the_rank_that_is_farthest() -> None:
    windows = make([10.0, 25.0], is_async=True)
    windows.note([RoundReport(next_slot=90), RoundReport(next_slot=36)])
    assert (windows.start, windows.due) == (90, 125)


def test_what_blocks() -> None:
    assert make([10.0, 25.0]).is_blocking
    background = make([10.0, 25.0], next_event=every(70, 140), is_async=True)
    assert not background.is_blocking
    Ranks(background, [10.0, 25.0]).meet()
    assert background.is_blocking  # an event
    unmeasured = make(None, is_async=True)
    assert unmeasured.is_blocking
    Ranks(unmeasured, [10.0, 25.0]).meet(2)
    assert not unmeasured.is_blocking


# What is learned about speeds


def test_without_hints_the_second_window_is_measured() -> None:
    windows = make(None)
    assert windows.cut() == (1, 1)
    Ranks(windows, [5000.0, 10.0]).meet()  # the first step compiles
    assert windows.cut() == (1, 1)
    Ranks(windows, [10.0, 25.0]).meet()
    assert windows.counts == (25, 10)


def test_a_rank_that_had_no_slot_yet_is_taken_for_a_slow_one() -> None:
    windows = make(None, ranks=3, next_event=every(2, 1000))
    Ranks(windows, [10.0, 25.0, 10.0]).meet(2)
    assert windows.counts == (25, 10, 10)


def test_a_slot_of_few_samples_says_nothing() -> None:
    windows = make([10.0, 25.0])
    for _ in range(5):
        windows.note([RoundReport(next_slot=windows.due, samples=1, busy_ms=8.0), RoundReport(next_slot=windows.due)])
    assert windows.counts == (25, 10)


@pytest.mark.parametrize("factor", [200.0, 3.0, 0.2])
def test_one_odd_window_changes_nothing(factor: float) -> None:
    windows = make([10.0, 25.0])
    ranks = Ranks(windows, [10.0, 25.0])
    ranks.meet(5)
    ranks.ms[0] *= factor
    ranks.meet()
    ranks.ms[0] /= factor
    ranks.meet(5)
    assert ranks.made == []


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64])
def test_thousands_of_clusters_with_wrong_hints_settle_within_four_rounds_and_stay(ranks: int) -> None:
    rng = random.Random(ranks)
    clusters = 250 if ranks <= 4 else 50 if ranks <= 16 else 5
    losses, late = [], 0
    for seed in range(clusters):
        ms = random_ms(rng, ranks)
        hints = [one * rng.choice([0.5, 0.7, 1.0, 1.3, 2.0]) for one in ms]
        known = Ranks(make(hints), ms, jitter=0.05, seed=seed)
        known.meet(4)
        losses.append(known.loss())
        known.meet(16)
        late += known.moves("counts", since=6)
        assert known.loss() < 0.08
        assert known.windows.anchor <= 24
    # What remains is what whole counts cost, at most half a slot of ten, and the dead band; with many ranks there is
    # always one whose estimate is off.
    assert max(losses) < 0.1
    assert sum(losses) / clusters < (0.025 if ranks <= 16 else 0.04)
    assert late / clusters < 1.0


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.5, 3.0])
def test_counts_follow_a_changed_speed_within_three_rounds(factor: float) -> None:
    rng = random.Random(1)
    for seed in range(60):
        ranks = Ranks(make([10.0, 25.0, 14.0]), [10.0, 25.0, 14.0], jitter=0.05, seed=seed)
        ranks.meet(10)
        ranks.ms[rng.randrange(3)] *= factor
        ranks.meet(3)
        assert ranks.loss() < 0.06
        ranks.meet(20)
        assert ranks.moves("counts", since=16) <= 2


def test_copies_with_the_same_reports_are_equal_and_others_are_not() -> None:
    rng = random.Random(0)
    copies = [make([10.0, 25.0, 11.0]) for _ in range(3)]
    for _ in range(30):
        same = [
            RoundReport(copies[0].due, 64 * 5, rng.uniform(40, 60), transfer_ms=rng.uniform(0, 9)) for _ in range(3)
        ]
        other = [report._replace(busy_ms=report.busy_ms * 1.001) for report in same]
        for windows, reports in zip(copies, (same, same, other), strict=True):
            windows.note(reports)
        assert copies[0].fingerprint() == copies[1].fingerprint() < 2**24
    assert copies[0].fingerprint() != copies[2].fingerprint()


# The anchor


@pytest.mark.parametrize("transfer_ms", [0.1, 5.0, 20.0, 80.0, 1000.0])
def test_the_anchor_reaches_the_overhead_target_and_stays(transfer_ms: float) -> None:
    windows = make([10.0, 25.0])
    ranks = Ranks(windows, [10.0, 25.0], jitter=0.1)
    anchors = []
    for _ in range(60):
        ranks.transfer_ms = transfer_ms * ranks.rng.uniform(0.8, 1.2)
        ranks.meet()
        anchors.append(windows.anchor)
        assert 10.0 <= windows.anchor <= 200.0
    assert anchors == sorted(anchors)  # no ping-pong
    assert len(set(anchors[12:])) <= 2  # no endless growth
    overhead = transfer_ms / (25.0 * windows.anchor)
    assert overhead < 0.031 or windows.anchor == 200.0
    assert windows.anchor == 10.0 or overhead > 0.015


def test_the_anchor_comes_back_when_rounds_are_cheap_again() -> None:
    windows = make([10.0, 25.0])
    ranks = Ranks(windows, [10.0, 25.0])
    ranks.transfer_ms = 80.0
    ranks.meet(20)
    assert windows.anchor > 100.0
    ranks.transfer_ms = 1.0
    ranks.meet(40)
    assert windows.anchor == 10.0


def test_one_slow_round_does_not_make_windows_longer() -> None:
    windows = make([10.0, 25.0])
    ranks = Ranks(windows, [10.0, 25.0])
    ranks.meet(10)
    ranks.transfer_ms = 5000.0
    ranks.meet()
    ranks.transfer_ms = 0.0
    ranks.meet(10)
    assert ranks.made == []


def test_whole_counts_that_split_badly_make_windows_longer() -> None:
    # One slot a window against one and a half: a third of the window is lost.
    windows = Windows(LocalSGDConfig(anchor=1), 2, 64, far, [10.0, 15.0])
    ranks = Ranks(windows, [10.0, 15.0])
    ranks.meet(20)
    assert ranks.loss() <= 0.04
    assert 3 < windows.anchor < 12


@pytest.mark.parametrize("latency_ms", [1.0, 40.0, 200.0])
def test_an_average_in_the_background_takes_a_tenth_of_its_window_at_most(latency_ms: float) -> None:
    windows = make([10.0, 25.0], is_async=True)
    ranks = Ranks(windows, [10.0, 25.0], jitter=0.1)
    ranks.latency_ms = latency_ms
    ranks.meet(30)
    assert latency_ms <= 0.101 * 25.0 * windows.anchor
    assert windows.anchor == 10.0 or latency_ms > 0.05 * 25.0 * windows.anchor
    assert ranks.moves("anchor", since=12) == 0


# The guard


def drifting(divergences: Sequence[float], transfer_ms: float = 80.0) -> Ranks:
    ranks = Ranks(make([10.0, 25.0]), [10.0, 25.0])
    ranks.transfer_ms = transfer_ms
    for ranks.divergence in divergences:
        ranks.meet()
    return ranks


def test_three_rises_hold_the_anchor_until_the_divergence_is_small_again() -> None:
    ranks = drifting([0.06, 0.07, 0.08, 0.075, 0.075, 0.07, 0.075])
    assert ranks.windows.is_held
    assert ranks.windows.anchor == 10.0
    assert ranks.moves("guard") == 1
    ranks.divergence = 0.03
    ranks.meet(3)
    assert not ranks.windows.is_held
    assert ranks.windows.anchor > 20.0


@pytest.mark.parametrize("divergences", [[0.06, 0.05, 0.06, 0.05], [0.2, 0.15, 0.2, 0.15], [0.01, 0.02, 0.03, 0.04]])
def test_large_or_rising_alone_does_not_hold(divergences: list[float]) -> None:
    ranks = drifting(divergences * 3)
    assert ranks.moves("guard") == 0
    assert ranks.windows.anchor > 50.0


def test_a_persistent_rise_shrinks_the_anchor_and_recovery_brings_it_back() -> None:
    ranks = drifting([0.05 + 0.01 * round_ for round_ in range(1, 30)])
    assert ranks.windows.anchor == 1.0
    ranks.divergence, ranks.transfer_ms = 0.01, 1.0
    ranks.meet(6)
    assert 2.0 < ranks.windows.anchor < 10.0
    ranks.meet(10)
    assert ranks.windows.anchor == 10.0
    assert not ranks.windows.is_held


@pytest.mark.parametrize("is_async", [False, True])
def test_a_copy_that_loads_the_state_goes_on_alike(is_async: bool) -> None:
    config = LocalSGDConfig(is_async=is_async, divergence_threshold=0.01)
    for hints in ([10.0, 25.0, 13.0], None):
        ranks = Ranks(Windows(config, 3, 64, every(200, 2000), hints), [10.0, 25.0, 17.0], jitter=0.2)
        ranks.transfer_ms, ranks.latency_ms = 3.0, 5.0
        copy = Windows(config, 3, 64, every(200, 2000), [1.0, 2.0, 3.0])
        for number in range(12):
            ranks.divergence = 0.01 * number
            copy.load_state_dict(json.loads(json.dumps(ranks.windows.state_dict())))
            assert copy.fingerprint() == ranks.windows.fingerprint()
            rows = ranks.rows()
            assert ranks.windows.note(rows) == copy.note(rows)
            assert copy.fingerprint() == ranks.windows.fingerprint()
            assert (copy.last_event, copy.is_measured) == (ranks.windows.last_event, ranks.windows.is_measured)
        assert copy.is_held
    with pytest.raises(ValueError, match="the state of 3 ranks does not fit 2"):
        Windows(config, 2, 64, every(200, 2000)).load_state_dict(ranks.windows.state_dict())


def test_a_run_goes_on_at_a_slot_as_after_a_round_at_an_event() -> None:
    ranks = Ranks(Windows(LocalSGDConfig(), 2, 64, every(50, 120), [10.0, 10.0]), [10.0, 10.0])
    ranks.meet(3)
    windows = ranks.windows
    assert windows.last_event == windows.start == 50
    fresh = Windows(LocalSGDConfig(), 2, 64, every(50, 120), [10.0, 10.0])
    fresh.resume_at(50)
    assert (fresh.start, fresh.event, fresh.due, fresh.last_event) == (windows.start, windows.event, windows.due, 50)
    fresh.resume_at(57)
    assert (fresh.start, fresh.event, fresh.due, fresh.last_event, fresh.is_over) == (57, 100, 77, 57, False)
    fresh.resume_at(120)
    assert fresh.is_over
