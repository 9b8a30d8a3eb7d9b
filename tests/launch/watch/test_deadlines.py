"""Which rank counts as lost or stuck, on made-up heartbeats; and the watch of ranks that torchrun started."""

import json
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from uneven.errors import RankError
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.external import peers
from uneven.launch.external.lines import LineKeeper
from uneven.launch.external.peers import PeerWatch
from uneven.launch.external.stopped import process_identity
from uneven.launch.watch.deadlines import RankHealth, check_deadlines

DEVICES = parse_devices("cpu,cpu@0.4")
ROSTER = Roster(DEVICES, (0, 1), ("here", "there"))


def ranks(*phases: str, now_s: float = 100.0, **status: Any) -> list[RankHealth]:
    """Two ranks that have sent a heartbeat in these phases every 0.2 s until `now_s`, always at slot 3."""
    health = [RankHealth(f"host/{device}/aa", device, 0.0, 0.0) for device in DEVICES]
    for rank, (peer, phase) in enumerate(zip(health, phases, strict=True)):
        for count in range(int(now_s * 5) + 1):
            peer.update({"count": count, "rank": rank, "slot": 3, "phase": phase, **status}, count / 5)
    return health


def test_long_work_of_the_users_own_inside_an_epoch_is_named_with_the_two_ways_out() -> None:
    with pytest.raises(RankError, match=r"rank 0 \(cpu on host\) is stuck in compute at slot 3 for 30 s") as caught:
        check_deadlines(ranks("compute", "wait"), [0, 1], 100.0)
    assert 'with ddp.pause("evaluation"):' in str(caught.value)
    assert "deadline=SECONDS (now 'auto'; None waits for ever)" in str(caught.value)


@pytest.mark.parametrize("status", [{"deadline": None}, {"deadline": 1000.0}])
def test_deadline_says_how_long(status: dict[str, Any]) -> None:
    check_deadlines(ranks("compute", "wait", **status), [0, 1], 100.0)
    with pytest.raises(RankError, match=r"rank 0 .* for 20 s"):
        check_deadlines(ranks("compute", "wait", deadline=20.0), [0, 1], 100.0)
    check_deadlines(ranks("compute", "wait", now_s=9.0, deadline=10.0), [0, 1], 9.0)


def test_a_pause_may_last_and_holds_off_the_deadline_of_those_who_wait() -> None:
    check_deadlines(ranks("user", "wait"), [0, 1], 100.0)
    check_deadlines(ranks("user", "user"), [0, 1], 100.0)


def test_silence_is_a_loss_except_in_code_that_may_hold_pythons_lock() -> None:
    with pytest.raises(RankError, match=r"rank 0 .* fell silent 20 s ago .*deadline=SECONDS"):
        check_deadlines(ranks("compute", "compute"), [0, 1], 120.0)
    check_deadlines(ranks("user", "user"), [0, 1], 120.0)
    check_deadlines(ranks("compute", "compute", deadline=None), [0, 1], 120.0)
    check_deadlines(ranks("compute", "compute"), [], 120.0)  # both have ended


def test_in_code_of_the_users_own_silence_counts_from_when_a_signal_has_stopped_the_process() -> None:
    """A rank that was stopped inside a callback was never missed, and the others waited for ever."""
    found = ranks("user", "wait")
    found[1].update({"count": 10**6, "rank": 1, "slot": 3, "phase": "wait"}, 2000.0)
    check_deadlines(found, [0, 1], 2000.0)
    found[0].is_stopped = True
    for now_s in (2000.0, 2014.0):
        check_deadlines(found[:1], [0], now_s)
    found[0].is_stopped = False  # it was woken, and is on with its work
    check_deadlines(found[:1], [0], 2020.0)
    found[0].is_stopped = True
    check_deadlines(found[:1], [0], 2021.0)
    check_deadlines(found[:1], [0], 2035.0)
    with pytest.raises(RankError, match=r"rank 0 .* fell silent 16 s ago \(stopped or swapped out\?\)"):
        check_deadlines(found[:1], [0], 2037.0)
    forever = ranks("user", "user", deadline=None)
    forever[0].is_stopped = True
    for now_s in (200.0, 2000.0):
        check_deadlines(forever, [0, 1], now_s)


