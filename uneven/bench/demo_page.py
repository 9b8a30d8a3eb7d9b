"""The demo as a page: the verdict, PyTorch's DDP beside ours on one time axis, and all modes in a table.

Called by cli/demo.py after the modes have run; needs bokeh (the extra `pages`). No verdict is made of disturbed runs.
"""

from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path

from uneven.bench.demo import METRIC, OURS, REFERENCE, DemoOrder, ModeRow, Results, folder_of
from uneven.bench.single.folders import read_timeline, write_file
from uneven.bench.undisturbed import FOOTNOTE, mark
from uneven.timeline.document import fit_table
from uneven.timeline.record import Account
from uneven.timeline.timeline import Timeline
from uneven.timeline.verdict import MEASURED, Verdict, lost_by_state, verdict

NAME = "demo.html"


def write_demo_page(order: DemoOrder, results: Results) -> Path | None:
    """The path of the page; None without bokeh, or if no run of several devices has a timeline."""
    timelines = read_timelines(order, results)
    if not timelines or find_spec("bokeh") is None:
        return None
    write_file(order.out / NAME, render_demo(order, results, timelines))
    return order.out / NAME


def read_timelines(order: DemoOrder, results: Results) -> dict[str, Timeline]:
    """Of PyTorch's DDP and of ours, as far as they are there."""
    modes = [mode for mode in (REFERENCE, shown_mode(results)) if mode in results.summaries]
    found = {mode: read_timeline(folder_of(order, mode)) for mode in modes}
    return {mode: one for mode, one in found.items() if one is not None and any(lane.spans for lane in one.lanes)}


def shown_mode(results: Results) -> str | None:
    """The mode of ours that is shown: async, or the fastest of those that have finished."""
    speeds = {mode: results.summaries[mode]["samples_per_s"] for mode in OURS if mode in results.summaries}
    return "cpu-async" if "cpu-async" in speeds else max(speeds, key=lambda mode: speeds[mode], default=None)


def demo_verdict(results: Results, accounts: Mapping[str, list[Account]]) -> Verdict:
    """Of the mode that is shown, against each device alone; a sentence alone where a run is missing or disturbed."""
    mode = shown_mode(results)
    alone = results.undisturbed_alone
    if results.caution is not None and (alone is None or mode in results.disturbed):
        return Verdict(f"No verdict. {results.caution}")
    if mode is None:
        return Verdict("No verdict: none of the policies has finished.")
    speed, lost = results.summaries[mode]["samples_per_s"], {}
    if alone is not None and len(accounts.get(mode, ())) == len(alone):
        lost = lost_by_state(accounts[mode], alone)
    return verdict(alone or (), speed, lost, MEASURED, mode)


def render_demo(order: DemoOrder, results: Results, timelines: Mapping[str, Timeline]) -> str:
    from uneven.timeline.document import facts_html, render_document, verdict_html

    found = demo_verdict(results, {mode: timeline.accounts for mode, timeline in timelines.items()})
    script, lanes = lanes_html(results, timelines)
    samples = f"{order.samples:,} digits" if order.samples else "all digits"
    facts = {
        "model": "LeNet",
        "data": f"{samples}, {order.epochs} epoch{'s' if order.epochs > 1 else ''}",
        "devices": ", ".join(results.devices),
    }
    sections = [
        f"<section><h2>The same samples, the same time axis</h2>{lanes}</section>",
        f"<section><h2>Every mode</h2>{_table(order, results)}</section>",
        f"<section><h2>About these runs</h2>{facts_html(facts)}</section>",
    ]
    return render_document("uneven demo", verdict_html(found), "\n".join(sections), script)


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
    is_marked = results.undisturbed_alone is None
    rows = []
    for row in results.rows:
        page = folder_of(order, row.mode) / "timeline.html"
        name = escape(row.mode)
        if page.is_file():
            name = f'<a href="{escape(str(page.relative_to(order.out)))}">{name}</a>'
        cells = [f"{100 * row.accuracy:.2f} %", mark(f"{row.seconds:.1f} s", row.is_disturbed)]
        if row.speedup is not None and row.efficiency is not None:
            marked = row.is_disturbed or is_marked
            cells += [mark(f"{row.speedup:.2f}x", marked), mark(f"~{100 * row.efficiency:.0f} %", marked)]
        rows.append([name, *cells])
    heads = ["mode", METRIC, "time", *(["speed-up", "efficiency"] if results.alone is not None else [])]
    notes = [line for line in (results.sentence, results.doubt) if line is not None]
    notes += [FOOTNOTE] if results.disturbed else []
    notes += [f"Not measured: {mode} ({why})." for mode, why in results.not_run.items()]
    notes += [] if results.shortened is None else [f"Shortened: {results.shortened}."]
    notes.append("Speed-up: over the fast device alone. Efficiency: of the devices' speeds alone, added up.")
    return fit_table(heads, rows, "modes") + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
