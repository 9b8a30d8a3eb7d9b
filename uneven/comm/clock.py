"""The clocks of two machines, read in one round trip through the store. timeline/clock.py computes with the samples.

A rank that asks sets a key, a rank that serves waits for it and answers with the time on its clock. The answer was
given between the asking and its arrival, whatever the network does: that bounds the error.
"""

from collections.abc import Callable
from typing import NamedTuple

from uneven.comm.store import Store

ROUND_TRIPS = 8  # the quickest of them counts: a busy machine delays most of them

Clock = Callable[[], int]  # ns, from any start


class ClockSample(NamedTuple):
    """One round trip: `sent_ns` and `received_ns` on the clock of who asks, `served_ns` on that of who answers."""

    sent_ns: int
    served_ns: int
    received_ns: int


def ask_clock(store: Store, name: str, clock: Clock) -> list[ClockSample]:
    """Called by one rank while another calls `serve_clock` with the same name; a name is used once."""
    answers = [f"{name}/{number}/answer" for number in range(ROUND_TRIPS)]
    times = []
    for number, answer in enumerate(answers):
        sent_ns = clock()
        store.set(f"{name}/{number}/ask", "")
        store.wait([answer])
        times.append((sent_ns, clock()))
    # Read together and afterwards: each reading would be a round trip more.
    served = [int(text) for text in store.multi_get(answers)]
    return [ClockSample(sent, there, received) for (sent, received), there in zip(times, served, strict=True)]


def serve_clock(store: Store, name: str, clock: Clock) -> None:
    for number in range(ROUND_TRIPS):
        store.wait([f"{name}/{number}/ask"])
        store.set(f"{name}/{number}/answer", str(clock()))
