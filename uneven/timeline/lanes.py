"""The lanes of a page: the states of each device, its idle gaps with their causes, and its rounds in the background."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import FixedTicker, Range1d
from bokeh.plotting import figure

from uneven.format import format_bytes, format_ns
from uneven.timeline.charts import (
    FONT,
    Chart,
    Epochs,
    Key,
    Level,
    TimeAxis,
    add_boxes,
    add_tooltip,
    mark_epochs,
    paint,
    source,
    thin_epochs,
    time_figure,
)
from uneven.timeline.clock import Machine
from uneven.timeline.idle import Gap
from uneven.timeline.links import short
from uneven.timeline.page_machines import HEADING, draw_headings
from uneven.timeline.record import NOT_TRAINING, STATES, TRAINING, Event
from uneven.timeline.thin import Piece, bin_spans, evenly_spaced, thin_spans
from uneven.timeline.timeline import Lane, RankRound, Timeline

# Limits on what is drawn, so that a browser stays fluid and the page small.
MAX_PIECES = 16_000  # of all lanes together, zoomed in
MAX_COLUMNS = 500  # of one lane, zoomed out: a few pixels each
ALL_COLUMNS = 2_400  # of all lanes together, zoomed out
FEW_SPANS = 100  # a lane with so few is drawn span by span at every zoom
MAX_GAPS = 3_000
MAX_ROUNDS = 2_000
MAX_EVENTS = 500

# The vertical layout of a lane, whose height is 1.
IDLE = (0.82, 0.92)
LANE = (0.30, 0.78)
ROUNDS = (0.10, 0.22)
Bases = dict[int, float]  # rank -> the bottom of its lane

# Events that are drawn elsewhere and get no marker of their own.
_DRAWN_ELSEWHERE = {"epoch", "evaluated", "round", "shares", "share", "counts", "anchor", "memory", "traffic"}


def lane_chart(
    timeline: Timeline,
    gaps: Sequence[Gap],
    rounds: Sequence[RankRound],
    epochs: Epochs,
    axis: TimeAxis,
    name: str = "lanes",
) -> Chart:
    """A lane per rank, rank 0 on top; those of one machine together, below its name."""
    base, headings, top = _place_lanes(timeline)
    fig = time_figure(name, round(100 + 74 * top), axis, "", Range1d(start=-0.02, end=top + 0.25))
    ticks = {base[lane.rank] + sum(LANE) / 2: lane_label(lane) for lane in timeline.lanes}
    fig.yaxis.update(ticker=FixedTicker(ticks=list(ticks)), major_label_overrides=ticks)
    fig.ygrid.update(visible=False)
    chart = Chart(fig)
    chart.notes.append("Above a lane: its idle gaps of 1 ms or more. Hover over a gap to see its causes.")
    mark_epochs(fig, epochs)
    _label_epochs(fig, epochs, top)
    draw_headings(chart, timeline, headings, axis)
    _draw_states(chart, timeline, base)
    _draw_gaps(chart, gaps, base)
    _draw_rounds(chart, rounds, base)
    ends = [Event(one.end_ns, one.rank, one.ended.how, {"why": one.ended.why}) for one in timeline.lanes if one.ended]
    _draw_events(chart, [*(one for one in timeline.events if one.kind not in _DRAWN_ELSEWHERE), *ends], base)
    return chart


def _place_lanes(timeline: Timeline) -> tuple[Bases, list[tuple[Machine, float]], float]:
    """The bottom of every lane, that of every machine's heading where there are several, and the top of all."""
    base: Bases = {}
    headings: list[tuple[Machine, float]] = []
    at = 0.0
    groups = [(machine, timeline.lanes_of(machine)) for machine in timeline.machines]
    for machine, lanes in reversed(groups):  # from the bottom to the top
        for lane in reversed(lanes):
            base[lane.rank] = at
            at += 1.0
        if len(groups) > 1:
            headings.append((machine, at))
            at += HEADING
    return base, headings, at


def lane_label(lane: Lane) -> str:
    return f"{lane.rank}: {lane.device}" + ("" if lane.ended is None else f" ({lane.ended.how})")


def _label_epochs(fig: figure, epochs: Epochs, top: float) -> None:
    """A label for every line that is drawn; page.js shows those that do not overlap at the present width and zoom."""
    shown = thin_epochs(epochs)
    columns = {
        "x": list(shown.values()),
        "y": [top] * len(shown),
        "name": [""] * len(shown),
        "epoch": [f"epoch {number}" for number in shown],
    }
    # To the left of the line, since the line of the last epoch is at the end of the chart.
    text = fig.text(x="x", y="y", text="name", source=source(columns), x_offset=-4, text_align="right")
    text.glyph.update(text_font=value(FONT), text_font_size="11px", text_baseline="bottom")
    paint(text, "epoch-names", "faint")


