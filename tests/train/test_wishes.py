"""Checkpoints and evaluations by the clock: rank 0 keeps the time, and whoever becomes rank 0 goes on with it."""

from pathlib import Path

import pytest

from tests.train.clusters import Loss
from tests.train.elastic.lossy_runs import train
from uneven.config import read_every
from uneven.hardware.device import parse_devices
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.wishes import Wish, Wishes

AT_ONCE = "0.0000001 s"  # over with every step
STEPS = 6


def test_the_rank_that_becomes_the_first_goes_on_with_the_intervals() -> None:
    infos = [RankInfo(rank, parse_devices("cpu,cpu")) for rank in range(2)]
    first, second = (Wishes(read_every("10 s"), read_every("4 s"), Requests(), info) for info in infos)
    seconds = 10**9
    for wishes in (first, second):
        wishes.start(0)
        wishes.evaluated(5 * seconds)
    assert (first.ask(11 * seconds), second.ask(11 * seconds)) == (Wish.SAVE | Wish.EVALUATE, Wish.NONE)
    infos[0].rank, infos[1].rank = 1, 0
    second.start(8 * seconds)  # with the ranks that are left
    assert second.ask(8 * seconds) == Wish.NONE
    assert second.ask(9 * seconds) == Wish.EVALUATE
    assert second.ask(10 * seconds) == Wish.SAVE | Wish.EVALUATE, "by the time of the last one"
    second.saved(10 * seconds)
    assert second.ask(19 * seconds) == Wish.EVALUATE
    assert first.ask(99 * seconds) == Wish.NONE
    first.requests.save.set()
    assert first.ask(99 * seconds) == Wish.SAVE, "any rank may ask for one"


def test_checkpoints_go_on_when_rank_0_is_lost(tmp_path: Path) -> None:
    _, leader = train(3, [], policy="sync", save_every=AT_ONCE, out=tmp_path / "plain")
    for number, place in enumerate((leader.begun, leader.begun + 17)):
        found, _ = train(3, [Loss("m0", place)], policy="sync", save_every=AT_ONCE, out=tmp_path / f"{number}")
        assert set(found) == {"m1", "m2"}
        for state, _ in found.values():
            assert state.saves == list(range(1, STEPS + 1))


@pytest.mark.parametrize("blind", ["m0", "m2"])
def test_a_rank_that_missed_a_wish_follows_it(blind: str, tmp_path: Path) -> None:
    """The wish was in the sum that it did not get, and the others met for it."""
    _, leader = train(3, [], policy="sync", save_every=AT_ONCE, out=tmp_path / "plain")
    for place in range(leader.begun, leader.begun + 12):
        loss = Loss("m1", place, after=True, blind=frozenset({blind}))
        found, _ = train(3, [loss], policy="sync", save_every=AT_ONCE, out=tmp_path / f"{place}")
        assert set(found) == {"m0", "m2"}
        for state, _ in found.values():
            assert state.saves == list(range(1, STEPS + 1)), place
