"""Slow a rank down on purpose: after each step it sleeps, so that the step takes 1/speed as long.

Sleeping is not exact, so the difference is carried over to the next step; over many steps the mean is right. Used by
the engine and by `uneven devices --measure` for `cpu@0.4`.
"""

import os
import time
from collections.abc import Callable

from uneven.errors import InputError


class Throttle:
    """Call pause(step_seconds) after every step; speed 1.0 never sleeps.

    Invariant: after any number of pauses, slept + debt == (1/speed - 1) * sum of step_seconds, where the debt
    is at most one oversleep. A long stall of the machine is thus compensated by shorter sleeps.
    """

    def __init__(
        self,
        speed: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        if not 0.0 < speed <= 1.0:
            raise InputError(f"speed {speed!r} is outside 0 < SPEED <= 1, as in cpu@0.4")
        self.speed = speed
        self.debt_s = 0.0
        self._clock = clock
        # A sleeping rank leaves its core to others, a truly slow device does not; UNEVEN_SLOW=spin simulates that.
        self._sleep = sleep or (_spin if os.environ.get("UNEVEN_SLOW") == "spin" else time.sleep)

    def pause(self, step_seconds: float) -> float:
        """Sleep for this step and any debt; returns the seconds actually slept."""
        if self.speed == 1.0:
            return 0.0
        self.debt_s += step_seconds * (1.0 / self.speed - 1.0)
        if self.debt_s <= 0.0:
            return 0.0
        start = self._clock()
        self._sleep(self.debt_s)
        slept = self._clock() - start
        self.debt_s -= slept
        return slept


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