def _draw_states(chart: Chart, timeline: Timeline, base: Bases) -> None:
    """Long lanes are drawn at two levels of detail, since pieces narrower than a pixel blend with the background."""
    thinned = [(lane.rank, *thin_spans(lane.spans, max(100, MAX_PIECES // len(base)))) for lane in timeline.lanes]
    fine = [(rank, piece) for rank, pieces, _ in thinned for piece in pieces]
    grain = max(grain for *_, grain in thinned)
    is_long = any(len(lane.spans) > FEW_SPANS for lane in timeline.lanes)
    _draw_level(chart.figure, "fine" if is_long else "", fine, base)
    if is_long:
        columns = min(MAX_COLUMNS, max(50, ALL_COLUMNS // len(base)))
        coarse = [(lane.rank, piece) for lane in timeline.lanes for piece in bin_spans(lane.spans, columns)]
        _draw_level(chart.figure, "coarse", coarse, base)
        # Pieces per second: page.js chooses the level by the number of pieces per pixel.
        most = max(Counter(rank for rank, _ in fine).values())
        chart.figure.tags = [most / max(1e-9, max(piece.end_ns for _, piece in fine) / 1e9)]
        chart.notes.append(
            "Zoomed out, short spans are stacked: the height of a state is its fraction of the time. Zoom in to see "
            "the spans one by one."
        )
    states = {piece.state for _, piece in fine}
    chart.keys += [Key(state, (f"state-{state}",), state) for state in TRAINING if state in states]
    not_training = [state for state in NOT_TRAINING if state in states]
    if not_training:
        chart.keys.append(
            Key(", ".join(not_training), tuple(f"state-{state}" for state in not_training), "apart", "hatch")
        )
    if grain:
        spans = sum(len(lane.spans) for lane in timeline.lanes)
        chart.notes.append(
            f"Of {spans:,} spans, those shorter than about {format_ns(grain)} stay stacked at every zoom; "
            "timeline.json has them all."
        )


def _draw_level(fig: figure, level: Level, pieces: Sequence[tuple[int, Piece]], base: Bases) -> None:
    for state in STATES:
        own = [(rank, piece) for rank, piece in pieces if piece.state == state]
        if own:
            _draw_state(fig, state, level, own, base)


def _draw_state(fig: figure, state: str, level: Level, own: Sequence[tuple[int, Piece]], base: Bases) -> None:
    low, height = LANE[0], LANE[1] - LANE[0]
    # Neighbouring columns overlap slightly, or the background would show between them.
    overlap = 0.3 * min(piece.end_ns - piece.start_ns for _, piece in own) if level == "coarse" else 0.0
    columns = {
        "left": [piece.start_ns / 1e9 for _, piece in own],
        "right": [(piece.end_ns + overlap) / 1e9 for _, piece in own],
        "bottom": np.array([base[rank] + low + height * piece.low for rank, piece in own], dtype=np.float32),
        "top": np.array([base[rank] + low + height * piece.high for rank, piece in own], dtype=np.float32),
        "ms": np.array([piece.state_ns / 1e6 for _, piece in own], dtype=np.float32),
        "of": np.array([(piece.end_ns - piece.start_ns) / 1e6 for _, piece in own], dtype=np.float32),
        "rank": np.array([rank for rank, _ in own], dtype=np.uint16),
    }
    is_apart = state in NOT_TRAINING
    tooltip = f"<b>{state}</b>, rank @rank<br>@ms{{0.[000]}} of @of{{0.[000]}} ms, from @left{{0.0000}} s"
    boxes = add_boxes(fig, columns, f"state-{state}", "apart" if is_apart else state, tooltip, level)
    if is_apart:
        boxes.glyph.update(fill_alpha=0.35, hatch_pattern="right_diagonal_line", hatch_scale=7, hatch_weight=1)


def _draw_gaps(chart: Chart, gaps: Sequence[Gap], base: Bases) -> None:
    shown = sorted(gaps, key=lambda gap: -gap.length_ns)[:MAX_GAPS]
    if not shown:
        return
    columns = _strips([(gap.rank, gap.start_ns, gap.end_ns) for gap in shown], base, IDLE)
    columns["causes"] = ["<br>".join(f"{cause} {format_ns(ns)}" for cause, ns in gap.parts) for gap in shown]
    tooltip = "<b>idle</b> for @ms{0.[00]} ms, rank @rank<br>@causes{safe}"
    add_boxes(chart.figure, columns, "gaps", "gap", tooltip, fill_alpha=0.75)
    chart.keys.append(Key("idle gap", ("gaps",), "gap", "strip"))
    if len(shown) < len(gaps):
        chart.notes.append(
            f"The {len(shown):,} longest of {len(gaps):,} idle gaps are drawn; the table below counts all of them."
        )


def _strips(spans: Sequence[tuple[int, int, int]], base: Bases, band: tuple[float, float]) -> dict[str, Any]:
    """The columns of boxes, from (rank, start, end), in a band of their lanes."""
    return {
        "left": [start / 1e9 for _, start, _ in spans],
        "right": [end / 1e9 for _, _, end in spans],
        "bottom": np.array([base[rank] + band[0] for rank, _, _ in spans], dtype=np.float32),
        "top": np.array([base[rank] + band[1] for rank, _, _ in spans], dtype=np.float32),
        "ms": np.array([(end - start) / 1e6 for _, start, end in spans], dtype=np.float32),
        "rank": np.array([rank for rank, _, _ in spans], dtype=np.uint16),
    }


def _draw_rounds(chart: Chart, rounds: Sequence[RankRound], base: Bases) -> None:
    shown = evenly_spaced(rounds, MAX_ROUNDS)
    if not shown:
        return
    numbers = np.array([one.number for one in shown], dtype=np.int32)
    stages = (
        ("collecting", "waits for the other ranks", [(one.rank, one.snapshot_ns, one.joined_ns) for one in shown]),
        ("summing", "is summed", [(one.rank, one.joined_ns, one.averaged_ns) for one in shown]),
        ("ready", "is ready", [(one.rank, one.averaged_ns, one.merged_ns) for one in shown]),
    )
    for name, words, spans in stages:
        columns = {**_strips(spans, base, ROUNDS), "number": numbers}
        tooltip = f"<b>round @number</b> {words}<br>@ms{{0.[00]}} ms"
        colour = "communication" if name == "summing" else f"round-{name}"
        add_boxes(chart.figure, columns, f"round-{name}", colour, tooltip)
    columns = {
        "x": [one.merged_ns / 1e9 for one in shown],
        "y": np.array([base[one.rank] + sum(ROUNDS) / 2 for one in shown], dtype=np.float32),
        "number": numbers,
        "rank": np.array([one.rank for one in shown], dtype=np.uint16),
        "bytes": [format_bytes(one.wire_bytes) for one in shown],
        "speed": ["" if one.mb_per_s is None else f", {short(one.mb_per_s)} MB/s" for one in shown],
        "cost": np.array([one.cost_ms for one in shown], dtype=np.float32),
        "wait": np.array([one.wait_ms for one in shown], dtype=np.float32),
        "late": np.array([one.steps_late for one in shown], dtype=np.int32),
        "divergence": np.array([one.divergence for one in shown], dtype=np.float32),
    }
    marks = chart.figure.scatter(
        x="x", y="y", marker="inverted_triangle", size=8, source=source(columns), line_width=0.5
    )
    tooltip = (
        "<b>round @number</b>, rank @rank<br>@bytes sent@speed<br>@cost{0.[00]} ms of its own time, @wait{0.[00]} ms "
        "of waiting<br>merged @late steps late, divergence @divergence{0.0000}"
    )
    add_tooltip(chart.figure, [paint(marks, "merges", "round")], tooltip)
    names = ("merges", *(f"round-{name}" for name, *_ in stages))
    chart.keys.append(Key("round", names, "round", "mark"))
    chart.notes.append(
        "Below a lane: the rounds. Grey: the snapshot waits for other ranks. The colour of communication: params are "
        "summed. Light blue: the average waits until the rank merges it (triangle)."
    )
    if len(shown) < len(rounds):
        chart.notes.append(f"{len(shown):,} of {len(rounds):,} rounds are drawn, at even distances.")


def _draw_events(chart: Chart, events: Sequence[Event], base: Bases) -> None:
    shown = evenly_spaced(events, MAX_EVENTS)
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
    add_tooltip(chart.figure, [marks], "<b>@kind</b> at @x{0.000} s<br>@fields")
    kinds = ", ".join(sorted({event.kind.replace("_", " ") for event in shown}))
    chart.keys.append(Key(kinds, ("moments",), "moment", "diamond"))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
