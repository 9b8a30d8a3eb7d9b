"""Rank processes as a watch sees them, without any: a test says with which codes they end."""


class FakeProcesses:
    """None is lost or stopped, and none may be given up."""

    def lost(self) -> dict[int, str]:
        return {}

    def stopped(self) -> set[int]:
        return set()

    def give_up(self, number: int) -> None:
        raise AssertionError(f"process {number} is given up")
