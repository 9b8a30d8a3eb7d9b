"""A rank's membership against a real store: threads are its ranks, and the test is their launcher."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.launch.memberships import MEMBERS, ROSTER, FakeGroup, await_truth, on_thread
from tests.ranks import Silent
from uneven.comm.group import Group
from uneven.comm.store import TCPStore, get_text, open_store, under
from uneven.config import RunConfig
from uneven.errors import GroupLostError, Left, RefusedError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.context import ProcessContext
from uneven.launch.environment import LaunchEnvironment
from uneven.launch.heartbeat import (
    GENERATION_KEY,
    LEAVE,
    SIGNAL_KEY,
    STAY,
    Heartbeat,
    HeartbeatCalls,
    handed_key,
    heartbeat_key,
    leave_key,
    ready_key,
    roster_key,
    settled_key,
    suspicion_key,
)
from uneven.launch.local_ranks import Newcomer
from uneven.launch.membership import RunStart, Steps, StoreMembership, waiting_limit_s
from uneven.launch.newcomer import adopt_settings, announce_run, await_facts, facts_key
from uneven.launch.rank_place import RankPlace
from uneven.launch.watch.generations import Generations
from uneven.train.rank_info import Generation, RankInfo

CONFIG = RunConfig(batch_size=4, epochs=1, devices="cpu,cpu,cpu", backend="gloo")


class Launcher:
    """Publishes generations as launch/watch/watch.py does, and runs what a rank does on a thread."""

    def __init__(self) -> None:
        self.store, self.port = open_store()
        self.generations = Generations(ROSTER, MEMBERS)
        self.places: list[RankPlace] = []
        self._heartbeats: list[Heartbeat] = []

    def place(self, number: int) -> RankPlace:
        member, where = MEMBERS[number], {"host": "127.0.0.1", "port": self.port}
        environment = LaunchEnvironment("fit", number, 3, number, 3, member=member, **where)  # type: ignore[arg-type]
        place = RankPlace(environment, ROSTER)
        calls = HeartbeatCalls(on_generation=place.hear, on_leave=place.leave)
        self._heartbeats.append(Heartbeat(environment.connect(""), member, calls))
        self.places.append(place)
        return place

    def membership(self, number: int) -> StoreMembership:
        info = RankInfo(number, ROSTER.devices, roster=ROSTER, member=MEMBERS[number])
        return self.place(number).join(1, info, CONFIG, Silent())

    def publish(self, *lost: int) -> Generation:
        generation = self.generations.drop(lost, f"lost {lost}")
        self.store.set(roster_key(generation.number), json.dumps(generation.to_json()))
        self.store.set(GENERATION_KEY, str(generation.number))
        return generation

    def close(self) -> None:
        for heartbeat in self._heartbeats:
            heartbeat.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def await_key(store: TCPStore, key: str) -> str:
    while (text := get_text(store, key)) is None:
        time.sleep(0.005)
    return text


def test_a_new_generation_aborts_the_group_and_is_handed_to_whoever_waits(launcher: Launcher) -> None:
    membership, group = launcher.membership(0), FakeGroup()
    membership.joined(group)  # type: ignore[arg-type]
    assert not membership.is_stale(0)
    waiting = on_thread(lambda: membership.await_next(0, "connection reset"))
    assert await_key(launcher.store, suspicion_key(0, MEMBERS[0])) == "connection reset"
    published = launcher.publish(1)
    assert waiting() == published
    assert group.aborted.wait(60)
    assert group.why == "lost (1,)"
    assert membership.is_stale(0)
    assert not membership.is_stale(1)
    assert membership.await_next(0, "late") == published  # at once


def test_the_heartbeat_alone_aborts_the_group_of_a_rank_that_computes(launcher: Launcher) -> None:
    membership, group = launcher.membership(0), FakeGroup()
    membership.joined(group)  # type: ignore[arg-type]
    launcher.publish(2)
    assert group.aborted.wait(60)
    assert membership.is_stale(0)


def test_a_rank_that_was_given_up_learns_it(launcher: Launcher) -> None:
    membership = launcher.membership(1)
    launcher.publish(1)
    with pytest.raises(GroupLostError, match=r"this rank was given up, and the others go on: lost \(1,\)"):
        membership.await_next(0, "connection reset")


def test_where_no_generation_comes_the_cause_is_raised(launcher: Launcher) -> None:
    membership = launcher.membership(0)
    membership._limit_s = 0.05
    with pytest.raises(GroupLostError, match="connection reset; the launcher announced no other ranks"):
        membership.await_next(0, "connection reset")
    assert waiting_limit_s("auto") == waiting_limit_s(2.0) == 25.0
    assert waiting_limit_s(60.0) == 70.0
    assert waiting_limit_s(None) == float("inf")


def test_those_who_are_left_form_a_group_and_are_its_ranks_from_then_on(launcher: Launcher) -> None:
    memberships, before = [launcher.membership(number) for number in (0, 2)], FakeGroup()
    memberships[0].joined(before)  # type: ignore[arg-type]
    launcher.publish(1)

    def go_on(membership: StoreMembership) -> float:
        group: Group = membership.form(membership.await_next(0, "gone"))
        total = torch.tensor([float(1 + group.rank)])
        group.all_reduce(total).wait()
        membership.settled(1, [])
        group.close()
        return float(total)

    results = [on_thread(lambda membership=membership: go_on(membership)) for membership in memberships]
    assert [result() for result in results] == [3.0, 3.0]
    assert before.is_closed
    environments = [place.environment for place in launcher.places]
    assert [(one.rank, one.world_size, one.local_world_size) for one in environments] == [(0, 2, 2), (1, 2, 2)]
    assert all(get_text(launcher.store, settled_key(1, MEMBERS[number])) is not None for number in (0, 2))


def test_a_loss_while_the_group_forms_gives_it_up_and_the_next_one_forms(launcher: Launcher) -> None:
    """Rank 2 never comes: those who wait for it hear of the generation after that."""
    memberships = [launcher.membership(number) for number in (0, 1)]
    first = launcher.publish()  # of the same members

    def go_on(membership: StoreMembership) -> int:
        generation = membership.await_next(0, "gone")
        assert generation == first
        forming.wait()
        with pytest.raises(GroupLostError):
            membership.form(generation)
        group = membership.form(membership.await_next(generation.number, "gone again"))
        group.close()
        return group.world_size

    forming = threading.Barrier(3, timeout=60)
    results = [on_thread(lambda membership=membership: go_on(membership)) for membership in memberships]
    forming.wait()
    second = launcher.publish(2)
    assert (first.number, second.number) == (1, 2)
    assert [result() for result in results] == [2, 2]


def test_ranks_that_have_the_result_stay_until_all_have_it_and_agree_where_one_is_lost(launcher: Launcher) -> None:
    first, second = [launcher.membership(number) for number in (0, 1)]
    group = FakeGroup()
    group.world_size = 2  # type: ignore[attr-defined]
    for membership in (first, second):
        membership.joined(group)  # type: ignore[arg-type]
    waiting = on_thread(lambda: first.finish(0))
    await_key(launcher.store, "run/1/finished/0")
    second.finish(0)
    waiting()
    early = on_thread(lambda: first.finish(3))  # of another generation
    await_key(launcher.store, "run/1/finished/3")
    for _ in range(4):
        launcher.publish()
    with pytest.raises(GroupLostError, match="lost"):
        early()
    with pytest.raises(GroupLostError):  # though both have it by now: the first has gone on to settle again
        second.finish(3)


def test_a_rank_lost_between_two_runs_is_not_in_the_next_one(launcher: Launcher) -> None:
    place = launcher.place(2)
    launcher.publish(0)
    place.catch_up()
    assert (place.environment.rank, place.environment.world_size, place.generation) == (1, 2, 1)
    assert place.roster == Roster.on_one_machine(parse_devices("cpu,cpu"))
    context = ProcessContext(place.environment, place.roster)
    assert context.make_rank_info().rank == 1
    with pytest.raises(GroupLostError, match="given up"):
        launcher.place(0).catch_up()


def newcomer(launcher: Launcher, refuse: Callable[[], None] = lambda: None) -> StoreMembership:
    """Of somebody who was started in generation 0 of ranks a and b, as c."""
    info = RankInfo(2, ROSTER.devices, roster=ROSTER, member=MEMBERS[2], is_newcomer=True)
    place = launcher.place(2)
    place.is_newcomer = True
    return place.join(1, info, CONFIG, Silent(), before_enter=refuse)


def publish_joined(launcher: Launcher) -> Generation:
    generation = launcher.generations.admit([2])
    launcher.store.set(roster_key(generation.number), json.dumps(generation.to_json()))
    launcher.store.set(GENERATION_KEY, str(generation.number))
    return generation


@pytest.fixture
def pair() -> Iterator[Launcher]:
    """A launcher whose run has the first two members, and expects the third."""
    made = Launcher()
    made.generations = Generations(ROSTER.without([2]), MEMBERS[:2])
    made.generations.expect(Newcomer(MEMBERS[2], ROSTER.devices[2], ROSTER.hosts[0]))
    yield made
    made.close()


def test_who_joins_waits_for_a_generation_that_has_it_and_forms_its_group_with_the_others(pair: Launcher) -> None:
    joins, others = newcomer(pair), [pair.membership(number) for number in (0, 1)]
    others[0].begin({"config": {"accumulate": 2}})
    assert json.loads(pair.store.get(facts_key(1)))["config"] == {"accumulate": 2}
    waiting = on_thread(joins.enter)
    await_key(pair.store, ready_key(MEMBERS[2]))
    repeated = pair.publish()  # a generation without it: it waits on, and is not given up
    published = publish_joined(pair)
    assert waiting() == published
    assert (repeated.number, published.number, published.members) == (1, 2, MEMBERS)

    def go_on(membership: StoreMembership) -> float:
        group = membership.form(membership.await_next(1, "somebody joins"))
        total = torch.tensor([float(1 + group.rank)])
        group.all_reduce(total).wait()
        group.close()
        return float(total)

    results = [on_thread(lambda one=one: go_on(one)) for one in (joins, *others)]
    assert [result() for result in results] == [6.0] * 3
    place = pair.places[0]
    assert (place.is_newcomer, place.environment.rank, place.environment.world_size) == (False, 2, 3)


def test_who_does_not_fit_or_comes_to_the_second_run_is_told_so(pair: Launcher) -> None:
    def refuse() -> None:
        raise RefusedError("laptop: other data")

    with pytest.raises(RefusedError, match="laptop: other data"):
        newcomer(pair, refuse).enter()
    assert not pair.store.check([ready_key(MEMBERS[2])])
    waiting = on_thread(newcomer(pair).enter)
    await_key(pair.store, ready_key(MEMBERS[2]))
    announce_run(pair.store, 2, "")
    with pytest.raises(GroupLostError, match="cannot be joined any more: the script is in its run 2"):
        waiting()
    with pytest.raises(RefusedError, match="this run cannot be joined: the script is in its run 2, and only its first"):
        await_facts(pair.store)
    announce_run(pair.store, 1, "it is a replay")
    with pytest.raises(RefusedError, match="this run cannot be joined: it is a replay"):
        await_facts(pair.store)


def test_who_joins_takes_the_settings_of_the_run() -> None:
    config = RunConfig(batch_size=4, epochs=1, devices="cpu", resume=None, out=Path("own"))
    theirs = RunConfig(batch_size=4, epochs=1, devices="cpu,cpu", precision="fp32", backend="gloo", out=Path("their"))
    facts = {"settings": json.loads(json.dumps(theirs.to_json())), "config": {"global_batch_size": 24}}
    found = adopt_settings(config, facts)
    assert (found.precision, found.backend, found.devices) == ("fp32", "gloo", "cpu,cpu")
    assert (found.global_batch_size, found.out) == (24, Path("own"))


def test_a_rank_is_asked_to_leave_hands_in_and_goes_or_stays_with_the_others(launcher: Launcher) -> None:
    membership = launcher.membership(1)
    assert not membership.must_leave()
    launcher.store.set(leave_key(MEMBERS[1]), LEAVE)
    await_truth(membership.is_leaving)
    left = on_thread(lambda: membership.leave(0, 1234))
    await_truth(lambda: get_text(launcher.store, handed_key(0, MEMBERS[1])) == "1234")
    first = launcher.publish(2)  # another one was lost in this moment
    assert left() == first
    launcher.store.set(leave_key(MEMBERS[1]), STAY)
    await_truth(lambda: not membership.is_leaving())
    launcher.store.set(leave_key(MEMBERS[1]), LEAVE)
    assert membership.must_leave(), "as the store has it, whatever the heartbeat has read"
    left = on_thread(lambda: membership.leave(1, 1240))
    launcher.publish(1)
    with pytest.raises(Left) as gone:
        left()
    assert gone.value.code == 0


def test_a_rank_of_a_joined_machine_tells_of_a_sigterm_and_does_not_stop_the_run(launcher: Launcher) -> None:
    member = "mini/cpu/z"
    calls = HeartbeatCalls(read_signal=lambda: 1)
    beat = Heartbeat(launcher.store, member, calls, is_guest=True)
    beat.close()
    assert json.loads(launcher.store.get(heartbeat_key(member)))["terminated"]
    assert get_text(launcher.store, SIGNAL_KEY) is None
    own = Heartbeat(launcher.store, member, calls)
    own.close()
    assert get_text(launcher.store, SIGNAL_KEY) is not None
    two = Roster(parse_devices("cpu,cpu"), (0, 1), ("pc", "mini"))
    places = [RankPlace(LaunchEnvironment("uneven run", rank, 2), two) for rank in range(2)]
    assert [place.is_guest for place in places] == [False, True]


def of(*members: str, number: int) -> Generation:
    return Generation(number, Roster.on_one_machine(parse_devices(["cpu"] * len(members))), members, f"number {number}")


def test_who_joins_a_loop_of_the_users_own_waits_until_it_is_let_in() -> None:
    """Not so after a loss: the group is gone anyway, and so it is where the same members start a new one."""
    aborted: list[str] = []
    group: Any = SimpleNamespace(abort=aborted.append)
    membership = StoreMembership(None, "a", RunStart(1, 0, 1.0), Steps(lambda *_: group))  # type: ignore[arg-type]
    membership.joined(group)
    membership.defer_joins(("a", "b"))
    membership.announce(of("a", "b", "c", number=1))
    assert (membership.deferred, membership.is_stale(0), aborted) == (1, False, [])
    membership.let_in()
    assert (membership.deferred, membership.is_stale(0)) == (0, True)
    membership.announce(of("a", "b", "c", "d", number=2))
    assert (membership.deferred, membership.is_stale(1)) == (2, False)
    membership.announce(of("a", "b", "c", "d", number=3))
    assert (membership.deferred, membership.is_stale(1), aborted) == (0, True, ["number 3"])
    membership.announce(of("a", "b", "d", "e", number=4))
    assert (membership.deferred, membership.is_stale(3), aborted[1:]) == (0, True, ["number 4"])


def test_a_rank_that_was_given_up_between_two_runs_does_not_wait_for_the_others(launcher: Launcher) -> None:
    """Its script has caught the error of a run that the others finish without it: it waited for 30 minutes."""
    place = launcher.place(0)
    waits = on_thread(lambda: place.await_peers(under("start/2", launcher.store)))
    await_key(launcher.store, "start/2/here/0")
    launcher.publish(0)
    with pytest.raises(GroupLostError, match="this rank was given up, and the others go on: lost"):
        waits()
