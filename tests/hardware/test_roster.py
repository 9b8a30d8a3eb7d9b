"""The roster says which ranks are on one machine."""

from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster


def test_ranks_are_grouped_by_machine() -> None:
    roster = Roster(parse_devices("cpu,cpu,cpu,cpu"), (0, 1, 1, 2), ("a", "b", "b"))
    assert [roster.ranks_of(machine) for machine in range(3)] == [(0,), (1, 2), (3,)]
    assert roster.local_ranks(2) == (1, 2)
    assert [roster.host(rank) for rank in range(4)] == ["a", "b", "b", "b"]
    assert not roster.is_one_machine


def test_one_machine_is_the_default() -> None:
    roster = Roster.on_one_machine(parse_devices("cpu,cpu"))
    assert roster.is_one_machine
    assert roster.local_ranks(1) == (0, 1)
