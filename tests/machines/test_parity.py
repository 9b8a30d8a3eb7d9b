"""What must agree between machines and what may differ: one row per rule."""

from typing import Any

import pytest

from uneven.machines.parity import NOTES, RULES, Difference, compare, notes

GPU = {"device": "cuda:0", "name": "A", "precisions": ["fp32", "bf16", "fp16"], "auto": "bf16", "why": "native"}
CPU = {"device": "cpu", "name": "B", "precisions": ["fp32"], "auto": "fp32", "why": "no native bf16"}
FACTS: dict[str, Any] = {
    "host": "node1",
    "arch": "x86_64",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.1",
    "uneven": {"version": "0.1.0", "digest": "aa"},
    "code": {"train.py": "11aa", "model.py": "22bb"},
    "nccl": "2.28.9",
    "devices": [CPU],
    "clock": 1000.0,
}


def differ(**changes: Any) -> list[Difference]:
    settings = {name: changes.pop(name) for name in ("precision", "backend", "skip") if name in changes}
    leader = {**FACTS, **changes.pop("leader", {})}
    return compare(leader, {**FACTS, "host": "node2", **changes}, round_trip_s=0.2, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.12.1+cpu"}, "node2: torch is 2.12.1+cpu, the leader's is 2.13.0+cpu; pip install torch==2.13.0"),
        ({"torch": None}, "node2: torch is missing, the leader's is 2.13.0+cpu; pip install torch==2.13.0 there"),
        ({"python": "3.10.4"}, "node2: Python is 3.10.4, the leader's is 3.11.7; use Python 3.11 there"),
        ({"uneven": {"version": "0.1.0", "digest": "bb"}}, "node2: uneven is 0.1.0 (bb), the leader's is 0.1.0 (aa);"),
        ({"code": {"train.py": "33cc", "model.py": "22bb"}}, "node2: train.py differs; copy the leader's there"),
        ({"code": {"train.py": "11aa", "model.py": "44"}}, "node2: model.py differs; copy"),
        ({"code": {}}, "node2: train.py is not there; copy"),
        ({"code": {"train.py": "11aa"}}, "node2: model.py differs; copy"),
        ({"clock": 1061.0}, "node2: the clock is 61 s ahead of the leader's; set it there: sudo timedatectl"),
        ({"clock": 940.0}, "node2: the clock is 60 s behind the leader's; set it there"),
        (
            {"leader": {"devices": [GPU]}, "devices": [GPU], "nccl": "2.21.5"},
            "node2: NCCL is 2.21.5, the leader's is 2.28.9; pip install the leader's torch build there",
        ),
        (
            {"leader": {"devices": [GPU]}, "precision": "bf16"},
            "node2: precision='bf16' on cpu (B) is not native, the leader's is native; use precision='auto'",
        ),
        (
            {"devices": [GPU], "precision": "bf16"},
            "node1: precision='bf16' on cpu (B) is not native, but that of node2",
        ),
    ],
)
def test_a_difference_is_refused_with_host_and_fix(changes: dict[str, Any], message: str) -> None:
    (difference,) = differ(**changes)
    assert message in str(difference)
    assert "\n" not in str(difference)
    assert differ(**changes, skip=(difference.check,)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch": "2.13.0+cu128"},
        {"torch": "2.13.1"},
        {"python": "3.11.2"},
        {"arch": "aarch64"},
        {"numpy": "1.26.4"},
        {"clock": 1029.0},
        {"nccl": "2.21.5"},  # no rank here has a CUDA device
        {"leader": {"devices": [GPU]}, "devices": [GPU], "nccl": "2.21.5", "backend": "cpu"},
        {"leader": {"devices": [GPU]}, "devices": [GPU], "nccl": None},
        {"leader": {"devices": [GPU]}, "precision": "auto"},
        {"precision": "bf16"},  # emulated on all of them: the user's choice, as on one machine
    ],
)
def test_what_may_differ(changes: dict[str, Any]) -> None:
    assert differ(**changes) == []


def test_several_differences_come_gravest_first() -> None:
    found = differ(torch="2.8.0", uneven={"version": "0.0.9", "digest": "cc"}, clock=0.0)
    assert [difference.check for difference in found] == ["uneven", "torch", "clock"]


@pytest.mark.parametrize(
    ("changes", "what"), [({"torch": "2.13.1"}, ["torch"]), ({"numpy": "1.26.4"}, ["numpy"]), ({"torch": "2.8.0"}, [])]
)
def test_notes_tell_what_is_allowed_but_differs(changes: dict[str, Any], what: list[str]) -> None:
    assert [note.what for note in notes(FACTS, {**FACTS, **changes})] == what


def test_every_rule_has_its_reason() -> None:
    assert all(rule.fix for rule in (*RULES, *NOTES))
