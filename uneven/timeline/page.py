"""A run as one HTML page: the verdict, lanes, idle gaps, utilisation, shares, anchor, loss and metrics.

The benchmark calls `write_page` after a run. The file is self-contained (document.py) and its data is thinned to what a
screen can show. bokeh is an optional dependency, imported only when a page is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.errors import InputError, MachineError
from uneven.files import read_json
from uneven.timeline.cold_start import cold_starts
from uneven.timeline.document import (
    facts_html,
    fit_table,
    render_document,
    section_html,
    verdict_html,
    write_document,
)
from uneven.timeline.idle import MIN_GAP_NS, OFF_THE_CLOCK, idle_gaps, sum_by_cause
from uneven.timeline.timeline import Timeline, rank_rounds
from uneven.timeline.verdict import run_verdict

if TYPE_CHECKING:
    from uneven.timeline.charts import Chart

ENTRIES = ("epoch", "evaluated")  # events that carry an entry of the history: epoch ends, and evaluations inside one
MAX_CAUSES = 8  # columns of the table; with many ranks the smallest causes are summed in a last column


def write_page(
    path: Path,
    timeline: Timeline,
    history: Sequence[Mapping[str, Any]] = (),
    title: str = "A run",
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the page. `history` has an entry per epoch (a line of metrics.jsonl), `facts` is shown at the top.

    Raises MachineError if bokeh is missing or the file cannot be written.
    """
    if find_spec("bokeh") is None:
        raise MachineError("a page needs bokeh, which is not installed: pip install 'uneven[pages]'")
    if not any(lane.spans for lane in timeline.lanes):
        raise InputError(f"cannot make a page of {title!r}: its timeline has no spans")
    shown = {**(facts or {}), **plan_facts(path.parent / "plan.json")}
    write_document(path, _html(timeline, history, title, shown))


def _html(
    timeline: Timeline,
    history: Sequence[Mapping[str, Any]],
    title: str,
    facts: Mapping[str, str],
) -> str:
    from uneven.timeline.busy import busy_chart
    from uneven.timeline.charts import Chart, TimeAxis, embed_charts
    from uneven.timeline.curves import anchor_chart, entry_key, metric_charts, shares_chart
    from uneven.timeline.lanes import lane_chart, lane_label
    from uneven.timeline.page_machines import link_chart, machine_table

    axis = TimeAxis.until(
        max(lane.spans[-1][2] for lane in timeline.lanes) / 1e9, [lane_label(lane) for lane in timeline.lanes]
    )
    ends = _epoch_ends(timeline)
    gaps = idle_gaps(timeline, at_least_ns=0)
    long_gaps = [gap for gap in gaps if gap.length_ns >= MIN_GAP_NS]
    lanes = lane_chart(timeline, long_gaps, rank_rounds(timeline.events), ends, axis)
    busy = busy_chart(timeline, ends, axis)
    links = link_chart(timeline, ends, axis)
    shares_and_anchor = [shares_chart(timeline, ends, axis), anchor_chart(timeline, ends, axis)]
    entries = [event for event in timeline.events if event.kind in ENTRIES and "epoch" in event.fields]
    metrics = metric_charts(history, {entry_key(event.fields): event.t_ns / 1e9 for event in entries}, axis)
    charts = [
        lanes,
        *([links] if links else []),
        busy,
        *(chart for chart in shares_and_anchor if isinstance(chart, Chart)),
        *metrics,
    ]
    script, html = embed_charts(charts)
    is_several = not timeline.is_one_machine
    sections = [
        section_html(
            "Device states", html["lanes"] + _idle_table(timeline, sum_by_cause(gaps)) + _cold_table(timeline)
        ),
        *([section_html("Machines and links", machine_table(timeline) + html.get("links", ""))] if is_several else []),
        section_html("How busy", html["busy"]),
        section_html("Shares and anchor", "".join(_chart_or_sentence(chart, html) for chart in shares_and_anchor)),
        section_html("Loss and metrics", _metrics_html(metrics, html)),
    ]
    head = verdict_html(run_verdict(timeline)) + facts_html(facts)
    return render_document(title, head, "\n".join(sections), script)


