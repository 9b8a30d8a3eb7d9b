"""How many slots a rank of `async` claims at a time, and when it asks for the next ones. Used by SlotSchedule.

A claim is one round trip to the counter that all ranks share. Where that is cheap beside the slots claimed, the rank
waits for it. Where it is not (ranks on several machines), the rank asks for its next slots while it still trains the
ones it holds, so that in the steady state it waits for no claim. It holds no more than that takes: slots held by a
slow rank are slots that no other rank can take. Pure arithmetic: train/policies.py has the thread and the clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

CLAIM_SHARE = 0.01  # a claim that is waited for may cost this fraction of the time of the slots it claims
TRIPS_AHEAD = 2  # a rank asks when what it holds lasts less than so many round trips: one for the reply, one for jitter
MIN_TRIP_MS = 0.25  # handing a claim over to another thread costs about as much as a round trip shorter than this
HANDOVER_MS = 0.05  # of the training thread's time, for a claim that another thread makes
MEMORY = 5  # round trips in the median, so a single outlier changes nothing


class ClaimsAhead(Protocol):
    """Claims that are made while the rank trains; at most one is on its way."""

    @property
    def trip_ms(self) -> float:
        """The measured time of a claim's round trip; 0 while it is not known."""
        ...

    def ask(self, count: int) -> None:
        """Send a claim for so many slots, and return at once."""
        ...

    def is_there(self) -> bool:
        """Whether the reply to the claim on its way has arrived; True also where it failed."""
        ...

    def take(self) -> int:
        """The first number of that claim; waits until it is there, and raises what went wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Claiming:
    """What a rank knows when it decides about its next claim."""

    trip_ms: float  # of a claim
    slot_ms: float  # what this rank takes for a slot
    count: int  # this rank's slots of a window
    left: float  # this rank's part of the slots before the next event that nobody has claimed yet
    can_ask: bool = True  # whether claims can be made while it trains

    @property
    def is_ahead(self) -> bool:
        """Whether to ask ahead: a claim that is waited for would cost too much at any size that suits the window."""
        return self.can_ask and self.trip_ms > MIN_TRIP_MS and self._cheap_size > max(1, self.count // 4)

    @property
    def size(self) -> int:
        """How many slots to claim, if any: at least 1, and fewer towards an event.

        Waited for, enough to make the claim cheap, but far fewer than the window's. Asked ahead, what is trained until
        the next reply is there. Half of the rank's part of what is left leaves the other half for whoever is faster
        than expected. A part that lasts less than a round trip is claimed whole: to share it out by further claims
        takes longer than to wait for the slowest.
        """
        half = int(0.5 * self.left)
        if not self.is_ahead:
            return max(1, min(self._cheap_size, self.count // 4, half))
        whole = min(self.left, self.trip_ms / self.slot_ms)
        cheap = min(math.ceil(HANDOVER_MS / (CLAIM_SHARE * self.slot_ms)), self.count // 4)
        return max(1, min(max(cheap, math.ceil(self._ahead)), max(half, int(whole))))

    def size_to_ask(self, held: int, waiting: int) -> int:
        """How many slots to ask for now, before the next one is trained; 0 where what it has lasts longer than a reply.

        `waiting` are those of the slots `held` that its feed has not got yet. All ranks hold what they train in some
        round trips. A rank that holds its part of what is left beyond that, such as a slow one whose feed reads far
        ahead, only has to know in time whether there is more: it asks for one slot, when it has trained most of its.
        """
        has_part = held - int(self._ahead) >= self.left
        if not self.is_ahead or (held if has_part else waiting) >= self._ahead:
            return 0
        return 1 if has_part else self.size

    @property
    def most_held(self) -> int:
        """The most slots that the rank may get ahead of those that its feed has got."""
        usual = max(1, self.count // 4)
        return max(usual, 2 * math.ceil(self._ahead)) if self.is_ahead else usual

    @property
    def _ahead(self) -> float:
        """The slots that this rank trains in TRIPS_AHEAD round trips; two windows' at most, whatever was measured."""
        return min(TRIPS_AHEAD * self.trip_ms / self.slot_ms, 2.0 * self.count)

    @property
    def _cheap_size(self) -> int:
        """The slots whose time is long enough for a claim that is waited for."""
        return int(self.trip_ms / (CLAIM_SHARE * self.slot_ms)) + 1


def typical_ms(trips_ms: Sequence[float]) -> float:
    """The median of the last round trips (of an even number the lower); 0 where none was measured."""
    last = sorted(trips_ms[-MEMORY:])
    return last[(len(last) - 1) // 2] if last else 0.0
