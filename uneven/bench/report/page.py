"""A report as one self-contained HTML page: verdicts, tables, curves of every model, links to the runs' timelines.

Called by cli/bench_results.py; needs bokeh (the extra `pages`). The text is the same as in Markdown, by sections.py;
style and behaviour are those of a run's page (timeline/document.py).
"""

import os
import statistics
from collections.abc import Iterator, Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from uneven.bench.report.build import ModelReport, ModeReport, Report
from uneven.bench.report.sections import Block, Section, Table, sections_of
from uneven.errors import MachineError
from uneven.timeline.document import fit_table, verdict_html
from uneven.timeline.verdict import Verdict

if TYPE_CHECKING:
    from uneven.timeline.charts import Chart, Key

Curve = list[tuple[float, float]]


def render_page(report: Report, home: Path) -> str:
    """The HTML of the page; links are relative to `home`, the folder that it will be written to."""
    if find_spec("bokeh") is None:
        raise MachineError("a report as a page needs bokeh: pip install 'uneven[pages]'; --out report.md does without")
    from uneven.timeline.charts import embed_charts
    from uneven.timeline.document import render_document

    first, *others = sections_of(report)
    charts = {model.model: dict(_charts(model)) for model in report.models}
    script, html = embed_charts([chart for of_model in charts.values() for chart in of_model.values()])
    head = "".join(map(_block, first.blocks))
    body = "\n".join(_section(section, charts, html, home) for section in others)
    return render_document(first.title, head, body, script)


def _section(section: Section, charts: Mapping[str, Mapping[str, "Chart"]], html: Mapping[str, str], home: Path) -> str:
    body = "".join(map(_block, section.blocks))
    if section.is_folded:
        return f"<details><summary>{escape(section.title)}</summary>{body}</details>"
    if section.model is not None:
        own = charts[section.model.model]
        body += _curves(section.model, {title: html[str(chart.figure.name)] for title, chart in own.items()})
        body += _links(section.model, home)
    return f"<section><h2>{escape(section.title)}</h2>{body}</section>"


def _block(block: Block) -> str:
    if isinstance(block, Verdict):
        return verdict_html(block)
    if isinstance(block, Table):
        rows = [[escape(cell) for cell in row] for row in block.rows]
        return fit_table(block.head, rows, kind="numbers")
    if block.startswith("$ "):
        return f"<pre>{escape(block[2:])}</pre>"
    return f"<p><b>{escape(block)}</b></p>" if block.startswith("Best:") else f'<p class="note">{escape(block)}</p>'


def _curves(model: ModelReport, html: Mapping[str, str]) -> str:
    """The charts of a model below one row of keys, which work on all of them."""
    from uneven.timeline.charts import keys_html

    figures = "".join(f"<div><h3>{escape(title)}</h3>{chart}</div>" for title, chart in html.items())
    return f'{keys_html(_keys(model))}<div class="pairs">{figures}</div>' if html else ""


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


def _drawn(model: ModelReport) -> list[ModeReport]:
    return [row for row in model.rows if row.trajectories and row.trajectories[0]]


def _keys(model: ModelReport) -> list["Key"]:
    """One for every mode; its colour and dashes are the same in every chart."""
    from uneven.timeline.charts import DASHES, RANK_COLOURS, Key, rank_colour

    return [
        Key(row.mode, (f"{model.model}-{row.mode}",), rank_colour(place), DASHES[place // RANK_COLOURS % len(DASHES)])
        for place, row in enumerate(_drawn(model))
    ]


def _charts(model: ModelReport) -> Iterator[tuple[str, "Chart"]]:
    """Training loss and quality of every mode, mean over seeds, over samples and over time; by their titles."""
    for key, title in (("train_loss", "training loss"), (model.metric, f"{model.metric} on the test set")):
        for along, label in (("samples", "samples"), ("train_seconds", "seconds of training")):
            lines = {
                row.mode: points
                for row in _drawn(model)
                if (row.has_speed or along == "samples") and (points := curve(row, along, key))
            }
            if any(len(points) > 1 for points in lines.values()):
                yield f"{title} over {label}", _chart(model, f"{model.model}-{key}-{along}", label, lines)


def curve(row: ModeReport, along: str, key: str) -> Curve:
    """One point per epoch that all seeds have evaluated: mean of `key`, median of `along` over undisturbed seeds."""
    return [
        (statistics.median(entries[place][along] for place in row.timed), statistics.mean(e[key] for e in entries))
        for entries in zip(*row.trajectories, strict=False)
        if all(isinstance(entry.get(key), int | float) and along in entry for entry in entries)
    ]


def _chart(model: ModelReport, name: str, label: str, lines: Mapping[str, Curve]) -> "Chart":
    """As wide as its place: the keys stand above all charts of the model, and not beside each of them."""
    from bokeh.models import NumeralTickFormatter

    from uneven.timeline.charts import Chart, add_tooltip, paint, plain_figure, source

    fig = plain_figure(name, 300, label, "")
    fig.update(min_border_left=56)  # plots below each other begin at the same place
    for key in _keys(model):
        points = lines.get(key.label)
        if not points:
            continue
        across, up = zip(*points, strict=True)
        table = source({"x": across, "y": up})
        line = fig.line(x="x", y="y", source=table, line_width=2, line_dash=key.look)
        dots = fig.scatter(x="x", y="y", source=table, size=7 if len(points) == 1 else 4)
        for drawn in (line, dots):
            paint(drawn, key.renderers[0], key.colour)
        add_tooltip(fig, [dots], f"<b>{escape(key.label)}</b> @y{{0.0000}}<br>{label} @x{{0,0}}")
    fig.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")  # 1.5m samples
    return Chart(fig)
