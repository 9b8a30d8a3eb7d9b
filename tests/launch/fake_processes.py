"""Rank processes as a watch sees them, without any: a test says with which codes they end."""

from collections.abc import Callable
from typing import Any


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
