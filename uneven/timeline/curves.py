"""The curves of a page: shares and anchor over time, and loss and metrics over time and samples.

page.py calls them. A function that has nothing to draw returns a sentence for the page instead of a chart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bokeh.models import DataRange1d, NumeralTickFormatter, Range1d

from uneven.config import ENTRY_KEYS
from uneven.timeline.charts import (
    Chart,
    Epochs,
    TimeAxis,
    add_curve,
    add_steps,
    add_tooltip,
    mark_epochs,
    paint,
    plain_figure,
    rank_colour,
    source,
    time_figure,
)
from uneven.timeline.record import Event
from uneven.timeline.thin import evenly_spaced
from uneven.timeline.timeline import Timeline

MAX_POINTS = 1_000  # of a curve: about one per pixel of a wide screen


def shares_chart(timeline: Timeline, epochs: Epochs, axis: TimeAxis) -> Chart | str:
    """Every rank's share of the samples, as planned and as trained in each round; a sentence if it never changed.

    Since ranks were last lost or joined: earlier shares are of other ranks, in another order.
    """
    events = _events_of_first_rank(timeline)
    changed = [event for event in events if event.kind == "generation"]
    since_ns = changed[-1].t_ns - 1e6 * changed[-1].fields["ms"] if changed else -math.inf
    events = [event for event in events if event.t_ns >= since_ns]
    planned_shares = [(event.t_ns, shares) for event in events if (shares := _planned_shares(event))]
    trained_shares = [
        (event.t_ns, shares) for event in events if event.kind == "round" and (shares := _fractions(event, "samples"))
    ]
    present = [lane for lane in timeline.lanes if lane.ended is None]
    if not planned_shares:
        since = "Since the others are gone one" if len(timeline.lanes) > 1 else "One"
        return f"{since} device trains all samples: there are no shares." if len(present) == 1 else "No shares."
    if len(planned_shares) == 1 and not trained_shares:
        return f"The shares did not change: {' / '.join(f'{100 * share:.0f} %' for share in planned_shares[0][1])}."
    fig = time_figure("shares", 240, axis, "% of the samples", Range1d(start=0.0, end=105.0))
    chart = Chart(fig)
    mark_epochs(fig, epochs)
    planned_shares = evenly_spaced(planned_shares, MAX_POINTS)
    trained_shares = evenly_spaced(trained_shares, MAX_POINTS)
    for place, lane in enumerate(present):
        name = f"rank {lane.rank}: {lane.device}"
        points = [(t / 1e9, 100.0 * shares[place]) for t, shares in planned_shares]
        add_steps(chart, f"share-{lane.rank}", name, lane.rank, points, axis.end_s)
        if trained_shares:
            columns = {
                "x": [t / 1e9 for t, _ in trained_shares],
                "y": [100.0 * shares[place] for _, shares in trained_shares],
            }
            dots = fig.scatter(x="x", y="y", source=source(columns), size=7, line_width=0.5)
            paint(dots, f"done-{lane.rank}", rank_colour(lane.rank))
            add_tooltip(fig, [dots], f"{name}<br>@y{{0.0}} % of a round's samples")
            chart.keys[-1] = replace(chart.keys[-1], renderers=(f"share-{lane.rank}", f"done-{lane.rank}"))
    if changed:
        chart.notes.append("Since the last change of ranks.")
    if trained_shares:
        chart.notes.append("Lines: the planned shares. Dots: the shares of the samples trained in each round.")
    return chart


def anchor_chart(timeline: Timeline, epochs: Epochs, axis: TimeAxis) -> Chart | str:
    """The slowest rank's batches per window; a sentence if they never changed or the run has no windows."""
    changes = [event for event in _events_of_first_rank(timeline) if "anchor" in event.fields]
    if not changes:
        has_rounds = any(event.kind == "round" for event in timeline.events)
        return (
            "The anchor never changed." if has_rounds else "There is no anchor: the run has no windows between rounds."
        )
    first = changes[0].fields["anchor"]
    if all(event.fields["anchor"] == first for event in changes):
        return f"The anchor stayed at {first:g} batches of the slowest device per window."
    fig = time_figure("anchor", 200, axis, "batches per window")
    chart = Chart(fig)
    mark_epochs(fig, epochs)
    shown = evenly_spaced(changes, MAX_POINTS)
    points = [(event.t_ns / 1e9, float(event.fields["anchor"])) for event in shown]
    add_steps(chart, "anchor-line", "anchor (of the slowest device)", 0, points, axis.end_s)
    fig.y_range = Range1d(start=0.0, end=1.15 * max(anchor for _, anchor in points))
    return chart


def metric_charts(
    history: Sequence[Mapping[str, Any]], times: Mapping[tuple[int, int], float], axis: TimeAxis
) -> list[Chart]:
    """Loss and other metrics, each over time (left) and over samples (right); empty if no epoch has ended.

    `times` holds the second of each entry by its epoch and step.
    """
    names = sorted({name for entry in history for name, value in entry.items() if _is_number(value)} - {*ENTRY_KEYS})
    losses = [name for name in names if name.endswith("loss")]
    others = [name for name in names if name not in losses]
    charts = []
    for title, series in (("loss", ["train_loss", *losses]), ("quality", others)):
        if not series or not history:
            continue
        y_label = series[0] if len(series) == 1 else title
        over_time = time_figure(f"{title}-time", 260, axis, y_label)
        over_samples = plain_figure(f"{title}-samples", 260, "samples", y_label, DataRange1d(start=0.0))
        for fig in (over_time, over_samples):  # around a single value, that of a run of one epoch
            fig.y_range = DataRange1d(default_span=0.2)
        over_samples.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")
        for fig in (over_time, over_samples):
            chart = Chart(fig)
            for place, name in enumerate(series):
                points = [entry for entry in history if _is_number(entry.get(name))]
                if fig is over_time:
                    points = [entry for entry in points if entry_key(entry) in times]
                xs = [times[entry_key(entry)] if fig is over_time else float(entry["samples"]) for entry in points]
                _draw_metric(chart, place, name, xs, points)
            charts.append(chart)
    return charts


def entry_key(entry: Mapping[str, Any]) -> tuple[int, int]:
    """What an entry of the history is found by; the entries of older runs have no step."""
    return int(entry["epoch"]), int(entry.get("step", 0))


def _draw_metric(chart: Chart, place: int, name: str, xs: Sequence[float], points: Sequence[Mapping[str, Any]]) -> None:
    label = name.replace("_", " ")
    columns = {
        "x": xs,
        "y": [float(entry[name]) for entry in points],
        "epoch": [float(entry["epoch"]) for entry in points],
        "samples": [float(entry["samples"]) for entry in points],
    }
    tooltip = f"<b>{label}</b> @y{{0.0000}}<br>epoch @epoch, @samples{{0,0}} samples"
    add_curve(chart, f"{chart.figure.name}-{name}", label, place, columns, tooltip)


def _events_of_first_rank(timeline: Timeline) -> list[Event]:
    """The events of the first rank that has any. That is enough, since all ranks take the same decisions."""
    first = min((event.rank for event in timeline.events), default=0)
    return [event for event in timeline.events if event.rank == first]


def _planned_shares(event: Event) -> list[float]:
    names = {"shares": "shares", "share": "shares", "counts": "counts"}
    return _fractions(event, names[event.kind]) if event.kind in names else []


def _fractions(event: Event, name: str) -> list[float]:
    amounts = event.fields.get(name) or []
    total = sum(amounts)
    return [amount / total for amount in amounts] if total else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
