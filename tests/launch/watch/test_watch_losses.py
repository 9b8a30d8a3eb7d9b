"""The watch over ranks that can go on without each other: made-up processes and heartbeats, and a real store."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.launch.watch.cluster import MEMBERS, Cluster
from uneven import InputError
from uneven.errors import RankError
from uneven.launch.training import RESULT
from uneven.launch.watch import watch as watch_module
from uneven.launch.watch.generations import MOST_REPEATS
from uneven.launch.watch.watch import LostAtStartError


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_a_killed_rank_leaves_the_roster_and_its_exit_code_does_not_fail_the_run(cluster: Cluster) -> None:
    cluster.at[2] = cluster.end(1, -9)
    cluster.watch()
    found = cluster.generation
    assert found is not None
    assert (found.number, found.members, found.roster.machines) == (1, (MEMBERS[0], MEMBERS[2]), (0, 1))
    assert cluster.reporter.lines == [found.why]
    assert found.why == (
        "rank 1 (cpu on pc) was ended by SIGKILL: 2 ranks go on, its samples since the last step are trained again"
    )


def test_a_rank_that_raises_leaves_too_and_ranks_lost_one_after_the_other_make_generations(cluster: Cluster) -> None:
    cluster.statuses = [{**status, "rounds": {"round": 1}} for status in cluster.statuses]
    cluster.at[2] = cluster.end(0, 1, what="OutOfMemoryError: CUDA out of memory", place="train.py:7 in step")
    cluster.at[3] = cluster.end(2, -11)
    cluster.watch()
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (2, (MEMBERS[1],))
    first, second = cluster.reporter.lines
    assert first.startswith("rank 0 (cpu on pc) failed: OutOfMemoryError: CUDA out of memory at train.py:7 in step: 2 ")
    assert second.endswith("SIGSEGV: 1 rank goes on, its samples since the last round are trained again")


def test_a_silent_rank_is_given_up_and_ended_and_a_healthy_one_that_was_silent_for_a_while_is_not(
    cluster: Cluster,
) -> None:
    cluster.at[2] = lambda: cluster.silent.update({1, 2})
    cluster.at[110] = lambda: cluster.silent.discard(1)  # for almost 11 s
    cluster.watch(170)
    assert cluster.generation is not None
    assert cluster.generation.members == MEMBERS[:2]
    assert cluster.given_up == [2]
    assert "rank 2 (cpu@0.4 on mini) fell silent 15 s ago" in cluster.reporter.lines[0]


def test_a_deadline_counts_for_silence_too_and_a_watch_that_was_held_up_blames_nobody(cluster: Cluster) -> None:
    cluster.statuses = [{**status, "deadline": 2.0} for status in cluster.statuses]
    cluster.at[2] = lambda: cluster.silent.update({0, 1, 2})
    cluster.at[3] = lambda: setattr(cluster, "looks", 203)  # this process was stopped for 20 s
    cluster.watch(10)
    assert cluster.generation is None
    cluster.at = {2: lambda: cluster.silent.update({2})}
    cluster.codes, cluster.silent = [None, None, None], set()
    cluster.watch(30)
    assert cluster.given_up == [2]


def test_ranks_that_have_just_begun_have_a_moment_for_each_loss_to_say_that_they_go_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment of the first loss was counted for the second one, long after it: that one ended the run."""
    monkeypatch.setattr(watch_module, "GRACE_S", 1.0)
    ready = list(cluster.statuses)
    cluster.statuses = [{"slot": 0, "phase": "setup"} for _ in MEMBERS]
    cluster.at = {
        2: cluster.end(1, -9),
        8: lambda: cluster.statuses.__setitem__(slice(None), ready),
        30: lambda: cluster.statuses.__setitem__(slice(None), [{"slot": 3, "phase": "setup"} for _ in MEMBERS]),
        31: cluster.end(2, -9),
        38: lambda: cluster.statuses.__setitem__(slice(None), ready),
    }
    cluster.watch(50)
    assert cluster.generation is not None
    assert cluster.generation.members == MEMBERS[:1]


def test_a_machine_that_is_lost_takes_its_ranks_with_it(cluster: Cluster) -> None:
    cluster.at[2] = lambda: cluster.gone.update({2: "mini (10.0.0.2) is lost with rank 2: nothing was heard for 5 s"})
    cluster.at[4] = cluster.end(2, -9)
    cluster.watch()
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.roster.hosts) == (1, ("pc",))
    assert cluster.reporter.lines == [cluster.generation.why]
    assert cluster.generation.why.startswith("mini (10.0.0.2) is lost with rank 2: nothing was heard for 5 s: 2 ranks")


