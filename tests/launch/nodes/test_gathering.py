"""The leader at its door: who is taken in, who is refused, when the run starts. One process, sockets on loopback."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.nodes.leaders import FACTS, OPTIONS, TOKEN, Joined, Leader, NoProcesses, bring, read
from uneven.errors import MachineError, RankError, RefusedError
from uneven.launch.nodes import node as joining
from uneven.launch.nodes.gathering import Gathering
from uneven.launch.nodes.remote import AllRanks, RemoteNode, end_sessions
from uneven.launch.signals import Stoppable
from uneven.machines.door import tell_unheard
from uneven.machines.facts import stamped
from uneven.machines.session import Session
from uneven.machines.wire import WireError
from uneven.train.requests import Requests
from uneven.version import __version__

NEVER = Stoppable(lambda: 0.0, lambda _: None)


def test_a_machine_that_fits_is_taken_in(leader: Leader) -> None:
    gathering = leader.gather()
    connection = leader.join("pc")
    bring(connection, devices=[{"device": name, "precisions": ["fp32"]} for name in ("cpu", "cpu@0.5")])
    (node,) = gathering.wait()
    assert node.devices == ("cpu", "cpu@0.5")
    assert "pc (127.0.0.1) has joined with cpu,cpu@0.5: all are there" in leader.said[-1]
    late = leader.join("late")
    bring(late)
    assert read(late) == {"refused": "the run has its 2 machines (--nodes)"}
    gathering.close()
    assert read(leader.join("later")) == {"refused": "the run is over; start another with --nodes"}
    connection.close()
    end_sessions([node.session], "enough", 1)


def await_arrivals(gathering: Gathering, count: int) -> None:
    while gathering._arrived.qsize() < count:
        time.sleep(0.01)


def test_a_machine_too_much_is_refused_and_not_left_waiting(leader: Leader) -> None:
    """Both came before the leader: the second heard nothing until the end of the run, which it said to have trained."""
    gathering = leader.gather()
    connections = [leader.join(host) for host in ("pc", "mini")]
    for connection in connections:
        bring(connection)
    await_arrivals(gathering, 2)
    misfit = leader.join("old", version="0.0.1")
    await_arrivals(gathering, 3)
    (node,) = gathering.wait()
    surplus = connections[node.host == "pc"]
    assert read(surplus) == {"refused": "the run has its 2 machines (--nodes)"}
    assert "uneven is 0.0.1" in read(misfit)["refused"]
    for connection in (*connections, misfit):
        connection.close()


@pytest.mark.parametrize("is_over", [False, True])
def test_who_comes_while_the_run_starts_joins_when_it_is_on(leader: Leader, is_over: bool) -> None:
    gathering = leader.gather(replace(OPTIONS, fewest=1, most=3, wait=0.0))
    assert gathering.wait() == []
    connection = leader.join("pc")
    bring(connection)
    assert gathering.arrived() == []
    if is_over:
        gathering.close()
        assert read(connection) == {"refused": "the run is over; start another with --nodes"}
    else:
        checked: list[RemoteNode] = []
        gathering.open_again(checked.append)
        while not (found := gathering.arrived()):
            time.sleep(0.01)
        assert found == checked
        assert [node.host for node in found] == ["pc"]
    connection.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.8.0"}, r"pc: torch is 2.8.0, the leader's is 2.13.0; pip install torch==2.13.0 there"),
        ({"python": "3.12.1"}, r"pc: Python is 3.12.1"),
        ({}, None),
        ({"code": {}}, r"pc: train.py is not there; copy"),
    ],
)
def test_a_machine_that_does_not_fit_ends_the_run(leader: Leader, changes: dict[str, Any], message: str | None) -> None:
    gathering = leader.gather()
    connection = leader.join("pc")
    if message is None:  # a clock that is a minute off
        read(connection)
        connection.send(facts={**stamped(FACTS), "clock": stamped(FACTS)["clock"] - 60.0}, port=7000)
        message = r"pc: the clock is \d+ s behind.*timedatectl"
    else:
        bring(connection, **changes)
    with pytest.raises(RefusedError, match=message):
        gathering.wait()
    assert RefusedError.exit_code == 1
    connection.close()


def test_another_version_is_refused_before_anything_else(leader: Leader) -> None:
    gathering = leader.gather()
    connection = leader.join("pc", version="0.0.1")
    with pytest.raises(RefusedError, match=rf"pc: uneven is 0.0.1, the leader's is {__version__}; pip install"):
        gathering.wait()
    connection.close()


def test_what_a_machine_cannot_do_is_said_on_all(leader: Leader) -> None:
    gathering = leader.gather()
    connection = leader.join("pc")
    read(connection)
    connection.send(cannot="device 'cuda:0': this machine has cpu")
    with pytest.raises(RefusedError, match="pc: device 'cuda:0'"):
        gathering.wait()
    connection.close()


def test_too_few_machines_in_time(leader: Leader) -> None:
    gathering = leader.gather(replace(OPTIONS, fewest=3, most=3, wait=0.5))
    with pytest.raises(RefusedError, match=r"1 of 3 machines.*0.5 s \(--wait\).*uneven join 127.0.0.1:"):
        gathering.wait()


def test_a_range_starts_with_who_is_there(leader: Leader) -> None:
    gathering = leader.gather(replace(OPTIONS, fewest=2, most=4, wait=0.5))
    connection = leader.join("pc")
    bring(connection)
    assert [node.host for node in gathering.wait()] == ["pc"]
    connection.close()


def test_a_machine_that_leaves_before_the_start_is_not_counted(leader: Leader) -> None:
    gathering = leader.gather(replace(OPTIONS, fewest=3, most=3, wait=60.0))
    found: list[list[RemoteNode]] = []
    thread = threading.Thread(target=lambda: found.append(gathering.wait()))
    thread.start()
    gone = leader.join("gone")
    bring(gone)
    gone.close()
    while not any("gone (127.0.0.1) has left again" in line for line in leader.said):
        time.sleep(0.01)
    kept = [leader.join(host) for host in ("a", "b")]
    for connection in kept:
        bring(connection)
    thread.join(60.0)
    assert sorted(node.host for node in found[0]) == ["a", "b"]
    for connection in kept:
        connection.close()


def test_what_a_machine_says_about_its_ranks(leader: Leader, tmp_path: Path) -> None:
    gathering = leader.gather()
    connection = leader.join("pc")
    bring(connection, devices=[{"device": "cpu", "precisions": ["fp32"]}] * 2)
    (node,) = gathering.wait()
    node.place((1, 2))
    requests = Requests()
    processes: Any = NoProcesses()
    ranks = AllRanks(processes, [node], tmp_path, requests)
    connection.send(codes=[None, 1], stopped=[0], errors={"1": {"what": "broken"}}, unused=[0], stop=2)
    while ranks.exit_codes() != [None, None, 1]:
        time.sleep(0.01)
    assert requests.stop.is_set()
    assert ranks.stopped() == {0, 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error-2.json", "unused-1"]
    connection.close()
    while node.session.why_lost is None:
        time.sleep(0.01)
    assert ranks.exit_codes() == [None, None, 1]
    ((number, why),) = ranks.lost().items()
    assert number == 1
    assert why.startswith("pc (127.0.0.1) is lost with rank 1: the other side has closed")


@pytest.fixture
def joined(leader: Leader, tmp_path: Path) -> Iterator[Joined]:
    made = Joined(leader, tmp_path)
    yield made
    made.connection.close()
    made.node.session.close()


def test_a_machine_that_has_lost_a_rank_may_leave_with_the_other(joined: Joined) -> None:
    """`uneven join` did not end: a rank that was lost before was waited for."""
    joined.ranks.lose(1, "rank 1 was ended by SIGKILL: 2 ranks go on")
    joined.end_ranks(-9, None)
    joined.ranks.let_go(2, "rank 1 has handed in 4 samples and left: 1 rank goes on")
    assert joined.node.has_place
    joined.end_ranks(-9, 0)
    end = {"end": "rank 1 has handed in 4 samples and left: 1 rank goes on", "code": 0, "has_left": 1}
    assert read(joined.connection) == end
    assert not joined.node.has_place


def test_a_machine_whose_ranks_are_all_lost_is_told_and_has_no_place_any_more(joined: Joined) -> None:
    for number in (1, 2):
        joined.ranks.lose(number, "both were ended by SIGKILL: 1 rank goes on")
    joined.end_ranks(-9, None)
    assert joined.node.has_place
    joined.end_ranks(-9, -9)
    assert read(joined.connection) == {"dropped": "both were ended by SIGKILL: 1 rank goes on"}
    assert not joined.node.has_place


def test_a_machine_that_was_silent_too_long_finds_that_it_was_given_up(joined: Joined) -> None:
    """It said that the leader was lost, which went on without it."""
    joined.node.session.why_lost = "nothing was heard for 5 s"
    for number, line in joined.ranks.lost().items():
        joined.ranks.lose(number, line)
    joined.ranks.exit_codes()
    told = read(joined.connection)["dropped"]
    assert told == "pc (127.0.0.1) is lost with rank 1, 2: nothing was heard for 5 s"
    with pytest.raises(WireError, match="closed"):
        read(joined.connection)


def test_a_machine_that_cannot_train_ends_the_run_for_all(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the leader, which would wait for ten minutes for a machine that has left."""

    def refuse() -> None:
        raise MachineError("torch 2.1.0 is too old; run: pip install 'torch>=2.8'")

    monkeypatch.setattr(joining, "refuse_unsupported", refuse)
    gathering = leader.gather()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(joining.join_run, joining.JoinOptions(leader.door.place, TOKEN), lambda _: None)
        with pytest.raises(RefusedError, match=r": torch 2.1.0 is too old; run: pip install") as caught:
            gathering.wait()
        end_sessions(gathering.sessions, str(caught.value), 1)
        with pytest.raises(RankError, match=r"ended the run: .*torch 2.1.0 is too old"):
            joined.result(30.0)


def test_a_machine_that_hears_of_the_end_before_the_start_has_not_trained(leader: Leader, tmp_path: Path) -> None:
    gathering = leader.gather(replace(OPTIONS, fewest=1, most=3, wait=0.0))
    options = joining.JoinOptions(leader.door.place, TOKEN)
    session = Session(leader.join("pc"))
    said: list[str] = []
    node = joining.Node(options, session, tmp_path, ("127.0.0.1", leader.door.port), said.append, NEVER)
    assert "order" in node._hear("order", timeout_s=30.0)
    for end, error in (("", RefusedError), ("all is well", SystemExit)):
        gathering.sessions[0].send(end=end, code=0)
        with pytest.raises(error):
            node._hear("go", timeout_s=30.0)
    assert said == ["all is well"]
    session.close()


def test_a_machine_that_hears_no_answer_ends_the_run(leader: Leader) -> None:
    tell_unheard("127.0.0.1", leader.door.port, TOKEN, "pc")
    with pytest.raises(RefusedError, match=r"pc: the way from .* \(127.0.0.1\) is closed .*sudo ufw allow from 127.0"):
        leader.gather().wait()
