"""A rank made slower on purpose: after each step it sleeps, so that the step takes 1/speed as long.

Sleeping is never exact, so what was slept too long or too short is carried over as a debt; over many steps
the mean is right. Used by the training worker and by `uneven devices --measure` for `cpu@0.4`.
"""

import os
import time
from collections.abc import Callable

from uneven.errors import InputError


class Throttle:
    """Call pause(step_seconds) after every step; speed 1.0 never sleeps.

    Invariant: after any number of pauses, slept + debt == (1/speed - 1) * sum of step_seconds, where the debt
    is at most one oversleep. One long stall of the machine is thus paid back by shorter sleeps.
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
        # A sleeping rank leaves its core to others; a truly slow one would not. UNEVEN_SLOW=spin tells the difference.
        self._sleep = sleep or (_spin if os.environ.get("UNEVEN_SLOW") == "spin" else time.sleep)

    def pause(self, step_seconds: float) -> float:
        """Sleep off this step's share and any debt; the seconds really slept."""
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
