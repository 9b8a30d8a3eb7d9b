"""The demo's verdict, and its page: the verdict, PyTorch's DDP beside ours on one time axis, and all modes in a table.

Called by cli/demo.py after the modes have run; the page needs bokeh (the extra `pages`). No verdict is made of
disturbed runs.
"""

from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path

from uneven.bench.demo import OURS, REFERENCE, ModeRow, Results, folder_of
from uneven.bench.orders import DemoOrder
from uneven.bench.single.folders import read_timeline, write_file
from uneven.bench.undisturbed import mark
from uneven.format import format_count
from uneven.timeline.document import facts_html, fit_table, render_document, verdict_html
from uneven.timeline.timeline import Timeline
from uneven.timeline.verdict import MEASURED, Verdict, lost_by_state, verdict

NAME = "demo.html"


def read_timelines(order: DemoOrder, results: Results) -> dict[str, Timeline]:
    """Of PyTorch's DDP and of ours, as far as they are there."""
    modes = [mode for mode in (REFERENCE, shown_mode(results)) if mode in results.summaries]
    found = {mode: read_timeline(folder_of(order, mode)) for mode in modes}
    return {mode: one for mode, one in found.items() if one is not None and any(lane.spans for lane in one.lanes)}


def shown_mode(results: Results) -> str | None:
    """The mode of ours that is shown: async, or the fastest of those that have finished."""
    speeds = {mode: results.summaries[mode].samples_per_s for mode in OURS if mode in results.summaries}
    return "cpu-async" if "cpu-async" in speeds else max(speeds, key=lambda mode: speeds[mode], default=None)


def demo_verdict(results: Results, timelines: Mapping[str, Timeline]) -> Verdict:
    """Of the mode that is shown, against each device alone; a sentence alone where a run is missing or disturbed."""
    mode = shown_mode(results)
    alone = results.undisturbed_alone
    if results.disturbed and (alone is None or mode in results.disturbed):
        names = ", ".join(results.disturbed)
        return Verdict(f"No verdict: other programs disturbed {names}. Run it again on an idle machine.")
    if mode is None:
        return Verdict("No verdict: none of the policies has finished.")
    accounts = timelines[mode].accounts if mode in timelines else []
    is_known = alone is not None and len(accounts) == len(alone)
    lost = lost_by_state(accounts, alone) if is_known and alone is not None else {}
    return verdict(alone or (), results.summaries[mode].samples_per_s, lost, MEASURED, mode)


def write_demo_page(
    order: DemoOrder, results: Results, timelines: Mapping[str, Timeline], found: Verdict
) -> Path | None:
    """The path of the page; None without bokeh, or if no run of several devices has a timeline."""
    if not timelines or find_spec("bokeh") is None:
        return None
    script, lanes = lanes_html(results, timelines)
    facts = {
        "model": "LeNet",
        "data": f"{f'{order.samples:,}' if order.samples else 'all'} digits, {format_count(order.epochs, 'epoch')}",
        "devices": ", ".join(results.devices),
    }
    sections = [
        f"<section><h2>The same samples, the same time axis</h2>{lanes}</section>",
        f"<section><h2>Every mode</h2>{_table(order, results)}</section>",
        f"<section><h2>About these runs</h2>{facts_html(facts)}</section>",
    ]
    page = render_document("uneven demo", verdict_html(found), "\n".join(sections), script)
    write_file(order.out / NAME, page)
    return order.out / NAME


def lanes_html(results: Results, timelines: Mapping[str, Timeline]) -> tuple[str, str]:
    """The runs below each other on one time axis: the script of their charts, and their HTML."""
    from uneven.timeline.charts import embed_charts
    from uneven.timeline.side_by_side import compare_lanes

    charts = compare_lanes(timelines)
    script, html = embed_charts(list(charts.values()))
    rows = {row.mode: row for row in results.rows}
    parts = (
        f"<h3>{escape(_heading(rows[mode], timelines[mode]))}</h3>{html[str(chart.figure.name)]}"
        for mode, chart in charts.items()
    )
    return script, "".join(parts)


def _heading(row: ModeRow, timeline: Timeline) -> str:
    busy = " and ".join(f"{100 * account.shares['compute']:.0f} %" for account in timeline.accounts)
    seconds = mark(f"{row.seconds:.1f} s", row.is_disturbed)
    name = "PyTorch's DDP" if row.mode == REFERENCE else row.mode
    return f"{name}: {seconds} of training, of which the devices compute {busy}"


def _table(order: DemoOrder, results: Results) -> str:
    headings, rows = results.table()
    for row in rows:
        page = folder_of(order, row[0]) / "timeline.html"
        row[0] = escape(row[0])
        if page.is_file():
            row[0] = f'<a href="{escape(str(page.relative_to(order.out)))}">{row[0]}</a>'
    notes = "".join(f'<p class="note">{escape(line)}</p>' for line in results.remarks())
    return fit_table(headings, rows, "modes") + notes
