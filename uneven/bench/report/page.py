"""A report as one self-contained HTML page: its tables, curves of every model, and links to the runs' timelines.

Called by cli/sweep.py; needs bokeh (the extra `pages`). The text is the same as in Markdown, by sections.py.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uneven.bench.report.build import ModelReport, ModeReport, Report
from uneven.bench.report.sections import Section, Table, sections_of
from uneven.errors import MachineError

if TYPE_CHECKING:
    from bokeh.plotting import figure

# Distinguishable with colour blindness, on white and on black (after Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#8A5A2B")
DASHES = ("solid", "dashed", "dotdash")
Curve = list[tuple[float, float]]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style>{bokeh}</head>
<body><main>{body}</main>{charts}</body></html>
"""
_CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --line: #d8dde5; --soft: #5a6676; --head: #f3f5f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --paper: #14181e; --line: #333b47; --soft: #9aa5b4; --head: #1d232c } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 16px 20px 60px }
h1 { font-size: 26px } h2 { margin-top: 40px; font-size: 20px } p { max-width: 80ch; color: var(--soft) }
p.best { color: var(--ink); font-weight: 600 }
.scroll { overflow-x: auto; margin: 12px 0 } table { border-collapse: collapse; font-size: 13px; white-space: nowrap }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line) }
th { background: var(--head); font-weight: 600 } th:first-child, td:first-child { text-align: left }
td { font-variant-numeric: tabular-nums } a { color: #2b7bd0 }
.charts { display: flex; flex-wrap: wrap; gap: 12px; background: #fff; border-radius: 8px; padding: 8px }
.charts > div { flex: 1 1 480px; min-width: 0 }
"""


def render_page(report: Report, home: Path) -> str:
    """The HTML of the page; links are relative to `home`, the folder that it will be written to."""
    if find_spec("bokeh") is None:
        raise MachineError("a report as a page needs bokeh: pip install 'uneven[pages]'; --out report.md does without")
    from bokeh.embed import components
    from bokeh.resources import Resources

    sections = sections_of(report)
    drawn = {
        f"{section.model.model}-{name}": chart
        for section in sections
        if section.model
        for name, chart in _charts(section.model)
    }
    script, places = components(drawn) if drawn else ("", {})
    return _PAGE.format(
        title="Benchmark report",
        style=_CSS,
        bokeh=Resources(mode="inline", minified=True, components=["bokeh"]).render_js(),
        body="\n".join(_section(section, places, home, number) for number, section in enumerate(sections)),
        charts=script,
    )


def _section(section: Section, places: dict[str, str], home: Path, number: int) -> str:
    level = 2 if number else 1
    parts = [f"<h{level}>{escape(section.title)}</h{level}>"]
    for block in section.blocks:
        if isinstance(block, Table):
            parts.append(_table(block))
        elif block.startswith("$ "):
            parts.append(f"<pre>{escape(block[2:])}</pre>")
        else:
            parts.append(f"<p{' class=best' if block.startswith('Best:') else ''}>{escape(block)}</p>")
    if section.model is not None:
        held = [place for name, place in places.items() if name.rsplit("-", 1)[0] == section.model.model]
        parts.append('<div class="charts">' + "".join(f"<div>{place}</div>" for place in held) + "</div>")
        parts.append(_links(section.model, home))
    return "<section>" + "\n".join(parts) + "</section>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _links(model: ModelReport, home: Path) -> str:
    """Links to the timeline pages that exist, by mode."""
    modes = []
    for row in model.rows:
        pages = [Path(folder) / "timeline.html" for folder in row.folders]
        links = [
            f'<a href="{escape(os.path.relpath(page, home))}">{escape(page.parent.name)}</a>'
            for page in pages
            if page.is_file()
        ]
        if links:
            modes.append(f"{escape(row.mode)}: {', '.join(links)}")
    return f"<p>Timelines: {'; '.join(modes)}</p>" if modes else ""


def _charts(model: ModelReport) -> Iterator[tuple[str, Any]]:
    """Training loss and quality of every mode, mean over seeds, over samples and over time."""
    rows = [row for row in model.rows if row.trajectories and row.trajectories[0]]
    styles = {row.mode: _style(place) for place, row in enumerate(rows)}  # the same in every chart
    for key, title in (("train_loss", "training loss"), (model.metric, f"{model.metric} on the test set")):
        for along, label in (("samples", "samples"), ("train_seconds", "seconds of training")):
            lines = [(row, _curve(row, along, key)) for row in rows if row.has_speed or along == "samples"]
            lines = [(row, points) for row, points in lines if points]
            if any(len(points) > 1 for _, points in lines):
                yield f"{key}_{along}", _chart(f"{title} over {label}", label, lines, styles)


def _style(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "line_dash": DASHES[place // len(COLOURS) % len(DASHES)]}


def _curve(row: ModeReport, along: str, key: str) -> Curve:
    """One point per epoch that all seeds have evaluated: median of `along` and mean of `key` over the seeds."""
    return [
        (statistics.median(entry[along] for entry in entries), statistics.mean(entry[key] for entry in entries))
        for entries in zip(*row.trajectories, strict=False)
        if all(isinstance(entry.get(key), int | float) and along in entry for entry in entries)
    ]


def _chart(
    title: str,
    label: str,
    lines: Sequence[tuple[ModeReport, list[tuple[float, float]]]],
    styles: dict[str, dict[str, str]],
) -> "figure":
    from bokeh.models import HoverTool, NumeralTickFormatter
    from bokeh.plotting import figure

    chart = figure(
        title=title,
        height=320,
        sizing_mode="stretch_width",
        x_axis_label=label,
        tools="pan,box_zoom,reset,save",
        active_drag="box_zoom",
    )
    for row, points in lines:
        across, up = zip(*points, strict=True)
        style = styles[row.mode]
        line = chart.line(list(across), list(up), legend_label=row.mode, name=row.mode, line_width=2, **style)
        if len(points) == 1:  # evaluated at the end only
            chart.scatter(list(across), list(up), legend_label=row.mode, size=8, color=style["color"])
        tips = [("mode", row.mode), (label, "$x{0,0}"), ("value", "$y{0.0000}")]
        chart.add_tools(HoverTool(renderers=[line], tooltips=tips, visible=False))
    chart.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")  # 1.5m samples
    chart.add_layout(chart.legend[0], "right")  # outside the plot, so that it does not hide the ends of the curves
    chart.legend.click_policy = "hide"
    chart.legend.label_text_font_size = "11px"
    chart.toolbar.logo = None
    return chart
