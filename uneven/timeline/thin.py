"""Downsampling for the page: many spans, samples or events become as many as a screen can show.

A lane is drawn as rectangles (`Piece`). A long span is one rectangle of full height. A run of short spans becomes one
stack with a layer per state, whose height is the fraction of that time spent in the state. Invariant: the area of
a state is its time, before and after (tests/timeline/test_thin.py).
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from uneven.timeline.record import STATES, Span
from uneven.timeline.sample import Sample

T = TypeVar("T")

# Factors on the mean length of a piece, tried in turn. A grain of time yields at most one long span and one stack of
# len(STATES) layers, so the last factor always meets the limit.
_GRAIN_FACTORS = (1.5, 3.0, 5.0, len(STATES) + 2.0)


class Piece(NamedTuple):
    """A rectangle of a lane; `low` and `high` are fractions of its height, `state_ns` the time in the state."""

    state: str
    start_ns: int
    end_ns: int
    low: float
    high: float
    state_ns: int


def thin_spans(spans: Sequence[Span], limit: int) -> tuple[list[Piece], int]:
    """At most `limit` pieces (100 or more), and the length in ns below which spans were stacked, 0 if none were."""
    nonempty = [span for span in spans if span[1] < span[2]]
    if len(nonempty) <= limit:
        return [Piece(state, first, last, 0.0, 1.0, last - first) for state, first, last in nonempty], 0
    total = nonempty[-1][2] - nonempty[0][1]
    for factor in _GRAIN_FACTORS:
        grain = int(factor * total / limit) + 1
        pieces = _stack_short_spans(nonempty, grain)
        if len(pieces) <= limit:
            break
    return pieces, grain


def _stack_short_spans(spans: Sequence[Span], grain: int) -> list[Piece]:
    pieces: list[Piece] = []
    short: dict[str, int] = {}
    start = spans[0][1]
    for state, first, last in spans:
        if last - first >= grain:
            _append_stack(pieces, short, start, first)
            pieces.append(Piece(state, first, last, 0.0, 1.0, last - first))
            short, start = {}, last
            continue
        short[state] = short.get(state, 0) + last - first
        if last - start >= grain:
            _append_stack(pieces, short, start, last)
            short, start = {}, last
    _append_stack(pieces, short, start, spans[-1][2])
    return pieces


def bin_spans(spans: Sequence[Span], bins: int) -> list[Piece]:
    """The lane in `bins` columns of equal width, each a stack of its states: the zoomed-out view.

    Neighbouring columns with one and the same state alone are joined into one piece.
    """
    start, end = spans[0][1], spans[-1][2]
    edges = [start + (end - start) * index // bins for index in range(bins + 1)]
    pieces: list[Piece] = []
    for first, last, column in zip(edges, edges[1:], _state_ns(spans, edges), strict=False):
        previous = pieces[-1] if pieces else None
        if previous and len(column) == 1 and previous.state in column and previous.high - previous.low == 1.0:
            length = last - previous.start_ns
            pieces[-1] = previous._replace(end_ns=last, state_ns=length)
        elif first < last:
            _append_stack(pieces, column, first, last)
    return pieces


def _state_ns(spans: Sequence[Span], edges_ns: Sequence[int]) -> list[dict[str, int]]:
    """The ns of each state in each interval between two edges."""
    columns: list[dict[str, int]] = [{} for _ in edges_ns[1:]]
    first_column = 0  # that the current span overlaps
    for state, start, end in spans:
        while first_column < len(columns) and edges_ns[first_column + 1] <= start:
            first_column += 1
        column = first_column
        while column < len(columns) and edges_ns[column] < end:
            overlap = min(end, edges_ns[column + 1]) - max(start, edges_ns[column])
            if overlap > 0:
                columns[column][state] = columns[column].get(state, 0) + overlap
            column += 1
    return columns


def _append_stack(pieces: list[Piece], short: dict[str, int], start: int, end: int) -> None:
    """Append a layer per state for the time from start to end, of which `short` holds the ns in each state."""
    low = 0.0
    for state in STATES:  # always in this order, so that a state forms a band across neighbouring stacks
        if state in short:
            high = 1.0 if len(short) == 1 else low + short[state] / (end - start)
            pieces.append(Piece(state, start, end, low, high, short[state]))
            low = high


def busy_shares(spans: Sequence[Span], edges_ns: Sequence[int]) -> list[float | None]:
    """The fraction of compute in each interval between two edges; None if the lane does not reach into it."""
    columns = _state_ns(spans, edges_ns)
    return [column.get("compute", 0) / sum(column.values()) if column else None for column in columns]


def smooth(values: Sequence[float | None], size: int) -> list[float | None]:
    """Each value as the mean of the `size` values around it; where one is None it stays None and counts nowhere."""
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    smoothed: list[float | None] = []
    for place, value in enumerate(values):
        reach = min((size - 1) // 2, place, len(values) - 1 - place)  # the same on both sides, so that a ramp stays
        low, high = place - reach, place + reach + 1
        smoothed.append(None if value is None else (sums[high] - sums[low]) / (counts[high] - counts[low]))
    return smoothed


def thin_samples(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """At most `limit` samples: neighbours are replaced by their mean at the time of the last of them."""
    size = -(-len(samples) // limit)
    return [_mean_sample(samples[at : at + size]) for at in range(0, len(samples), size)] if size > 1 else list(samples)


def _mean_sample(samples: Sequence[Sample]) -> Sample:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    devices = sorted({gpu[0] for sample in samples for gpu in sample.gpus})
    gpus = []
    for index in devices:
        readings = [gpu for sample in samples for gpu in sample.gpus if gpu[0] == index]
        gpus.append((index, mean([gpu[1] for gpu in readings]), int(mean([gpu[2] for gpu in readings]))))
    return Sample(
        t_ns=samples[-1].t_ns,
        cpu=mean([sample.cpu for sample in samples]),
        process_cpu=mean([sample.process_cpu for sample in samples]),
        ram_bytes=int(mean([sample.ram_bytes for sample in samples])),
        process_bytes=int(mean([sample.process_bytes for sample in samples])),
        gpus=tuple(gpus),
        machine=samples[0].machine,
    )


def evenly_spaced(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the items at even distances, including the first and the last."""
    if len(items) <= limit:
        return list(items)
    return [items[round(index * (len(items) - 1) / (limit - 1))] for index in range(limit)]
