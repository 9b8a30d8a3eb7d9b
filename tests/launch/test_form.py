"""How members wait for each other before they form the group of a generation: a real store, and a clock that is set."""

import json
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.memberships import MEMBERS, ROSTER, FakeGroup, await_truth, on_thread
from uneven.comm.store import TCPStore, open_store, reach_store
from uneven.errors import GroupLostError
from uneven.launch import membership as membership_module
from uneven.launch.heartbeat import heartbeat_key
from uneven.launch.membership import LEFT_S, WAITING_S, RunStart, Steps, StoreMembership, patience_s
from uneven.launch.newcomer import OVER, announce_run
from uneven.train.rank_info import Generation

PAIR = Generation(1, ROSTER.without([2]), MEMBERS[:2], "lost (2,)")


def here_key(number: int, run: int = 1) -> str:
    return f"run/{run}/here/{PAIR.number}/{MEMBERS[number]}"


@pytest.fixture
def port_and_store() -> Iterator[tuple[int, TCPStore]]:
    store, port = open_store()
    yield port, store
    del store


def test_a_group_begins_to_form_when_all_of_its_members_are_there(port_and_store: tuple[int, TCPStore]) -> None:
    """One may be in an evaluation: the others gave the group up after 20 s, and the run after six of them."""
    port, store = port_and_store
    happened: list[str] = []

    def make_group(generation: Generation, rank: int) -> Any:
        happened.append(f"{generation.members[rank]} forms")
        return FakeGroup()

    def member(number: int) -> StoreMembership:
        return StoreMembership(reach_store("127.0.0.1", port), MEMBERS[number], RunStart(1, 0, 60.0), Steps(make_group))

    first, second = member(0), member(1)
    early = on_thread(lambda: first.form(PAIR))
    await_truth(lambda: bool(happened) or store.check([here_key(0)]))
    happened.append("the other comes")
    late = on_thread(lambda: second.form(PAIR))
    for result in (early, late):
        result()
    assert happened[0] == "the other comes"
    assert len(happened) == 3


class Waiting:
    """Rank 0, which forms the group with rank 1; a look takes a second. `at` says what happens at which."""

    def __init__(self, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now_s = store, 0.0
        self.at: dict[float, Callable[[], Any]] = {}
        self.is_alive = True  # rank 1 sends heartbeats
        self._status: dict[str, Any] = {}
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(membership_module, "time", clock)

    def _sleep(self, _: float) -> None:
        self.now_s += 1.0
        assert self.now_s < 1000, "it waits for ever"
        self.at.get(self.now_s, lambda: None)()
        self.beat(**self._status)

    def form(self, run: int = 1, **how: Any) -> float:
        """When the group begins to form."""
        steps: Any = Steps(lambda *_: FakeGroup())  # type: ignore[arg-type, return-value]
        StoreMembership(self.store, MEMBERS[0], RunStart(run, 0, 60.0), steps).form(PAIR, **how)
        return self.now_s

    def beat(self, **status: Any) -> None:
        self._status = status
        if self.is_alive:
            self.store.set(heartbeat_key(MEMBERS[1]), json.dumps({**status, "at": self.now_s}))

    def come(self, run: int = 1) -> None:
        self.store.set(here_key(1, run), "1")


@pytest.fixture
def waiting(port_and_store: tuple[int, TCPStore], monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(port_and_store[1], monkeypatch)


@pytest.mark.parametrize("phase", ["evaluation", "user", "checkpoint", "compute"])
def test_a_member_is_waited_for_as_long_as_the_launcher_lets_it_be(waiting: Waiting, phase: str) -> None:
    waiting.beat(min_ranks=1, phase=phase)
    waiting.at[600.0] = waiting.come
    assert waiting.form() == 600.0


def test_a_member_that_has_left_the_run_or_only_waits_is_given_up(waiting: Waiting) -> None:
    waiting.beat(phase="setup", is_past=True)
    with pytest.raises(GroupLostError, match="a peer did not come within 20 s"):
        waiting.form()
    waiting.beat(min_ranks=1, phase="wait")
    began_s = waiting.now_s
    waiting.at[began_s + 60] = lambda: waiting.beat(min_ranks=1, phase="compute")
    waiting.at[began_s + 90] = lambda: waiting.beat(min_ranks=1, phase="communication")
    with pytest.raises(GroupLostError, match="a peer did not come within 120 s"):
        waiting.form()
    assert waiting.now_s >= began_s + 90 + WAITING_S, "from its last work on"


def test_a_member_that_is_silent_is_given_up(waiting: Waiting) -> None:
    """Its own code may have ended it by os._exit(0) in a run that the launcher does not know of."""
    waiting.beat(min_ranks=1, phase="evaluation")
    waiting.at[200.0] = lambda: setattr(waiting, "is_alive", False)
    with pytest.raises(GroupLostError, match="a peer was silent for 120 s"):
        waiting.form()
    assert 319.0 <= waiting.now_s <= 322.0


def test_patience_ends_for_those_who_have_left_and_where_all_who_are_missing_wait() -> None:
    busy, waits = {"min_ranks": 1, "phase": "evaluation"}, {"min_ranks": 1, "phase": "wait"}
    assert patience_s([busy, waits], is_own_loop=False) == math.inf
    assert patience_s([waits, waits], is_own_loop=False) == WAITING_S
    assert patience_s([waits, waits], is_own_loop=True) == math.inf
    assert patience_s([busy, {"phase": "setup"}], is_own_loop=True) == LEFT_S


def test_nobody_waits_for_a_run_that_is_over(waiting: Waiting) -> None:
    """A run of the script beyond the first was never over to those who waited."""
    waiting.beat(min_ranks=1, phase="evaluation")
    announce_run(waiting.store, 2, "")
    waiting.at[5.0] = lambda: waiting.come(run=2)
    assert waiting.form(run=2) == 5.0
    waiting.store.delete_key(here_key(1, run=2))
    waiting.at[9.0] = lambda: announce_run(waiting.store, 2, OVER)
    with pytest.raises(GroupLostError, match="it is over"):
        waiting.form(run=2)
    assert waiting.now_s == 9.0
    with pytest.raises(GroupLostError, match="it is over"):
        waiting.form(run=1)
