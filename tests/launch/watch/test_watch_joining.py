"""The watch over ranks that join or are started again: made-up processes and heartbeats, and a real store."""

from pathlib import Path

import pytest

from tests.launch.watch.cluster import LAPTOP, MEMBERS, Cluster, Recruiting
from uneven.launch.local_ranks import Newcomer


@pytest.fixture
def recruiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recruiting:
    return Recruiting(tmp_path, monkeypatch)


def test_the_ranks_of_a_machine_join_together_when_all_of_them_are_ready(recruiting: Recruiting) -> None:
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP), 4: recruiting.ready(3), 6: recruiting.ready(4)}
    recruiting.at[5] = lambda: cannot_be_seen(recruiting)
    recruiting.watch(10)
    assert recruiting.reporter.lines == ["rank 3 (cpu on laptop), rank 4 (cpu on laptop) join: 5 ranks go on"]
    assert recruiting.generation is not None
    assert recruiting.generation.members == (*MEMBERS, "laptop/cpu/x", "laptop/cpu/y")
    assert recruiting.generation.roster.hosts == ("pc", "mini", "laptop")


def cannot_be_seen(cluster: Cluster) -> None:
    assert cluster.generation is None


def test_who_fails_before_it_has_joined_costs_one_line_and_its_machine_is_told(recruiting: Recruiting) -> None:
    why = f"laptop: other data{', which is told to the end' * 10}"
    other = {"what": f"RefusedError: {why}", "message": why, "place": "train.py:7, in <module>", "kind": "refused"}
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP), 4: recruiting.ready(4)}
    recruiting.at[6] = recruiting.end(3, 1, **other)
    recruiting.watch(10)
    first, second = recruiting.reporter.lines
    assert first == f"cpu on laptop has not joined: {why}; the run goes on without it"
    assert second == "rank 3 (cpu on laptop) joins: 4 ranks go on"
    assert recruiting.turned_away[3] == why


def test_nobody_joins_a_run_that_does_not_admit_it_or_is_asked_to_stop(recruiting: Recruiting) -> None:
    recruiting.statuses[1]["admits"] = False
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP), 3: recruiting.ready(3, 4)}
    recruiting.watch(8)
    assert recruiting.generation is None
    assert recruiting.reporter.lines == []


def test_a_lost_rank_of_this_machine_is_started_again_as_often_as_the_setting_says(recruiting: Recruiting) -> None:
    recruiting.at = {
        2: recruiting.end(2, -9),
        4: recruiting.end(1, -9),
        6: recruiting.ready(3),
        8: recruiting.settle(3),
    }
    recruiting.at[10] = recruiting.end(3, -9)
    recruiting.watch(14)
    gone, lost, again, joins, last = recruiting.reporter.lines
    assert "rank 2 (cpu@0.4 on mini) was ended by SIGKILL: 2 ranks go on" in gone
    assert "rank 1 (cpu on pc) was ended by SIGKILL: 1 rank goes on" in lost
    assert again == "a rank on cpu is started again, and joins when it is ready (restart 1 of 1)"
    assert joins == "rank 1 (cpu on pc) joins: 2 ranks go on"
    assert "1 rank goes on" in last
    assert recruiting.generation is not None
    assert (recruiting.generation.number, recruiting.generation.members) == (4, MEMBERS[:1])


@pytest.mark.parametrize("is_error", [False, True])
def test_one_that_is_killed_before_it_has_joined_is_started_again_and_one_that_fails_is_not(
    recruiting: Recruiting, is_error: bool
) -> None:
    recruiting.statuses = [{**status, "restarts": 3} for status in recruiting.statuses]
    how = {"what": "ValueError: no data", "kind": "other", "member": "pc"} if is_error else {}
    recruiting.at = {2: recruiting.end(1, -9), 4: recruiting.end(3, 1 if is_error else -9, **how)}
    recruiting.stays = {4}
    recruiting.watch(8)
    lines = recruiting.reporter.lines[1:]
    assert lines[0] == "a rank on cpu is started again, and joins when it is ready (restart 1 of 3)"
    assert lines[1].startswith("cpu on pc has not joined: ")
    again = "a rank on cpu is started again, and joins when it is ready (restart 2 of 3)"
    assert lines[2:] == ([] if is_error else [again])


def test_one_that_is_started_again_does_not_wait_for_the_next(recruiting: Recruiting) -> None:
    late = Newcomer("pc/cpu/late", LAPTOP[0].device, "pc")
    recruiting.at = {2: recruiting.end(1, -9), 4: lambda: recruiting.coming.append(late), 6: recruiting.ready(3)}
    recruiting.stays = {4}
    recruiting.watch(10)
    assert recruiting.reporter.lines[-1] == "rank 2 (cpu on pc) joins: 3 ranks go on"


def test_a_machine_that_the_others_do_not_reach_is_left_out_again(recruiting: Recruiting) -> None:
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP[:1]), 4: recruiting.ready(3)}
    recruiting.at[6] = lambda: recruiting.suspect(0, 1, "no connection to laptop")
    recruiting.watch(30)
    assert recruiting.generation is not None
    assert (recruiting.generation.number, recruiting.generation.members) == (2, MEMBERS)
    assert recruiting.given_up == [3]
    assert "rank 3 (cpu on laptop) could not settle (no connection to laptop)" in recruiting.reporter.lines[-1]
    assert recruiting.turned_away == {3: "could not settle (no connection to laptop)"}, "its machine is told"


def test_one_that_could_not_settle_is_started_again(recruiting: Recruiting) -> None:
    """The launcher ended with an IndexError: it looked for the new process among exit codes that were older."""
    recruiting.statuses = [{**status, "restarts": 2} for status in recruiting.statuses]
    recruiting.at = {2: recruiting.end(1, -9), 4: recruiting.ready(3)}
    recruiting.at[6] = lambda: recruiting.suspect(0, 2, "no connection to it")
    recruiting.stays = {4}
    recruiting.watch(30)
    left_out, again = recruiting.reporter.lines[-2:]
    assert "rank 3 (cpu on pc) could not settle (no connection to it): 2 ranks go on" in left_out
    assert again == "a rank on cpu is started again, and joins when it is ready (restart 2 of 2)"
    assert recruiting.generation is not None
    assert recruiting.generation.members == (MEMBERS[0], MEMBERS[2])


def test_a_run_ends_without_those_who_have_not_joined_it(recruiting: Recruiting) -> None:
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP)}
    recruiting.stays = {3, 4}
    recruiting.watch(6)
    assert recruiting.codes == [0, 0, 0, None, None]
    assert recruiting.turned_away == dict.fromkeys((3, 4), "the run was over before it could join")


def test_the_machine_of_a_lost_rank_is_told_that_the_run_goes_on(recruiting: Recruiting) -> None:
    recruiting.at = {2: recruiting.end(2, -9)}
    recruiting.watch()
    assert recruiting.generation is not None
    assert recruiting.dropped == {2: recruiting.generation.why}


def test_a_run_does_not_wait_for_a_newcomer_that_nobody_is_left_to_settle_with(recruiting: Recruiting) -> None:
    """It waited for the newcomer's group, which nobody formed, for 20 s."""
    recruiting.at = {2: lambda: recruiting.coming.extend(LAPTOP[:1]), 4: recruiting.ready(3)}
    recruiting.stays = {3}
    recruiting.watch(6)
    assert recruiting.codes == [0, 0, 0, None]
