"""Rank processes as a watch sees them, without any: a test says with which codes they end. And some that run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import parse_devices
from uneven.hardware.roster import Roster
from uneven.launch.local_ranks import LocalRanks, RunPlan


class FakeProcesses:
    """None is lost or stopped, none joins or is asked to leave, and none may be given up."""

    def __init__(self, exit_codes: Callable[[], list[int | None]] = list) -> None:
        self._exit_codes = exit_codes

    def exit_codes(self) -> list[int | None]:
        return self._exit_codes()

    def lost(self) -> dict[int, str]:
        return {}

    def stopped(self) -> set[int]:
        return set()

    def arrivals(self, *_: Any) -> list[Any]:
        return []

    def asked(self) -> list[Any]:
        return []

    def restart(self, *_: Any) -> None:
        return None

    def turn_away(self, *_: Any) -> None:
        """Nobody is told."""

    let_go = lose = turn_away

    def give_up(self, number: int) -> None:
        raise AssertionError(f"process {number} is given up")


def local_cpus(folder: Path, count: int) -> LocalRanks:
    """Processes of a run that has no store: they fail before long."""
    roster = Roster.on_one_machine(parse_devices(",".join(["cpu"] * count)))
    plan = RunPlan(roster, tuple(f"vm/cpu/{rank}" for rank in range(count)), ("127.0.0.1", 1))
    return LocalRanks(folder, plan, assign_cores(roster.devices, available_cores()), None, [{}] * count)
