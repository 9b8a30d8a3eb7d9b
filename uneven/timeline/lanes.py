"""The lanes of a page: what each device did, its idle gaps with their causes, and the rounds in the background."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from bokeh.core.properties import value
from bokeh.models import FixedTicker, Range1d
from bokeh.plotting import figure

from uneven.timeline.charts import (
    FONT,
    Chart,
    Epochs,
    Key,
    TimeAxis,
    every_so_many,
    explain,
    mark_epochs,
    paint,
    source,
    time_figure,
)
from uneven.timeline.idle import Gap
from uneven.timeline.record import APART, STATES, TRAINING, Event
from uneven.timeline.thin import Piece, bin_spans, some_of, thin_spans
from uneven.timeline.timeline import Lane, Timeline
from uneven.timeline.trips import Trip

PIECES = 16_000  # of all lanes together: what a browser draws without effort, and a page can carry
COLUMNS = 500  # of a lane that is seen from afar, a few pixels each; and of all lanes together:
ALL_COLUMNS = 2_400
FEW = 100  # spans of a lane that even a phone can show one by one
GAPS = 3_000
TRIPS = 2_000
MOMENTS = 500
LABELS = 10  # of epochs

# The height of a lane, from 0 to 1, and what lies where in it.
IDLE = (0.82, 0.92)
LANE = (0.30, 0.78)
ROUNDS = (0.10, 0.22)

# Events that other charts or markers show.
_SHOWN = {"epoch", "round", "shares", "share", "counts", "anchor", "memory"}


def lane_chart(timeline: Timeline, gaps: Sequence[Gap], trips: Sequence[Trip], epochs: Epochs, axis: TimeAxis) -> Chart:
    """A lane per rank, the first on top."""
    count = len(timeline.lanes)
    fig = time_figure("lanes", 100 + 74 * count, axis, "", Range1d(start=-0.02, end=count + 0.25))
    base = {lane.rank: count - 1 - place for place, lane in enumerate(timeline.lanes)}
    ticks = {base[lane.rank] + sum(LANE) / 2: lane_label(lane) for lane in timeline.lanes}
    fig.yaxis.update(ticker=FixedTicker(ticks=list(ticks)), major_label_overrides=ticks)
    fig.ygrid.update(visible=False)
    chart = Chart(fig)
    chart.notes.append("Above a lane: its idle gaps of 1 ms or more; point at one for its causes.")
    mark_epochs(fig, epochs)
    _label_epochs(fig, epochs, count)
    _draw_states(chart, timeline, base)
    _draw_gaps(chart, gaps, base)
    _draw_trips(chart, trips, base)
    _draw_moments(chart, [event for event in timeline.events if event.kind not in _SHOWN], base)
    return chart


def lane_label(lane: Lane) -> str:
    return f"{lane.rank}: {lane.device}"


def _label_epochs(fig: figure, epochs: Epochs, top: int) -> None:
    shown = every_so_many(epochs, LABELS)
    columns = {"x": list(shown.values()), "y": [top] * len(shown), "name": [f"epoch {number}" for number in shown]}
    # To the left of the line: the last epoch's is the end of the chart.
    text = fig.text(x="x", y="y", text="name", source=source(columns), x_offset=-4, text_align="right")
    text.glyph.update(text_font=value(FONT), text_font_size="11px", text_baseline="bottom")
    paint(text, "epoch-names", "faint")


def _draw_states(chart: Chart, timeline: Timeline, base: dict[int, int]) -> None:
    """Twice, if there is much to draw: pieces that are narrower than a pixel would blend with the paper behind them."""
    thinned = [(lane.rank, *thin_spans(lane.spans, max(100, PIECES // len(base)))) for lane in timeline.lanes]
    fine = [(rank, piece) for rank, pieces, _ in thinned for piece in pieces]
    grain = max(grain for *_, grain in thinned)
    is_much = any(len(lane.spans) > FEW for lane in timeline.lanes)
    _draw_level(chart.figure, "fine" if is_much else "", fine, base)
    if is_much:
        columns = min(COLUMNS, max(50, ALL_COLUMNS // len(base)))
        coarse = [(lane.rank, piece) for lane in timeline.lanes for piece in bin_spans(lane.spans, columns)]
        _draw_level(chart.figure, "coarse", coarse, base)
        # The page's script counts by this how many pieces a pixel would have to show.
        most = max(Counter(rank for rank, _ in fine).values())
        chart.figure.tags = [most / max(1e-9, max(piece.end_ns for _, piece in fine) / 1e9)]
        chart.notes.append(
            "From afar, short spans are drawn together: each state as high as its part of that time. Zoom in to see "
            "them one by one."
        )
    seen = {piece.state for _, piece in fine}
    chart.keys += [Key(state, (f"state-{state}",), state) for state in TRAINING if state in seen]
    apart = [state for state in APART if state in seen]
    if apart:
        chart.keys.append(Key(", ".join(apart), tuple(f"state-{state}" for state in apart), "apart", "hatch"))
    if grain:
        spans = sum(len(lane.spans) for lane in timeline.lanes)
        chart.notes.append(
            f"Of {spans:,} spans those shorter than about {_time(grain)} stay together however far one zooms in; "
            "timeline.json has each."
        )


def _draw_level(fig: figure, level: str, pieces: Sequence[tuple[int, Piece]], base: dict[int, int]) -> None:
    for state in STATES:
        own = [(rank, piece) for rank, piece in pieces if piece.state == state]
        if own:
            _draw_state(fig, state, level, own, base)


def _draw_state(fig: figure, state: str, level: str, own: Sequence[tuple[int, Piece]], base: dict[int, int]) -> None:
    low, height = LANE[0], LANE[1] - LANE[0]
    # Neighbouring columns overlap by a hair, or the paper would shine through between them.
    hair = 0.3 * min(piece.end_ns - piece.start_ns for _, piece in own) if level == "coarse" else 0.0
    columns = {
        "left": [piece.start_ns / 1e9 for _, piece in own],
        "right": [(piece.end_ns + hair) / 1e9 for _, piece in own],
        "bottom": np.array([base[rank] + low + height * piece.low for rank, piece in own], dtype=np.float32),
        "top": np.array([base[rank] + low + height * piece.high for rank, piece in own], dtype=np.float32),
        "ms": np.array([piece.state_ns / 1e6 for _, piece in own], dtype=np.float32),
        "of": np.array([(piece.end_ns - piece.start_ns) / 1e6 for _, piece in own], dtype=np.float32),
        "rank": np.array([rank for rank, _ in own], dtype=np.uint16),
    }
    boxes = fig.quad(left="left", right="right", bottom="bottom", top="top", source=source(columns))
    boxes.glyph.update(line_color=None)
    if state in APART:
        boxes.glyph.update(fill_alpha=0.35, hatch_pattern="right_diagonal_line", hatch_scale=7, hatch_weight=1)
    paint(boxes, f"state-{state}", "apart" if state in APART else state, level)
    explain(fig, [boxes], f"<b>{state}</b>, rank @rank<br>@ms{{0.[000]}} of @of{{0.[000]}} ms, from @left{{0.0000}} s")


def _draw_gaps(chart: Chart, gaps: Sequence[Gap], base: dict[int, int]) -> None:
    shown = sorted(gaps, key=lambda gap: -gap.length_ns)[:GAPS]
    if not shown:
        return
    columns = {
        "left": [gap.start_ns / 1e9 for gap in shown],
        "right": [gap.end_ns / 1e9 for gap in shown],
        "bottom": np.array([base[gap.rank] + IDLE[0] for gap in shown], dtype=np.float32),
        "top": np.array([base[gap.rank] + IDLE[1] for gap in shown], dtype=np.float32),
        "ms": np.array([gap.length_ns / 1e6 for gap in shown], dtype=np.float32),
        "rank": np.array([gap.rank for gap in shown], dtype=np.uint16),
        "causes": ["<br>".join(f"{cause} {_time(ns)}" for cause, ns in gap.parts) for gap in shown],
    }
    fig = chart.figure
    boxes = fig.quad(left="left", right="right", bottom="bottom", top="top", source=source(columns), fill_alpha=0.75)
    boxes.glyph.update(line_color=None)
    paint(boxes, "gaps", "gap")
    explain(fig, [boxes], "<b>idle</b> for @ms{0.[00]} ms, rank @rank<br>@causes{safe}")
    chart.keys.append(Key("idle gap", ("gaps",), "gap", "strip"))
    if len(shown) < len(gaps):
        chart.notes.append(
            f"The {len(shown):,} longest of {len(gaps):,} idle gaps are marked; the table below counts all."
        )


def _draw_trips(chart: Chart, trips: Sequence[Trip], base: dict[int, int]) -> None:
    shown = some_of(trips, TRIPS)
    if not shown:
        return
    fig, names = chart.figure, ["merges"]
    columns = {
        "x": [trip.merged_ns / 1e9 for trip in shown],
        "y": np.array([base[trip.rank] + sum(ROUNDS) / 2 for trip in shown], dtype=np.float32),
        **_about(shown),
    }
    stages = (
        ("collecting", "round-collecting", [(trip.left_ns, trip.met_ns) for trip in shown]),
        ("summing", "communication", [(trip.met_ns, trip.back_ns) for trip in shown]),
        ("ready", "round-ready", [(trip.back_ns, trip.merged_ns) for trip in shown]),
    )
    if all(trip.left_ns is not None for trip in shown):
        for name, colour, ends in stages:
            _draw_stage(fig, f"round-{name}", colour, shown, [(a or 0, b) for a, b in ends], base)
            names.append(f"round-{name}")
        chart.notes.append(
            "Below a lane: a round's average on its way, grey while it waits for other ranks, in the colour of "
            "communication while it is summed, light blue until the rank merges it (the triangle)."
        )
    marks = fig.scatter(x="x", y="y", marker="inverted_triangle", size=8, source=source(columns), line_width=0.5)
    paint(marks, "merges", "round")
    explain(fig, [marks], _ABOUT)
    chart.keys.append(Key("round", tuple(names), "round", "mark"))
    if len(shown) < len(trips):
        chart.notes.append(f"{len(shown):,} of {len(trips):,} rounds are marked, evenly chosen.")


_ABOUT = (
    "<b>round @number</b>, rank @rank<br>@bytes sent<br>@cost{0.[00]} ms of its own time, @wait{0.[00]} ms of waiting"
    "<br>merged @late steps late, divergence @divergence{0.0000}"
)


def _about(trips: Sequence[Trip]) -> dict[str, object]:
    return {
        "number": np.array([trip.number for trip in trips], dtype=np.int32),
        "rank": np.array([trip.rank for trip in trips], dtype=np.uint16),
        "bytes": ["bytes unknown" if trip.wire_bytes is None else _bytes(trip.wire_bytes) for trip in trips],
        "cost": np.array([trip.cost_ms for trip in trips], dtype=np.float32),
        "wait": np.array([trip.wait_ms for trip in trips], dtype=np.float32),
        "late": np.array([trip.steps_late for trip in trips], dtype=np.int32),
        "divergence": np.array([trip.divergence for trip in trips], dtype=np.float32),
    }


def _draw_stage(
    fig: figure, name: str, colour: str, trips: Sequence[Trip], ends: Sequence[tuple[int, int]], base: dict[int, int]
) -> None:
    columns = {
        "left": [start / 1e9 for start, _ in ends],
        "right": [end / 1e9 for _, end in ends],
        "bottom": np.array([base[trip.rank] + ROUNDS[0] for trip in trips], dtype=np.float32),
        "top": np.array([base[trip.rank] + ROUNDS[1] for trip in trips], dtype=np.float32),
        "ms": np.array([(end - start) / 1e6 for start, end in ends], dtype=np.float32),
        "number": np.array([trip.number for trip in trips], dtype=np.int32),
    }
    boxes = fig.quad(left="left", right="right", bottom="bottom", top="top", source=source(columns))
    boxes.glyph.update(line_color=None)
    said = {"round-collecting": "waits for the other ranks", "round-summing": "is summed", "round-ready": "is ready"}
    explain(fig, [paint(boxes, name, colour)], f"<b>round @number</b> {said[name]}<br>@ms{{0.[00]}} ms")


def _draw_moments(chart: Chart, events: Sequence[Event], base: dict[int, int]) -> None:
    shown = some_of(events, MOMENTS)
    if not shown:
        return
    columns = {
        "x": [event.t_ns / 1e9 for event in shown],
        "y": np.array([base[event.rank] + sum(IDLE) / 2 for event in shown], dtype=np.float32),
        "kind": [event.kind.replace("_", " ") for event in shown],
        "fields": [", ".join(f"{name} {_short(value)}" for name, value in event.fields.items()) for event in shown],
    }
    marks = chart.figure.scatter(x="x", y="y", marker="diamond", size=11, source=source(columns), line_width=0.5)
    paint(marks, "moments", "moment")
    explain(chart.figure, [marks], "<b>@kind</b> at @x{0.000} s<br>@fields")
    kinds = ", ".join(sorted({event.kind.replace("_", " ") for event in shown}))
    chart.keys.append(Key(kinds, ("moments",), "moment", "diamond"))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _time(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if ns >= 1e9 else f"{ns / 1e6:.3g} ms" if ns >= 1e4 else f"{ns / 1e3:.3g} us"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
