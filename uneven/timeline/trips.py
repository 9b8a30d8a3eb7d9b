"""The rounds of each rank: when its snapshot was taken, all ranks had joined, the average was back and was merged."""

from collections.abc import Iterable
from dataclasses import dataclass

from uneven.timeline.record import Event


@dataclass(frozen=True, slots=True)
class Trip:
    """One rank's round, in ns of the timeline: left_ns <= met_ns <= back_ns <= merged_ns.

    Until `met_ns` the snapshot waited for the ranks that had not come yet, until `back_ns` the params were summed, and
    then the average waited for the rank's next boundary. Rounds recorded without their way have `left_ns` None.
    """

    rank: int
    number: int
    merged_ns: int
    left_ns: int | None
    met_ns: int
    back_ns: int
    wire_bytes: int | None
    cost_ms: float  # of the rank's own time: snapshot, merge and what it saw of the wire
    wait_ms: float
    steps_late: int
    divergence: float


def trips_of(events: Iterable[Event]) -> list[Trip]:
    """The rounds among the events, in their order."""
    return [_trip(event) for event in events if event.kind == "round"]


def _trip(event: Event) -> Trip:
    fields = event.fields

    def moment(name: str) -> int:
        return event.t_ns - int(fields.get(name, 0.0) * 1e6)

    return Trip(
        rank=event.rank,
        number=int(fields["round"]),
        merged_ns=event.t_ns,
        left_ns=moment("left_ms_ago") if "left_ms_ago" in fields else None,
        met_ns=moment("met_ms_ago"),
        back_ns=moment("back_ms_ago"),
        wire_bytes=fields.get("bytes"),
        cost_ms=fields.get("transfer_ms", 0.0),
        wait_ms=fields.get("wait_ms", 0.0),
        steps_late=int(fields.get("steps_late", 0)),
        divergence=fields.get("divergence", 0.0),
    )
