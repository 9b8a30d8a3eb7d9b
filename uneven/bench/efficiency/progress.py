"""The progress of an efficiency measurement: pairs done, and the interval so far."""

from collections.abc import Sequence
from typing import Any

from uneven.results.progress import Reporter


class PairsBar(Reporter):
    """Shows the pairs that rank 0 reports: on a terminal as a bar, elsewhere every tenth as a line."""

    def __init__(self, style: str, expected: int) -> None:
        super().__init__(style)
        self._expected = expected
        self._shown_pairs = 0

    def ranks(self, statuses: Sequence[dict[str, Any]]) -> None:
        history = statuses[0].get("history", [])
        if len(history) == self._shown_pairs:
            return
        last = history[-1]
        mean, half = last["interval"]
        if self.style == "bar":
            if self._bar is None:
                self._open(self._expected, ["pairs"])
            assert self._bar is not None
            total = max(self._expected, last["pairs"])
            self._bar.update(
                self._tasks[0],
                completed=last["pairs"],
                total=total,
                speed="-",
                loss=f"efficiency {mean:.3f} +- {half:.3f}",
            )
        elif last["pairs"] // 10 > self._shown_pairs // 10:
            self.say([f"{last['pairs']} pairs: efficiency {mean:.3f} +- {half:.3f}"])
        self._shown_pairs = len(history)
