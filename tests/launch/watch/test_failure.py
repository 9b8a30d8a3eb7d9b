"""What a run that cannot go on is said to have ended by."""

from typing import Any

from uneven.launch.watch.failure import find_cause

NAMES = {0: "rank 0 (cpu on node1)", 1: "rank 1 (cpu on node2)"}
GONE = "node2 (192.0.2.2) is lost with rank 1: the other side has closed the connection"


def error(what: str) -> dict[str, Any]:
    return {"what": what, "kind": "RuntimeError", "time": 1.0, "member": "node1/cpu/1", "traceback": "...", "place": ""}


def test_a_rank_that_notices_a_lost_machine_before_its_launcher_is_not_the_cause() -> None:
    """It only knows that a connection broke. With on_fault='end' the line had blamed the healthy rank."""
    peer = error("GroupLostError: Connection closed by peer [192.0.2.2]:4711")
    found = find_cause(NAMES, {0: peer}, [1, None], "on_fault='end'", [GONE])
    assert str(found) == f"{GONE}; on_fault='end'; the run ends on all machines"


def test_a_rank_that_fails_by_itself_is_the_cause_though_a_machine_is_lost_too() -> None:
    found = find_cause(NAMES, {0: error("ValueError: no such column")}, [1, None], "", [GONE])
    assert str(found).startswith("rank 0 (cpu on node1) failed: ValueError: no such column")