@pytest.mark.parametrize(
    ("lost", "changes", "error", "words"),
    [
        ([1], {"min_ranks": 3}, RankError, r"rank 1 .*SIGKILL; 2 ranks are left, and min_ranks=3"),
        ([0, 1], {}, RankError, r"SIGKILL; no rank is left on pc, which leads the run"),
        ([0, 1, 2], {}, RankError, r"SIGKILL; no rank is left$"),
    ],
)
def test_too_few_end_the_run_with_the_cause(
    cluster: Cluster, lost: list[int], changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    cluster.statuses = [{**status, **changes} for status in cluster.statuses]
    cluster.at[2] = lambda: [cluster.end(number, -9)() for number in lost]
    with pytest.raises(error, match=words):
        cluster.watch()
    assert cluster.generation is None


@pytest.mark.parametrize(
    ("changes", "words", "is_at_start"),
    [
        ({}, "SIGKILL$", True),
        ({"ends_because": "backend='nccl'"}, "nccl", True),
        ({"needs": 2}, "SIGKILL$", True),
        ({"needs": 3}, "needs 3", False),
        ({"slot": 1, "has_trained": True}, "SIGKILL$", False),
        ({"slot": 0, "has_trained": True}, "SIGKILL$", False),  # in an earlier run of the script
        ({"slot": 500}, "SIGKILL$", True),  # it was resumed there
    ],
)
def test_a_rank_that_is_killed_before_anything_was_trained(
    cluster: Cluster, changes: dict[str, Any], words: str, is_at_start: bool
) -> None:
    cluster.statuses = [{"slot": 0, "phase": "setup", "has_trained": False, **changes} for _ in MEMBERS]
    cluster.at[2] = cluster.end(1, -9)
    with pytest.raises(RankError, match=words) as caught:
        cluster.watch()
    assert isinstance(caught.value, LostAtStartError) is is_at_start
    if isinstance(caught.value, LostAtStartError):
        assert caught.value.causes == {1: "rank 1 (cpu on pc) was ended by SIGKILL"}


@pytest.mark.parametrize(
    ("what", "is_at_start"), [("RuntimeError: Connection closed by peer", True), ("LookupError: no weights", False)]
)
def test_beside_one_that_is_killed_only_errors_about_it_count_for_nothing(
    cluster: Cluster, what: str, is_at_start: bool
) -> None:
    cluster.statuses = [{"slot": 0, "phase": "setup"} for _ in MEMBERS]
    cluster.at[2] = lambda: [cluster.end(1, -9)(), cluster.end(0, 1, what=what, has_trained=False)()]
    with pytest.raises(RankError) as caught:
        cluster.watch()
    assert isinstance(caught.value, LostAtStartError) is is_at_start


def test_a_rank_that_falls_silent_before_anything_was_trained_is_lost_too(cluster: Cluster) -> None:
    cluster.statuses = [{"slot": 0, "phase": "setup"} for _ in MEMBERS]
    cluster.at[2] = lambda: cluster.silent.update({2})
    with pytest.raises(LostAtStartError, match="fell silent") as caught:
        cluster.watch(170)
    assert list(caught.value.causes) == [2]


def test_a_rank_before_its_first_step_or_one_that_cannot_go_on_ends_the_run(cluster: Cluster) -> None:
    cluster.statuses[2] = {"slot": 0, "phase": "communication"}
    cluster.at[2] = cluster.end(1, -9)
    with pytest.raises(RankError, match=r"rank 1 \(cpu on pc\) was ended by SIGKILL$"):
        cluster.watch()


def test_what_all_ranks_would_raise_ends_the_run(cluster: Cluster) -> None:
    cluster.at[2] = cluster.end(1, 1, what="InputError: epochs=0", message="epochs=0", kind="input")
    with pytest.raises(InputError, match=r"rank 1 \(cpu on pc\): epochs=0"):
        cluster.watch()
    assert cluster.generation is None


def test_the_same_error_at_the_same_slot_twice_ends_the_run_with_its_traceback(cluster: Cluster) -> None:
    error = {"what": "ValueError: bad sample", "place": "train.py:7 in step"}
    cluster.at[2] = cluster.end(1, 1, **error)
    cluster.at[4] = cluster.end(2, 1, **error)
    with pytest.raises(RankError, match=r"rank 2 .*failed: ValueError: bad sample\n  at train.py:7 in step") as caught:
        cluster.watch()
    assert "\n\nIts traceback:\nin step" in str(caught.value)


def test_a_broken_connection_alone_makes_a_new_generation_of_all(cluster: Cluster) -> None:
    cluster.at[2] = lambda: cluster.suspect(0, 0)
    cluster.watch(30)
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (1, MEMBERS)
    assert cluster.reporter.lines == ["connection reset: all ranks start a new group"]


def test_a_connection_that_breaks_again_and_again_without_a_step_ends_the_run(cluster: Cluster) -> None:
    cluster.at = {look: lambda look=look: cluster.suspect(0, look // 20) for look in range(1, 200, 20)}  # type: ignore[misc]
    with pytest.raises(RankError, match=r"lost each other 6 times without a step .*connection reset"):
        cluster.watch(200)
    assert cluster.generation is not None
    assert cluster.generation.number == MOST_REPEATS


def test_a_suspicion_waits_for_the_silence_of_the_one_that_is_missed(cluster: Cluster) -> None:
    cluster.at[2] = lambda: (cluster.silent.add(2), cluster.suspect(0, 0))
    cluster.watch(170)
    assert cluster.generation is not None
    assert (cluster.generation.number, cluster.generation.members) == (1, MEMBERS[:2])


def test_a_rank_that_has_left_the_run_leaves_the_roster_where_another_still_needs_one(cluster: Cluster) -> None:
    def leave() -> None:
        cluster.statuses[0] = {"slot": 9, "phase": "setup"}
        cluster.suspect(1, 0)

    cluster.at[2] = leave
    cluster.watch(30)
    assert cluster.generation is not None
    assert cluster.generation.members == MEMBERS[1:]
    assert cluster.reporter.lines == ["rank 0 (cpu on pc) had finished already: 2 ranks go on"]


def test_a_rank_lost_after_the_result_was_written_fails_nothing_and_is_not_waited_for(cluster: Cluster) -> None:
    (cluster.folder / RESULT).write_text("result-0")
    cluster.statuses = [{"slot": 9, "phase": "setup"} for _ in MEMBERS]
    cluster.at[2] = cluster.end(2, -9)
    cluster.watch()
    assert cluster.generation is None


def test_whoever_raises_is_past_its_run_in_its_last_heartbeat_and_the_others_go_on(cluster: Cluster) -> None:
    """It counted as one of those that have the result, and its error ended the run."""
    past = {"slot": 0, "phase": "setup", "is_past": True}
    for look, number in ((2, 2), (5, 1)):
        cluster.at[look] = partial(cluster.statuses.__setitem__, number, past)
        cluster.at[look + 1] = cluster.end(number, 1, what=f"RankError: of {number}")
    cluster.watch(8)
    assert cluster.generation is not None
    assert cluster.generation.members == MEMBERS[:1]


@pytest.mark.parametrize("how", ["killed", "silent", "machine", "failed"])
def test_who_is_lost_after_the_run_has_its_result_does_not_end_the_script_of_the_others(
    cluster: Cluster, how: str
) -> None:
    """An error that its script raises then still does."""
    cluster.statuses = [{"slot": 0, "phase": "setup", "is_past": True} for _ in MEMBERS]
    ends = {
        "killed": cluster.end(2, -9),
        "silent": lambda: cluster.silent.add(2),
        "machine": lambda: cluster.gone.update({2: "mini is lost"}),
        "failed": cluster.end(2, 1, what="ValueError: of the script", kind="other", member="mini/cpu/c"),
    }
    cluster.at[2] = ends[how]
    if how == "failed":
        with pytest.raises(RankError, match="ValueError: of the script"):
            cluster.watch(200)
        return
    cluster.watch(200)
    assert cluster.generation is not None
    assert cluster.generation.members == MEMBERS[:2]
    assert cluster.reporter.lines[-1].endswith("the run had its result already, and 2 ranks go on")


def test_lines_and_history_come_from_whoever_is_rank_0(cluster: Cluster) -> None:
    known = {"notes": ["said by all"], "epochs": 2, "history": []}
    cluster.statuses = [{**status, **known} for status in cluster.statuses]
    cluster.at[2] = cluster.end(0, -9)
    cluster.at[3] = lambda: cluster.statuses[1].update(notes=["said by all", "said by the new one"])
    cluster.watch()
    assert [line for line in cluster.reporter.lines if "SIGKILL" not in line] == ["said by all", "said by the new one"]


def test_a_rank_that_ends_with_zero_in_the_middle_of_its_run_is_lost(cluster: Cluster) -> None:
    """By os._exit(0) in a step: it "had finished already", and the run went on, or counted as finished."""
    cluster.statuses[1]["in_run"] = True
    cluster.at = {2: cluster.end(1, 0)}
    cluster.watch()
    (line,) = cluster.reporter.lines
    assert line.startswith("rank 1 (cpu on pc) ended with exit code 0 before its run was over: 2 ranks go on")


def test_a_run_whose_ranks_all_end_with_zero_in_the_middle_of_it_has_failed(cluster: Cluster) -> None:
    for status in cluster.statuses:
        status["in_run"] = True
    cluster.at = {2: lambda: setattr(cluster, "codes", [0, 0, 0])}
    with pytest.raises(RankError, match=r"^rank 0 \(cpu on pc\) ended with exit code 0 before its run was over"):
        cluster.watch()


def test_a_machine_that_is_lost_before_the_first_step_ends_the_run_with_the_reason(cluster: Cluster) -> None:
    cluster.statuses = [{"slot": 0, "phase": "setup"} for _ in MEMBERS]
    cluster.at[2] = lambda: cluster.gone.update({2: "mini is lost with rank 2"})
    with pytest.raises(
        RankError, match=r"^mini is lost with rank 2; a loss before the first step ends the run on all mach"
    ):
        cluster.watch()