def plan_facts(path: Path) -> dict[str, str]:
    """What a plan in the run's folder had predicted, and what the run achieved; empty without a readable plan."""
    plan = read_json(path)
    if not isinstance(plan, dict):
        return {}
    forms = {"seconds_per_epoch": "{:.3g} s per epoch", "efficiency": "efficiency {:.2f}"}
    found = {}
    for name in ("predicted", "achieved"):
        figures = plan.get(name)
        known = figures if isinstance(figures, dict) else {}
        numbers = {key: known[key] for key in forms if isinstance(known.get(key), int | float)}
        if numbers:
            found[name] = ", ".join(forms[key].format(number) for key, number in numbers.items())
    return found


def _epoch_ends(timeline: Timeline) -> dict[int, float]:
    """The time in seconds at which each epoch had ended on all ranks."""
    ends: dict[int, float] = {}
    for event in timeline.events:
        if event.kind == "epoch" and "epoch" in event.fields:
            ends[int(event.fields["epoch"])] = event.t_ns / 1e9
    return ends


def _chart_or_sentence(chart: Chart | str, html: Mapping[str, str]) -> str:
    return f'<p class="note">{escape(chart)}</p>' if isinstance(chart, str) else html[str(chart.figure.name)]


def _metrics_html(charts: Sequence[Chart], html: Mapping[str, str]) -> str:
    if not charts:
        return '<p class="note">No epoch has ended, so there are no metrics.</p>'
    return '<div class="pairs">' + "".join(html[str(chart.figure.name)] for chart in charts) + "</div>"


def _idle_table(timeline: Timeline, causes: Mapping[int, Mapping[str, float]]) -> str:
    """Seconds by cause for every device; a row adds up to the whole time of the lane."""
    totals: dict[str, float] = {}
    for seconds in causes.values():
        for cause, value in seconds.items():
            totals[cause] = totals.get(cause, 0.0) + value
    names = sorted(totals, key=lambda cause: -totals[cause])
    shown, rest = names[:MAX_CAUSES], names[MAX_CAUSES:]
    heads = ["device", "computes", *shown, *(["rest"] if rest else [])]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    rows = []
    for lane in timeline.lanes:
        own = causes.get(lane.rank, {})
        wall = max(1e-9, (lane.spans[-1][2] - lane.spans[0][1]) / 1e9)
        values = [wall - sum(own.values()), *(own.get(name, 0.0) for name in shown)]
        values += [sum(own.get(name, 0.0) for name in rest)] if rest else []
        cells = "".join(_time_cell(value, wall) for value in values)
        rows.append(f"<tr><th>{lane.rank}: {escape(timeline.name(lane))}</th>{cells}</tr>")
    return (
        f'<h3>Where the time went</h3><div class="fit"><table id="idle"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="note">Not training time: {", ".join(OFF_THE_CLOCK)}. Each row adds up to the whole lane.</p>'
    )


def _time_cell(seconds: float, wall_s: float) -> str:
    part = 100 * seconds / wall_s
    zero = " data-zero" if seconds < 0.005 else ""  # not shown in a card
    return f'<td{zero} style="--part: {part:.1f}%">{seconds:.2f} s<small>{part:.1f} %</small></td>'


def _cold_table(timeline: Timeline) -> str:
    """What each device prepared before the first step, in seconds, and for which rank it waited; "" if nothing."""
    found = cold_starts(timeline)
    names = list(dict.fromkeys(name for start in found for name in start.phases))
    if not names and not any(start.steps or start.waited_for is not None for start in found):
        return ""
    rows = []
    for start in found:
        waited = "" if start.waited_for is None else f"{start.waited_s:.2f} s<small>for rank {start.waited_for}</small>"
        steps_s = sum(seconds for _, seconds in start.steps)
        steps = f"{steps_s:.2f} s<small>{len(start.steps)} steps</small>" if start.steps else ""
        cells = [f"{start.phases[name]:.2f} s" if name in start.phases else "" for name in names]
        rows.append([f"{start.rank}: {escape(start.device)}", *cells, waited, steps])
    heads = ["device", *names, "waited", "first steps of a size"]
    return "<h3>Cold start</h3>" + fit_table(heads, rows, "cold-start")
