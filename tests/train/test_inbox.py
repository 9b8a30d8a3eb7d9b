"""Checkpoints and evaluations by the clock: rank 0 keeps the time, and whoever becomes rank 0 goes on with it."""

from pathlib import Path
from typing import Any, cast

import pytest

from tests.train.clusters import Loss
from tests.train.elastic.lossy_runs import train
from uneven.config import read_every, resolve
from uneven.hardware.device import parse_devices
from uneven.train.callbacks import CallbackRunner
from uneven.train.rank_info import RankInfo
from uneven.train.requests import Requests
from uneven.train.synchronizer import Inbox, Wish

AT_ONCE = "0.0000001 s"  # over with every step
STEPS = 6


class Clock:
    """In seconds, for `Inbox` in ns."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now * 10**9


def inboxes(clock: Clock, **settings: str) -> tuple[list[Inbox], list[RankInfo]]:
    """Of two ranks."""
    infos = [RankInfo(rank, parse_devices("cpu,cpu")) for rank in range(2)]
    config = resolve({"batch_size": 1, "epochs": 1, "out": "unused", **settings})
    callbacks = [CallbackRunner((), cast(Any, None)) for _ in infos]
    every = read_every("4 s")
    found = [Inbox(config, every, Requests(), own, info, clock) for own, info in zip(callbacks, infos, strict=True)]
    return found, infos


def test_the_rank_that_becomes_the_first_goes_on_with_the_intervals() -> None:
    clock = Clock()
    (first, second), infos = inboxes(clock, save_every="10 s")

    def wishes(inbox: Inbox, now: int) -> Wish:
        clock.now = now
        return inbox.read().wish

    for inbox in (first, second):
        inbox.start()
    clock.now = 5
    for inbox in (first, second):
        inbox.evaluated()
    assert (wishes(first, 11), wishes(second, 11)) == (Wish.SAVE | Wish.EVALUATE, Wish.NONE)
    infos[0].rank, infos[1].rank = 1, 0
    clock.now = 8
    second.start()  # with the ranks that are left
    assert wishes(second, 8) == Wish.NONE
    assert wishes(second, 9) == Wish.EVALUATE
    assert wishes(second, 10) == Wish.SAVE | Wish.EVALUATE, "by the time of the last one"
    second.saved()
    assert wishes(second, 19) == Wish.EVALUATE
    assert wishes(first, 99) == Wish.NONE
    first.requests.save.set()
    assert wishes(first, 99) == Wish.SAVE, "any rank may ask for one"


def test_a_request_to_stop_is_read_as_a_value() -> None:
    (inbox, _), _ = inboxes(Clock())
    assert not inbox.read().is_stopping
    inbox.requests.stop.set()
    assert inbox.read().is_stopping


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
