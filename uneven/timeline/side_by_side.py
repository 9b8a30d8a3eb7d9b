"""The lanes of several runs below each other on one time axis, each from its first step: who waits, and who ends first.

bench/demo_page.py calls it. Imports bokeh, an optional dependency.
"""

from collections.abc import Mapping
from dataclasses import replace

from uneven.timeline.charts import Chart, Key, TimeAxis
from uneven.timeline.idle import idle_gaps
from uneven.timeline.lanes import lane_chart, lane_label
from uneven.timeline.record import Event, account_of
from uneven.timeline.timeline import Lane, Timeline, rank_rounds

SHORTEST_STEP_NS = 1_000_000


def compare_lanes(runs: Mapping[str, Timeline]) -> dict[str, Chart]:
    """A chart for each run, all with the same scale; the keys stand above the first and work on all of them."""
    cut = {name: training_part(timeline) for name, timeline in runs.items()}
    end_s = max(lane.spans[-1][2] for timeline in cut.values() for lane in timeline.lanes) / 1e9
    axis = TimeAxis.until(end_s, [lane_label(lane) for timeline in cut.values() for lane in timeline.lanes])
    charts: dict[str, Chart] = {}
    for number, (name, timeline) in enumerate(cut.items()):
        chart = lane_chart(
            *(timeline, idle_gaps(timeline), rank_rounds(timeline.events), {}, axis), name=f"lanes-{number}"
        )
        is_last = number == len(cut) - 1
        chart.figure.xaxis.axis_label = "seconds since the first step" if is_last else None
        chart.figure.toolbar_location = None if number else "above"
        charts[name] = chart
    first, *others = charts.values()
    keys: dict[str, Key] = {}
    for chart in charts.values():
        for key in chart.keys:
            known = keys.get(key.label, key)
            keys[key.label] = replace(known, renderers=tuple(dict.fromkeys((*known.renderers, *key.renderers))))
    first.keys = list(keys.values())
    last_notes = list(dict.fromkeys(note for chart in charts.values() for note in chart.notes))
    for chart in charts.values():
        chart.notes = []
    for chart in others:
        chart.keys = []
    (others[-1] if others else first).notes = last_notes
    return charts


def training_part(timeline: Timeline) -> Timeline:
    """From the first step of any rank, which becomes time 0, to the end of the last one; events are rounds alone."""
    # The end of a run has a moment of compute, too, after the evaluation.
    spans = [span for lane in timeline.lanes for span in lane.spans if span[0] == "compute"]
    least_ns = min(SHORTEST_STEP_NS, max((last - first for _, first, last in spans), default=0))
    steps = [(first, last) for _, first, last in spans if last - first >= least_ns]
    if not steps:
        return timeline
    start_ns, end_ns = min(first for first, _ in steps), max(last for _, last in steps)
    lanes = [_cut(lane, start_ns, end_ns) for lane in timeline.lanes]
    lanes = [lane for lane in lanes if lane.spans]
    events = [
        Event(event.t_ns - start_ns, event.rank, event.kind, event.fields)
        for event in timeline.events
        if event.kind == "round" and start_ns <= event.t_ns <= end_ns
    ]
    return Timeline(lanes, [account_of(lane.rank, lane.spans) for lane in lanes], events, [], timeline.machines)


def _cut(lane: Lane, start_ns: int, end_ns: int) -> Lane:
    spans = [
        (state, max(first, start_ns) - start_ns, min(last, end_ns) - start_ns)
        for state, first, last in lane.spans
        if first < end_ns and last > start_ns
    ]
    return replace(lane, spans=spans)