class DictStore(dict[str, bytes]):
    """A store in this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def peer_watches(phases: list[str], now: list[float], told: list[tuple[int, str]]) -> list[PeerWatch]:
    """Watches of two ranks on a clock of their own; their threads have ended, so that the test alone moves them."""
    store: Any = DictStore()

    def watch(rank: int) -> PeerWatch:
        def read() -> dict[str, Any]:
            return {"member": f"host{rank}/x/aa", "rank": rank, "slot": 7, "phase": phases[rank]}

        made = PeerWatch(store, rank, ROSTER, read, lambda text: told.append((rank, text)), clock=lambda: now[0])
        made.close()
        return made

    return [watch(0), watch(1)]


def test_under_torchrun_rank_0_finds_the_stuck_rank_and_every_rank_is_told() -> None:
    now, told = [0.0], list[tuple[int, str]]()
    watches = peer_watches(["wait", "data"], now, told)
    while not told:
        assert now[0] < 60.0
        now[0] += 1.0
        for watch in reversed(watches):
            watch.exchange()
    watches[1].exchange()
    assert 30.0 < now[0] < 35.0
    assert [rank for rank, _ in told] == [0, 1]
    assert all("rank 1 (cpu@0.4 on host1) is stuck in data at slot 7" in text for _, text in told)


def test_under_torchrun_a_rank_whose_run_is_over_is_not_missed_and_a_lost_one_is() -> None:
    now, told = [0.0], list[tuple[int, str]]()
    first, second = peer_watches(["wait", "wait"], now, told)
    for now[0] in range(100):
        first.exchange()
    assert told == []
    second.exchange()
    for now[0] in range(100, 117):
        first.exchange()
    ((_, text),) = told[:1]
    assert "rank 1 (cpu@0.4 on host1) fell silent 16 s ago" in text


def test_a_rank_that_is_cut_off_before_its_first_heartbeat_is_missed_like_any_other() -> None:
    """All ranks were there, so it has no 120 s to start. Seen with a cable that was pulled at the start of a run."""
    now, told = [0.0], list[tuple[int, str]]()
    store: Any = DictStore()
    status = {"member": "here/x/aa", "rank": 0, "slot": 7, "phase": "wait"}
    first = PeerWatch(store, 0, ROSTER, lambda: status, lambda text: told.append((0, text)), clock=lambda: now[0])
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
    assert last["process"] == process_identity()


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


def test_rank_0_ends_when_those_who_live_have_heard_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may serve the store: without it the others would say that rank 0's machine is gone."""
    now, told = [0.0], list[tuple[int, str]]()
    first, second = peer_watches(["wait", "data"], now, told)
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


def test_a_rank_in_code_of_the_users_own_is_missed_when_its_line_breaks_and_not_before() -> None:
    """Its heartbeat may stand still for as long as that code holds Python's lock; its kernel keeps the line."""
    now, told = [0.0], list[str]()
    store: Any = DictStore()
    status = {"slot": 7, "phase": "user"}
    first = PeerWatch(store, 0, ROSTER, lambda: status, told.append, clock=lambda: now[0])
    first.close()
    first._keeper = LineKeeper("127.0.0.1")
    second = PeerWatch(store, 1, ROSTER, lambda: status, told.append)
    second.close()
    first.exchange()  # posts where the line is
    second.exchange()
    while not first._keeper._lines:
        first.exchange()
    now[0] = 1000.0
    first.exchange()
    assert told == []
    second._line.close()  # as the kernel does for a process that has ended
    while not first._keeper.lost:
        first.exchange()
    first.exchange()
    assert "rank 1 (cpu@0.4 on there) fell silent 1000 s ago (it or its machine is gone" in told[0]
    second._line.keep(first._line_place)  # the cable is in again
    while first._keeper.lost:
        first._keeper.poll()
    first._keeper.close()
    second._line.close()


def test_under_torchrun_rank_0_asks_whether_a_silent_process_of_its_machine_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told, stopped = [0.0], list[tuple[int, str]](), set[str]()
    monkeypatch.setattr(peers, "is_stopped", stopped.__contains__)
    first, second = peer_watches(["wait", "user"], now, told)
    second.exchange()
    for now[0] in range(0, 1000, 100):
        first.exchange()
    assert told == []
    stopped.add(process_identity())
    for now[0] in range(1000, 1017):
        first.exchange()
    ((_, text),) = told[:1]
    assert "rank 1 (cpu@0.4 on host1) fell silent 16 s ago" in text


def test_lines_are_for_those_who_know_the_word() -> None:
    keeper = LineKeeper("127.0.0.1")
    address, port, word = keeper.place.split(" ")
    with ExitStack() as stack:
        stack.callback(keeper.close)
        strangers = [stack.enter_context(socket.create_connection((address, int(port)))) for _ in range(4)]
        for stranger, said in zip(strangers, (b"guess 1\n", b"\xff" * 60, f"{word} x\n".encode(), b""), strict=True):
            stranger.sendall(said)
        for stranger in strangers[:3]:
            stranger.settimeout(0.01)
            while True:
                keeper.poll()
                try:
                    assert stranger.recv(1) == b""
                    break
                except TimeoutError:
                    continue
                except ConnectionResetError:
                    break
        assert keeper.lost == set()
        assert len(keeper._strangers) == 1  # it has said nothing yet


def test_a_hang_in_a_collective_is_called_that() -> None:
    """Where ranks start collectives in different orders, no code of the user's own is slow."""
    found = ranks("compute", "compute")
    for rank, name in enumerate(("all_reduce", "broadcast")):
        found[rank].update({**found[rank].status, "count": 10**6, "collective": f"{name} of 8 bytes"}, 100.0)
    words = r"rank 0 .*collective at slot 3 .*rank 0 in all_reduce of 8 bytes; rank 1 in broadcast.*different orders"
    with pytest.raises(RankError, match=words) as caught:
        check_deadlines(found, [0, 1], 100.0)
    assert "pause" not in str(caught.value)
    found[1].update({"count": 10**6 + 1, "rank": 1, "slot": 3, "phase": "compute"}, 100.0)
    with pytest.raises(RankError, match=r"rank 1 .* is stuck in compute .*pause"):  # whom the other waits for
        check_deadlines(found, [0, 1], 100.0)
