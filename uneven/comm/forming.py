"""How ranks wait for each other while they form a group: by the store, and never longer than the group is wanted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from uneven.comm.lost import Lost
from uneven.comm.store import Store
from uneven.errors import GroupLostError

# Of a run's first group: a rank may still load data or compile, and the launcher ends the run if one dies. Of every
# collective, too: a dead peer raises at once, and the launcher finds a rank that hangs. The last resort.
TIMEOUT = timedelta(minutes=30)
# Of later ones: all of their ranks are there and wait for nothing else, which launch/membership.py sees to.
LIMIT = timedelta(seconds=20)
PAUSE_S = 0.02


@dataclass(frozen=True)
class Forming:
    """`is_stale`: whether a newer group is wanted by now; asked by the thread that waits, some 50 times a second."""

    limit: timedelta = TIMEOUT
    is_stale: Callable[[], bool] = bool  # never

    def unless(self, lost: Lost) -> "Forming":
        """The same for one more group of those that `lost` is about."""
        return Forming(self.limit, lambda: lost.error is not None or self.is_stale())

    def wait(self, store: Store, keys: Sequence[str]) -> None:
        """Until all keys are set. GroupLostError where that takes too long, or another group is wanted."""
        self.poll(lambda: bool(store.check(list(keys))))

    def poll(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + self.limit.total_seconds()
        pause = 0.001
        while not is_done():
            # A wait of the store's own in slices would write a warning about each.
            if self.is_stale():
                raise GroupLostError("the group was given up while it was formed: a newer generation was announced")
            if time.monotonic() > end:
                raise GroupLostError(
                    f"a peer did not come within {self.limit.total_seconds():g} s: the group was not formed"
                )
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_S)
