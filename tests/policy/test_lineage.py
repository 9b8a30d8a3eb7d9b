"""What counts when ranks are lost: the slots of the lineage and of those who are left, each once."""

import random

import pytest

from uneven.policy.ledger import Ledger
from uneven.policy.lineage import Era, Held, Lineage, Part, decode, encode, settled_ledger, trained_again
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_schedule import SlotSchedule
from uneven.policy.windows import LocalSGDConfig, Windows


def slots(*numbers: int) -> list[Part]:
    return [(number, 4 * (number % 5), 4) for number in numbers]


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_read_as_they_were_written(seed: int) -> None:
    chosen = random.Random(seed)
    parts = [*slots(*sorted(chosen.sample(range(40), 25))), (40, 0, 3), (40, 3, 1), (41, 0, 3)]
    assert decode(encode(parts)) == parts
    assert len(encode(slots(0, 1, 2, 3, 4, 5, 6))) == 2, "an epoch's slots that follow each other are one entry"


def test_what_a_lost_rank_had_not_handed_in_is_trained_again() -> None:
    held = [Held(encode(slots(10, 13)), given=(16,)), Held(encode(slots(11)))]
    ledger = settled_ledger(held, [slots(3, 12)], passed=10)
    assert ledger == Ledger(14, 14), "slots before the last event count, whoever trained them"
    held.append(Held(encode(slots(17)), given=()))
    ledger = settled_ledger(held, [slots(12)], passed=10)
    assert ledger.gaps == ((14, 17),)
    assert trained_again(ledger, held) == [14, 15], "16 was still to be trained by a rank that is left"


def test_a_slot_that_two_have_trained_is_found_out() -> None:
    with pytest.raises(ValueError, match="trained twice"):
        settled_ledger([Held(encode(slots(10, 11)))], [slots(11)], passed=10)


def test_a_lineage_knows_who_is_gone_and_how_many_rounds_count() -> None:
    lineage = Lineage([Era(0, 7, ("a", "b", "c")), Era(2, 0, ("a", "c"))], 3, ("c",), 4)
    assert lineage.merged == 11
    assert lineage.gone(("c",)) == ["a", "b"]
    assert lineage.eras[-1] == Era(3, 4, ("c",))


def make_windows(ranks: int, slot_ms: list[float] | None = None) -> Windows:
    return Windows(LocalSGDConfig(anchor=4), ranks, 8, lambda slot: 100 if slot < 100 else 200, slot_ms)


def test_windows_go_on_with_the_speeds_of_those_who_are_left() -> None:
    old = make_windows(3, [1.0, 2.0, 4.0])
    for _ in range(3):
        old.note([RoundReport(next_slot=float(old.due), samples=80.0, busy_ms=10.0 * ms) for ms in (1.0, 2.0, 8.0)])
    new = make_windows(2, [9.0, 9.0])
    new.go_on(old.state_dict(), [2, 0])
    new.resume_at(40, last_event=0)
    assert new.times.ms.tolist() == [old.times.ms[2], old.times.ms[0]]
    assert (new.rounds, new.anchor, new.start, new.event) == (old.rounds, old.anchor, 40, 100)
    assert new.counts[1] / new.counts[0] == pytest.approx(old.times.ms[2] / old.times.ms[0], rel=0.2)
    newcomer = make_windows(2, [9.0, 3.0])
    newcomer.go_on(old.state_dict(), [2, None])
    assert newcomer.times.ms.tolist() == [old.times.ms[2], 3.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_event_at_the_very_slot_where_ranks_go_on_has_its_round(is_async: bool) -> None:
    """Everything before it was trained, and the round there came to nothing."""
    config = LocalSGDConfig(anchor=4, is_async=is_async)
    windows = Windows(config, 1, 8, lambda slot: 100 if slot < 100 else 200, [1.0])
    windows.resume_at(100, last_event=0)
    schedule = SlotSchedule(windows, 0, 200, (lambda count: 0) if is_async else None)
    assert schedule.hand() is None
    assert windows.is_blocking
    assert schedule.is_due()
    schedule.enter()
    windows.note([RoundReport(next_slot=float(schedule.next_slot))])
    assert (windows.last_event, windows.event) == (100, 200)
    schedule.merged()
    assert schedule.hand() == 100
