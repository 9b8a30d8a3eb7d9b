"""Who counts as lost or stuck, on made-up heartbeats, and what a run that cannot go on is said to have ended by."""

from collections.abc import Sequence
from typing import Any

import pytest

from uneven.errors import RankError
from uneven.hardware.device import parse_devices
from uneven.launch.watch.lost import RankHealth, find_cause, find_lost

DEVICES = parse_devices("cpu,cpu@0.4")
NAMES = {0: "rank 0 (cpu on node1)", 1: "rank 1 (cpu on node2)"}
GONE = "node2 (192.0.2.2) is lost with rank 1: the other side has closed the connection"


def error(what: str) -> dict[str, Any]:
    return {"what": what, "kind": "RuntimeError", "time": 1.0, "member": "node1/cpu/1", "traceback": "...", "place": ""}


def check(ranks: Sequence[RankHealth], running: Sequence[int], now_s: float) -> None:
    for number, (what, advice) in find_lost(ranks, running, now_s).items():
        raise RankError(f"{ranks[number].name(number)} {what}{advice}")


def ranks(*phases: str, now_s: float = 100.0, **status: Any) -> list[RankHealth]:
    """Two ranks that have sent a heartbeat in these phases every 0.2 s until `now_s`, always at slot 3."""
    health = [RankHealth(f"host/{device}/aa", device, 0.0, 0.0) for device in DEVICES]
    for rank, (peer, phase) in enumerate(zip(health, phases, strict=True)):
        for count in range(int(now_s * 5) + 1):
            peer.update({"count": count, "rank": rank, "slot": 3, "phase": phase, **status}, count / 5)
    return health


def test_long_work_of_the_users_own_inside_an_epoch_is_named_with_the_two_ways_out() -> None:
    with pytest.raises(RankError, match=r"rank 0 \(cpu on host\) is stuck in compute at slot 3 for 30 s") as caught:
        check(ranks("compute", "wait"), [0, 1], 100.0)
    assert 'with ddp.pause("evaluation"):' in str(caught.value)
    assert "deadline=SECONDS (now 'auto'; None waits for ever)" in str(caught.value)


@pytest.mark.parametrize("status", [{"deadline": None}, {"deadline": 1000.0}])
def test_deadline_says_how_long(status: dict[str, Any]) -> None:
    check(ranks("compute", "wait", **status), [0, 1], 100.0)
    with pytest.raises(RankError, match=r"rank 0 .* for 20 s"):
        check(ranks("compute", "wait", deadline=20.0), [0, 1], 100.0)
    check(ranks("compute", "wait", now_s=9.0, deadline=10.0), [0, 1], 9.0)


def test_a_pause_may_last_and_holds_off_the_deadline_of_those_who_wait() -> None:
    check(ranks("user", "wait"), [0, 1], 100.0)
    check(ranks("user", "user"), [0, 1], 100.0)


def test_silence_is_a_loss_except_in_code_that_may_hold_pythons_lock() -> None:
    with pytest.raises(RankError, match=r"rank 0 .* fell silent 20 s ago .*deadline=SECONDS"):
        check(ranks("compute", "compute"), [0, 1], 120.0)
    check(ranks("user", "user"), [0, 1], 120.0)
    check(ranks("compute", "compute", deadline=None), [0, 1], 120.0)
    check(ranks("compute", "compute"), [], 120.0)  # both have ended


def test_in_code_of_the_users_own_silence_counts_from_when_a_signal_has_stopped_the_process() -> None:
    """A rank that was stopped inside a callback was never missed, and the others waited for ever."""
    found = ranks("user", "wait")
    found[1].update({"count": 10**6, "rank": 1, "slot": 3, "phase": "wait"}, 2000.0)
    check(found, [0, 1], 2000.0)
    found[0].is_stopped = True
    for now_s in (2000.0, 2014.0):
        check(found[:1], [0], now_s)
    found[0].is_stopped = False  # it was woken, and is on with its work
    check(found[:1], [0], 2020.0)
    found[0].is_stopped = True
    check(found[:1], [0], 2021.0)
    check(found[:1], [0], 2035.0)
    with pytest.raises(RankError, match=r"rank 0 .* fell silent 16 s ago \(stopped or swapped out\?\)"):
        check(found[:1], [0], 2037.0)
    forever = ranks("user", "user", deadline=None)
    forever[0].is_stopped = True
    for now_s in (200.0, 2000.0):
        check(forever, [0, 1], now_s)


def test_a_hang_in_a_collective_is_called_that() -> None:
    """Where ranks start collectives in different orders, no code of the user's own is slow."""
    found = ranks("compute", "compute")
    for rank, name in enumerate(("all_reduce", "broadcast")):
        found[rank].update({**found[rank].status, "count": 10**6, "collective": f"{name} of 8 bytes"}, 100.0)
    words = r"rank 0 .*collective at slot 3 .*rank 0 in all_reduce of 8 bytes; rank 1 in broadcast.*different orders"
    with pytest.raises(RankError, match=words) as caught:
        check(found, [0, 1], 100.0)
    assert "pause" not in str(caught.value)
    found[1].update({"count": 10**6 + 1, "rank": 1, "slot": 3, "phase": "compute"}, 100.0)
    with pytest.raises(RankError, match=r"rank 1 .* is stuck in compute .*pause"):  # whom the other waits for
        check(found, [0, 1], 100.0)


def test_a_rank_that_notices_a_lost_machine_before_its_launcher_is_not_the_cause() -> None:
    """It only knows that a connection broke. With on_fault='end' the line had blamed the healthy rank."""
    peer = error("GroupLostError: Connection closed by peer [192.0.2.2]:4711")
    found = find_cause(NAMES, {0: peer}, [1, None], "on_fault='end'", [GONE])
    assert str(found) == f"{GONE}; on_fault='end'; the run ends on all machines"


def test_a_rank_that_fails_by_itself_is_the_cause_though_a_machine_is_lost_too() -> None:
    found = find_cause(NAMES, {0: error("ValueError: no such column")}, [1, None], "", [GONE])
    assert str(found).startswith("rank 0 (cpu on node1) failed: ValueError: no such column")
