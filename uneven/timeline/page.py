"""A run as one HTML page: lanes, idle gaps, utilisation, shares, anchor, loss and metrics.

The benchmark calls `write_page` after a run. The file is self-contained: it holds bokeh's script, the style sheet and
the data, thinned to what a screen can show, and its content security policy forbids the browser to load anything.
bokeh is an optional dependency, imported only when a page is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.errors import InputError, MachineError
from uneven.files import folder_error, write_atomically
from uneven.timeline.cold_start import cold_starts
from uneven.timeline.idle import MIN_GAP_NS, OFF_THE_CLOCK, idle_gaps, sum_by_cause
from uneven.timeline.timeline import Timeline, rank_rounds

if TYPE_CHECKING:
    from uneven.timeline.charts import Chart

ENTRIES = ("epoch", "evaluated")  # events that carry an entry of the history: epoch ends, and evaluations inside one
MAX_CAUSES = 12  # columns of the table; with many ranks the smallest causes are summed in a last column

_HINT = (
    "Drag over a chart, or use Ctrl and the wheel, to zoom. The double arrow pans, the round arrow resets. Charts over "
    "time move together. Click a name above a chart to show or hide it; hover over anything for details."
)
_TOUCH_HINT = (
    "Tap a tool of a chart (zoom, pan) to use it, and again to scroll. Tap a name above a chart to show or hide it."
)


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
    content = _html(timeline, history, title, facts or {})
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise folder_error(path.parent, error) from error


def _html(timeline: Timeline, history: Sequence[Mapping[str, Any]], title: str, facts: Mapping[str, str]) -> str:
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.resources import Resources

    from uneven.timeline.charts import Chart, TimeAxis
    from uneven.timeline.curves import anchor_chart, busy_chart, entry_key, metric_charts, shares_chart
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
    document = Document()
    with document.models.freeze():  # bokeh would look through all charts again with each one that is added
        for chart in charts:
            document.add_root(chart.figure)
    script, divs = components({str(chart.figure.name): chart.figure for chart in charts})
    html = {str(chart.figure.name): _figure_html(chart, divs[str(chart.figure.name)]) for chart in charts}
    is_several = not timeline.is_one_machine
    sections = [
        _section("Device states", html["lanes"] + _idle_table(timeline, sum_by_cause(gaps)) + _cold_table(timeline)),
        *([_section("Machines and links", machine_table(timeline) + html.get("links", ""))] if is_several else []),
        _section("Utilisation", html["busy"]),
        _section("Shares and anchor", "".join(_chart_or_sentence(chart, html) for chart in shares_and_anchor)),
        _section("Loss and metrics", _metrics_html(metrics, html)),
    ]
    here = Path(__file__)
    return _PAGE.format(
        title=escape(title),
        style=here.with_name("page.css").read_text(),
        bokeh=Resources(mode="inline", minified=True, components=["bokeh"]).render_js(),
        script=here.with_name("page.js").read_text(),
        charts=script,
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items()),
        hint=escape(_HINT),
        touch_hint=escape(_TOUCH_HINT),
        sections="\n".join(sections),
    )


def _epoch_ends(timeline: Timeline) -> dict[int, float]:
    """The time in seconds at which each epoch had ended on all ranks."""
    ends: dict[int, float] = {}
    for event in timeline.events:
        if event.kind == "epoch" and "epoch" in event.fields:
            ends[int(event.fields["epoch"])] = event.t_ns / 1e9
    return ends


def _section(heading: str, body: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>"


def _chart_or_sentence(chart: Chart | str, html: Mapping[str, str]) -> str:
    return f'<p class="note">{escape(chart)}</p>' if isinstance(chart, str) else html[str(chart.figure.name)]


def _metrics_html(charts: Sequence[Chart], html: Mapping[str, str]) -> str:
    if not charts:
        return '<p class="note">No epoch has ended, so there are no metrics.</p>'
    return '<div class="pairs">' + "".join(html[str(chart.figure.name)] for chart in charts) + "</div>"


def _figure_html(chart: Chart, div: str) -> str:
    keys = "".join(
        f'<button type="button" class="key" aria-pressed="true" data-names="{escape(json.dumps(key.renderers))}">'
        f'<i class="{key.look}" style="--own: var(--{key.colour})"></i>{escape(key.label)}</button>'
        for key in chart.keys
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in chart.notes)
    return f'<figure id="{chart.figure.name}"><div class="keys">{keys}</div>{div}{notes}</figure>'


def _idle_table(timeline: Timeline, causes: Mapping[int, Mapping[str, float]]) -> str:
    """Seconds by cause for every device; a row adds up to the whole time of the lane."""
    totals: dict[str, float] = {}
    for seconds in causes.values():
        for cause, value in seconds.items():
            totals[cause] = totals.get(cause, 0.0) + value
    names = sorted(totals, key=lambda cause: -totals[cause])
    shown, rest = names[:MAX_CAUSES], names[MAX_CAUSES:]
    head = "".join(f"<th>{escape(name)}</th>" for name in ["device", "computes", *shown, *(["rest"] if rest else [])])
    rows = []
    for lane in timeline.lanes:
        own = causes.get(lane.rank, {})
        wall = max(1e-9, (lane.spans[-1][2] - lane.spans[0][1]) / 1e9)
        values = [wall - sum(own.values()), *(own.get(name, 0.0) for name in shown)]
        values += [sum(own.get(name, 0.0) for name in rest)] if rest else []
        cells = "".join(
            f'<td style="--part: {100 * value / wall:.1f}%">{value:.2f} s<small>{100 * value / wall:.1f} %</small></td>'
            for value in values
        )
        rows.append(f"<tr><th>{lane.rank}: {escape(timeline.name(lane))}</th>{cells}</tr>")
    return (
        '<h3>Time by cause</h3><div class="wide"><table id="idle"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="note">Not training time: {", ".join(OFF_THE_CLOCK)}. Each row adds up to the whole lane.</p>'
    )


def _cold_table(timeline: Timeline) -> str:
    """What each device prepared before the first step, in seconds, and for which rank it waited; "" if nothing."""
    found = cold_starts(timeline)
    names = list(dict.fromkeys(name for start in found for name in start.phases))
    if not names and not any(start.steps or start.waited_for is not None for start in found):
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in ["device", *names, "waited", "first steps of a size"])
    rows = []
    for start in found:
        waited = "" if start.waited_for is None else f"{start.waited_s:.2f} s<small>for rank {start.waited_for}</small>"
        steps_s = sum(seconds for _, seconds in start.steps)
        steps = f"{steps_s:.2f} s<small>{len(start.steps)} steps</small>" if start.steps else ""
        cells = [f"{start.phases[name]:.2f} s" if name in start.phases else "" for name in names]
        row = "".join(f"<td>{cell}</td>" for cell in (*cells, waited, steps))
        rows.append(f"<tr><th>{start.rank}: {escape(start.device)}</th>{row}</tr>")
    return (
        '<h3>Cold start</h3><div class="wide"><table id="cold-start"><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline' blob:; img-src data: blob:; font-src data:">
<title>{title}</title>
<style>
{style}
</style>
{bokeh}
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<dl>{facts}</dl>
<p class="hint fine">{hint}</p>
<p class="hint coarse">{touch_hint}</p>
</header>
{sections}
</main>
{charts}
<script>
{script}
</script>
</body>
</html>
"""
