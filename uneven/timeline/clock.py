"""The clocks of several machines aligned: every time of a timeline on the clock of the first machine.

Ranks of one machine share its clock, which only counts from some start of its own (the boot, on Linux), and two quartz
clocks drift apart by some microseconds every second. So the first rank of each machine reads the first machine's clock
through the store at the start and at the end of a run, and times between are corrected linearly. Pure arithmetic; the
round trips are in comm/clock.py, who asks whom in train/rank_info.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from uneven.comm.clock import ClockSample

# Clocks drift by up to 100 ppm, and time servers slow or hasten them by up to 500. More is a clock that stood still or
# jumped, as that of a laptop that slept, and nobody knows when.
MAX_DRIFT_PPM = 1_000.0


class ClockReading(NamedTuple):
    """The reference clock is `offset_ns` ahead of the own one at `at_ns` of the own one, give or take `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def read_offset(samples: Sequence[ClockSample]) -> ClockReading:
    """From the quickest round trip. The answer came somewhere on the way: in its middle, give or take half of it."""
    best = min(samples, key=lambda sample: sample.received_ns - sample.sent_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    return ClockReading(middle_ns, best.served_ns - middle_ns, (best.received_ns - best.sent_ns + 1) // 2)


@dataclass(frozen=True)
class Machine:
    """One machine of a run and its clock; `readings` in order, empty on the first machine, which is the reference.

    A machine that was never compared with the reference has no `error_ns`: its times are taken as they are.
    """

    number: int
    host: str
    readings: tuple[ClockReading, ...] = ()

    @property
    def offset_ns(self) -> int:
        """What was added to its times at the start of the run."""
        return self.readings[0].offset_ns if self.readings else 0

    @property
    def error_ns(self) -> int | None:
        """How far its aligned times may be off, where they were compared."""
        if not self.readings:
            return 0 if self.number == 0 else None
        first, last = self.readings[0], self.readings[-1]
        change_ns = abs(last.offset_ns - first.offset_ns)
        # In a short run the readings' own errors look like drift.
        drift_ns = MAX_DRIFT_PPM / 1e6 * (last.at_ns - first.at_ns) + first.error_ns + last.error_ns
        return max(reading.error_ns for reading in self.readings) + (change_ns if change_ns > drift_ns else 0)

    @property
    def drift_ppm(self) -> float:
        """How much faster the reference clock runs, in microseconds a second."""
        first, last = self._ends
        return 1e6 * (last.offset_ns - first.offset_ns) / (last.at_ns - first.at_ns) if last is not first else 0.0

    @property
    def _ends(self) -> tuple[ClockReading, ClockReading]:
        """The first and the last reading; one and the same where there is no line through two."""
        if not self.readings:
            return _NO_READING, _NO_READING
        first, last = self.readings[0], self.readings[-1]
        elapsed_ns = last.at_ns - first.at_ns
        # Time never goes backwards: a reference that stood still for longer than the run has no line either.
        is_line = elapsed_ns > 0 and last.offset_ns - first.offset_ns > -elapsed_ns
        return (first, last) if is_line else (first, first)

    def alignment(self, start_ns: int = 0) -> Callable[[int], int]:
        """From a time of this machine to ns since `start_ns` of the reference clock; keeps the order of times."""
        first, last = self._ends
        offset_ns, at_ns = first.offset_ns - start_ns, first.at_ns
        if last is first:
            return lambda t_ns: t_ns + offset_ns
        drift_ns, elapsed_ns = last.offset_ns - first.offset_ns, last.at_ns - at_ns
        return lambda t_ns: t_ns + offset_ns + drift_ns * (t_ns - at_ns) // elapsed_ns

    def to_json(self) -> dict[str, Any]:
        """`drift_ppm` is for readers: it follows from the readings."""
        return {
            "machine": self.number,
            "host": self.host,
            "offset_ns": self.offset_ns,
            "error_ns": self.error_ns,
            "drift_ppm": round(self.drift_ppm, 3),
            "readings": [list(reading) for reading in self.readings],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Machine":
        return cls(record["machine"], record["host"], tuple(map(ClockReading._make, record["readings"])))


def unite(machines: Iterable[Machine]) -> list[Machine]:
    """One entry per machine, in their order, from those of all ranks: the first rank of each has its readings."""
    found: dict[int, Machine] = {}
    for machine in machines:
        known = found.get(machine.number)
        if known is None or len(machine.readings) > len(known.readings):
            found[machine.number] = machine
    return [found[number] for number in sorted(found)]


_NO_READING = ClockReading(0, 0, 0)
