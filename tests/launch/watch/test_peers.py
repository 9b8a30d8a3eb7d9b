"""The watch of ranks that torchrun or another launcher than ours started: they watch each other."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.watch import peers
from uneven.launch.watch.peers import PeerWatch

DEVICES = parse_devices("cpu,cpu@0.4")
ROSTER = Roster(DEVICES, (0, 1), ("here", "there"))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the watches, which a test moves."""
    found = [0.0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


class DictStore(dict[str, bytes]):
    """A store in this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def peer_watches(phases: list[str], told: list[tuple[int, str]]) -> list[PeerWatch]:
    """Watches of two ranks on a clock of their own; their threads have ended, so that the test alone moves them."""
    store: Any = DictStore()

    def watch(rank: int) -> PeerWatch:
        def read() -> dict[str, Any]:
            return {"member": f"host{rank}/x/aa", "rank": rank, "slot": 7, "phase": phases[rank]}

        made = PeerWatch(store, rank, ROSTER, read, lambda text: told.append((rank, text)))
        made.close()
        return made

    return [watch(0), watch(1)]


def test_under_torchrun_rank_0_finds_the_stuck_rank_and_every_rank_is_told(now: list[float]) -> None:
    told = list[tuple[int, str]]()
    watches = peer_watches(["wait", "data"], told)
    while not told:
        assert now[0] < 60.0
        now[0] += 1.0
        for watch in reversed(watches):
            watch.exchange()
    watches[1].exchange()
    assert 30.0 < now[0] < 35.0
    assert [rank for rank, _ in told] == [0, 1]
    assert all("rank 1 (cpu@0.4 on host1) is stuck in data at slot 7" in text for _, text in told)


def test_under_torchrun_a_rank_whose_run_is_over_is_not_missed_and_a_lost_one_is(now: list[float]) -> None:
    told = list[tuple[int, str]]()
    first, second = peer_watches(["wait", "wait"], told)
    for now[0] in range(100):
        first.exchange()
    assert told == []
    second.exchange()
    for now[0] in range(100, 117):
        first.exchange()
    ((_, text),) = told[:1]
    assert "rank 1 (cpu@0.4 on host1) fell silent 16 s ago" in text


def test_a_rank_that_is_cut_off_before_its_first_heartbeat_is_missed_like_any_other(now: list[float]) -> None:
    """All ranks were there, so it has no 120 s to start. Seen with a cable that was pulled at the start of a run."""
    told = list[tuple[int, str]]()
    store: Any = DictStore()
    status = {"member": "here/x/aa", "rank": 0, "slot": 7, "phase": "wait"}
    first = PeerWatch(store, 0, ROSTER, lambda: status, lambda text: told.append((0, text)))
    first.close()
    for now[0] in range(1, 17):
        first.exchange()
    ((_, text),) = told
    assert "rank 1 (cpu@0.4 on there) fell silent 16 s ago" in text


def test_the_first_heartbeat_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "INTERVAL_S", 3600.0)
    store: Any = DictStore()
    watch = PeerWatch(store, 1, ROSTER, lambda: {"slot": 0, "phase": "setup"}, lambda _: None)
    watch.close()
    last = json.loads(store["heartbeat/there/rank-1"])
    assert last["count"] == 2  # the first, and that its run is over


def test_ranks_of_one_machine_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other fails with a traceback about a peer that died, a moment before it hears why."""
    told, looks = list[str](), list[int]()
    store: Any = DictStore()
    roster = Roster((*DEVICES, DEVICES[0]), (0, 1, 1), ("here", "there"))
    watch = PeerWatch(store, 1, roster, lambda: {"slot": 0, "phase": "wait"}, told.append)
    watch.close()
    store.set("failed", "why")

    def wait(seconds: float) -> bool:
        looks.append(len(told))
        store.set("heard/2", "1")
        return False

    monkeypatch.setattr(watch._closed, "wait", wait)
    watch.exchange()
    assert looks == [0]
    assert told == ["why"]


def test_rank_0_ends_when_those_who_live_have_heard_why(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may serve the store: without it the others would say that rank 0's machine is gone."""
    told = list[tuple[int, str]]()
    first, second = peer_watches(["wait", "data"], told)
    second.exchange()
    first.exchange()
    heard: list[int] = []

    def wait(seconds: float) -> bool:
        heard.append(len(told))
        second.exchange()  # while rank 0 waits
        return False

    monkeypatch.setattr(first._closed, "wait", wait)
    for now[0] in range(1, 40):
        second.exchange()
        first.exchange()
        if told:
            break
    assert heard == [0]  # one look was enough
    assert [rank for rank, _ in told] == [1, 0]


def test_a_rank_in_code_of_the_users_own_is_missed_after_ten_minutes_and_not_before(now: list[float]) -> None:
    """Its heartbeat may stand still for as long as that code holds Python's lock."""
    told = list[tuple[int, str]]()
    first, second = peer_watches(["wait", "user"], told)
    second.exchange()
    for now[0] in range(0, 600, 100):
        first.exchange()
    assert told == []
    for now[0] in range(601, 640):
        first.exchange()
    assert "rank 1 (cpu@0.4 on host1) fell silent" in told[0][1]
