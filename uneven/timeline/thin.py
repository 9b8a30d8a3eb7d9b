"""Many spans as few rectangles: what is too short to be seen is drawn together, and no time is lost or moved.

A piece covers some time at some part of the lane's height. Long spans are pieces of their own, of full height; a run
of short ones becomes one stack with a layer per state, as high as the state's part of that time. So the area of a
state is its time, before and after.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from uneven.timeline.device import Span
from uneven.timeline.record import STATES
from uneven.timeline.sample import Sample

T = TypeVar("T")

# A grain of time makes at most one stack of the states that fit into it: the last of these surely fits the limit.
_COARSER = (1.5, 3.0, 5.0, len(STATES) + 2.0)


class Piece(NamedTuple):
    """A rectangle of a lane; `low` and `high` are parts of its height, and their difference the state's part of it."""

    state: str
    start_ns: int
    end_ns: int
    low: float
    high: float
    state_ns: int


def thin_spans(spans: Sequence[Span], most: int) -> tuple[list[Piece], int]:
    """At most so many pieces (100 or more), and the length in ns below which spans were stacked; 0: none were."""
    seen = [span for span in spans if span[1] < span[2]]
    if len(seen) <= most:
        return [Piece(state, first, last, 0.0, 1.0, last - first) for state, first, last in seen], 0
    total = seen[-1][2] - seen[0][1]
    for coarser in _COARSER:
        grain = int(coarser * total / most) + 1
        pieces = _stacked(seen, grain)
        if len(pieces) <= most:
            break
    return pieces, grain


def _stacked(spans: Sequence[Span], grain: int) -> list[Piece]:
    pieces: list[Piece] = []
    short: dict[str, int] = {}
    start = spans[0][1]
    for state, first, last in spans:
        if last - first >= grain:
            _stack(pieces, short, start, first)
            pieces.append(Piece(state, first, last, 0.0, 1.0, last - first))
            short, start = {}, last
            continue
        short[state] = short.get(state, 0) + last - first
        if last - start >= grain:
            _stack(pieces, short, start, last)
            short, start = {}, last
    _stack(pieces, short, start, spans[-1][2])
    return pieces


def bin_spans(spans: Sequence[Span], bins: int) -> list[Piece]:
    """The lane in so many columns of equal width, each a stack of its states: as it is seen from afar.

    Columns that hold one and the same state alone are one piece.
    """
    start, end = spans[0][1], spans[-1][2]
    edges = [start + (end - start) * place // bins for place in range(bins + 1)]
    pieces: list[Piece] = []
    for first, last, column in zip(edges, edges[1:], _columns(spans, edges), strict=False):
        before = pieces[-1] if pieces else None
        if before and len(column) == 1 and before.state in column and before.high - before.low == 1.0:
            length = last - before.start_ns
            pieces[-1] = before._replace(end_ns=last, state_ns=length)
        elif first < last:
            _stack(pieces, column, first, last)
    return pieces


def _columns(spans: Sequence[Span], edges_ns: Sequence[int]) -> list[dict[str, int]]:
    """The ns of each state in each of the intervals between the edges."""
    columns: list[dict[str, int]] = [{} for _ in edges_ns[1:]]
    place = 0
    for state, first, last in spans:
        while place < len(columns) and edges_ns[place + 1] <= first:
            place += 1
        at = place
        while at < len(columns) and edges_ns[at] < last:
            inside = min(last, edges_ns[at + 1]) - max(first, edges_ns[at])
            if inside > 0:
                columns[at][state] = columns[at].get(state, 0) + inside
            at += 1
    return columns


def _stack(pieces: list[Piece], short: dict[str, int], start: int, end: int) -> None:
    low = 0.0
    for state in STATES:  # always in this order, so that neighbouring stacks form bands
        if state in short:
            high = 1.0 if len(short) == 1 else low + short[state] / (end - start)
            pieces.append(Piece(state, start, end, low, high, short[state]))
            low = high


def busy_shares(spans: Sequence[Span], edges_ns: Sequence[int]) -> list[float | None]:
    """The part of compute in each of the intervals between the edges; None where the lane has no time in one."""
    columns = _columns(spans, edges_ns)
    return [column.get("compute", 0) / sum(column.values()) if column else None for column in columns]


def thin_samples(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many samples: neighbours become one, with their mean, at the moment of the last of them."""
    size = -(-len(samples) // most)
    return [_mean(samples[at : at + size]) for at in range(0, len(samples), size)] if size > 1 else list(samples)


def _mean(some: Sequence[Sample]) -> Sample:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    devices = sorted({gpu[0] for sample in some for gpu in sample.gpus})
    gpus = []
    for index in devices:
        seen = [gpu for sample in some for gpu in sample.gpus if gpu[0] == index]
        gpus.append((index, mean([gpu[1] for gpu in seen]), int(mean([gpu[2] for gpu in seen]))))
    return Sample(
        t_ns=some[-1].t_ns,
        cpu=mean([sample.cpu for sample in some]),
        process_cpu=mean([sample.process_cpu for sample in some]),
        ram_bytes=int(mean([sample.ram_bytes for sample in some])),
        process_bytes=int(mean([sample.process_bytes for sample in some])),
        gpus=tuple(gpus),
    )


def some_of(things: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly chosen, the first and the last included."""
    if len(things) <= most:
        return list(things)
    return [things[round(place * (len(things) - 1) / (most - 1))] for place in range(most)]
