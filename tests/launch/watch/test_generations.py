"""Which ranks go on when others are lost, and when the run ends instead: no process, no store, no clock."""

from typing import Any

import pytest

from uneven.errors import RankError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.local_ranks import Newcomer
from uneven.launch.watch.generations import MOST_REPEATS, Generations, describe_loss, steps_done
from uneven.train.rank_info import Generation

MEMBERS = ("pc/cuda:0/a", "pc/cpu/b", "laptop/cpu/c", "mini/cpu/d", "mini/cpu@0.4/e")
ROSTER = Roster(parse_devices("cuda:0,cpu,cpu,cpu,cpu@0.4"), (0, 0, 1, 2, 2), ("pc", "laptop", "mini"))
SURVIVABLE: list[dict[str, Any]] = [{"min_ranks": 1, "slot": 3}] * 5


def test_ranks_keep_their_order_and_machines_are_numbered_anew() -> None:
    generations = Generations(ROSTER, MEMBERS)
    found = generations.drop([0, 2], "why")
    assert found == Generation(
        1, Roster(parse_devices("cpu,cpu,cpu@0.4"), (0, 1, 1), ("pc", "mini")), MEMBERS[1:2] + MEMBERS[3:], "why"
    )
    assert generations.numbers == [1, 3, 4]
    again = generations.drop([3], "once more")
    assert (again.number, again.members) == (2, (MEMBERS[1], MEMBERS[4]))
    assert again.roster == Roster(parse_devices("cpu,cpu@0.4"), (0, 1), ("pc", "mini"))


def test_a_generation_is_read_as_it_was_written() -> None:
    found = Generations(ROSTER, MEMBERS).drop([1], "rank 1 is lost")
    assert Generation.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("lost", "changes", "refusal"),
    [
        ([2], {}, None),
        ([1, 2, 3, 4], {}, None),
        ([0, 1], {}, "no rank is left on pc, which leads the run and has its files"),
        ([0, 1, 2, 3, 4], {}, "no rank is left"),
        ([2], {3: {"slot": 0}}, ""),  # one that has not begun, or cannot go on
        ([2], {2: {}}, None),  # what the lost one says does not matter
        ([2, 3], {1: {"min_ranks": 4}}, "3 ranks are left, and min_ranks=4"),
        ([1, 2, 3, 4], {0: {"min_ranks": 2}}, "1 rank is left, and min_ranks=2"),
        ([2], {0: {"min_ranks": 4}}, None),
    ],
)
def test_when_the_others_go_on(lost: list[int], changes: dict[int, Any], refusal: str | None) -> None:
    statuses = [changes.get(number, status) for number, status in enumerate(SURVIVABLE)]
    assert Generations(ROSTER, MEMBERS).refusal(statuses, lost) == refusal


def test_those_who_left_before_are_not_asked_again() -> None:
    generations = Generations(ROSTER, MEMBERS)
    generations.drop([0, 2], "")
    statuses = [{}, SURVIVABLE[1], {}, SURVIVABLE[3], SURVIVABLE[4]]
    assert generations.refusal(statuses, [3]) is None
    assert generations.refusal(statuses, [1]) == "no rank is left on pc, which leads the run and has its files"


def test_the_same_error_at_the_same_slot_is_a_bug() -> None:
    generations = Generations(ROSTER, MEMBERS)
    error = {"what": "ValueError: bad sample", "place": "train.py:7 in step", "slot": 12}
    assert not generations.is_repeated(error)
    assert not generations.is_repeated({**error, "slot": 13})
    assert not generations.is_repeated({**error, "what": "ValueError: another"})
    assert not generations.is_repeated({**error, "place": "train.py:9 in step"})
    assert generations.is_repeated(dict(error))


def test_the_same_members_start_anew_a_few_times_without_a_step_and_then_the_run_ends() -> None:
    generations = Generations(ROSTER, MEMBERS)
    for number in range(1, MOST_REPEATS + 1):
        found = generations.repeat("connection reset", 7)
        assert (found.number, found.members, found.roster) == (number, MEMBERS, ROSTER)
    for slot in range(8, 20):  # with steps in between there is no limit
        generations.repeat("connection reset", slot)
    for _ in range(MOST_REPEATS - 1):
        generations.repeat("connection reset", 19)
    with pytest.raises(RankError, match=r"lost each other 6 times without .*: connection reset; .uneven preflight. te"):
        generations.repeat("connection reset", 19)


def test_ranks_of_a_local_policy_get_on_by_rounds_and_not_by_the_steps_between_them() -> None:
    """Each steps up to its next round by itself: with a damaged rank that comes to nothing for the whole run."""
    assert [steps_done({"slot": slot, "rounds": {"round": 3}}) for slot in (20, 30)] == [3, 3]
    assert [steps_done(status) for status in ({"slot": 7, "rounds": {}}, {"slot": 7}, {})] == [7, 7, 0]


def test_what_the_user_reads() -> None:
    assert describe_loss(["rank 2 (cpu@0.4 on pc) was ended by SIGKILL"], [{"rounds": {"round": 2}}] * 3) == (
        "rank 2 (cpu@0.4 on pc) was ended by SIGKILL: 3 ranks go on, its samples since the last round are trained again"
    )
    assert describe_loss(["rank 1 is lost", "rank 2 is lost"], [{}]) == (
        "rank 1 is lost; rank 2 is lost: 1 rank goes on, their samples since the last step are trained again"
    )


def test_who_joins_is_the_last_rank_on_a_machine_of_its_own_or_on_one_that_is_there() -> None:
    generations = Generations(ROSTER, MEMBERS)
    generations.drop([1, 2], "lost")
    again = generations.expect(Newcomer("pc/cpu/f", parse_devices("cpu")[0], "pc"))
    others = [generations.expect(Newcomer(f"laptop/cpu/{one}", parse_devices("cpu")[0], "laptop")) for one in "gh"]
    assert (again, others, generations.numbers) == (5, [6, 7], [0, 3, 4])
    assert generations.aside == {5, 6, 7}
    found = generations.admit(others)
    assert found.why == "rank 3 (cpu on laptop), rank 4 (cpu on laptop) join: 5 ranks go on"
    assert found.members == (MEMBERS[0], *MEMBERS[3:], "laptop/cpu/g", "laptop/cpu/h")
    assert (found.number, found.roster.machines, found.roster.hosts) == (2, (0, 1, 1, 2, 2), ("pc", "mini", "laptop"))
    found = generations.admit([again])
    assert found.why == "rank 5 (cpu on pc) joins: 6 ranks go on"
    assert (found.roster.machines, generations.numbers) == ((0, 1, 1, 2, 2, 0), [0, 3, 4, 6, 7, 5])
    assert generations.aside == set()
    assert Generation.from_json(found.to_json()) == found


def test_who_joins_has_no_state_yet_and_cannot_go_on_alone() -> None:
    generations = Generations(ROSTER.without([1, 2, 3, 4]), MEMBERS[:1])
    number = generations.expect(Newcomer("pc/cpu/f", parse_devices("cpu")[0], "pc"))
    generations.admit([number])
    statuses: list[dict[str, Any]] = [{"min_ranks": 1}, {}]
    assert generations.refusal(statuses, [number]) is None
    assert generations.refusal(statuses, [0]) == "no rank is left"
    generations.drop([number], "it is gone again, and holds up nobody else who joins")
    assert generations.joining == set()
    generations = Generations(ROSTER.without([2, 3, 4]), MEMBERS[:2])
    assert generations.refusal([{"min_ranks": 1}, {"min_ranks": 1}], [0]) is None
