"""The common base of the page's charts: figures with their tools, tooltips, and keys that show and hide renderers.

lanes.py and curves.py build on it. Colours are defined in the style sheet (page.css): a renderer carries the name of
its colour as a tag, and page.js applies it, so that a page follows the browser's light or dark scheme. Imports bokeh,
which is an optional dependency.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, TypeAlias

import numpy as np
from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    HoverTool,
    PanTool,
    Range,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
    ZoomInTool,
    ZoomOutTool,
)
from bokeh.models.annotations import Span
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure

DASHES = ("solid", "dashed", "dotted", "dashdot")
RANK_COLOURS = 8
FONT = "system-ui, sans-serif"

EPOCH_LINES = 60  # at most
FEW_DOTS = 60  # of a curve, which are large

Level: TypeAlias = Literal["", "fine", "coarse"]
Drawn: TypeAlias = "GlyphRenderer[Any]"
Epochs: TypeAlias = Mapping[int, float]  # number of an epoch -> its end in seconds
Swatch: TypeAlias = str  # "box", "strip", "mark", "diamond", "hatch" or a line dash: a class of page.css


@dataclass(frozen=True)
class Key:
    """A button above a chart that shows and hides renderers; `look` is the style of its swatch."""

    label: str
    renderers: tuple[str, ...]
    colour: str
    look: Swatch = "box"


@dataclass
class Chart:
    """A figure with its keys and the notes below it."""

    figure: figure
    keys: list[Key] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TimeAxis:
    """The x axis that all charts over time share, so that they pan and zoom together; with the crosshair line."""

    end_s: float
    range: Range1d
    margin: int  # px at the left, the same in all charts, so that equal times are aligned
    pointer: Span

    @classmethod
    def until(cls, end_s: float, labels: Sequence[str]) -> "TimeAxis":
        """`labels` are those of the lanes: they are the widest labels at the left and determine the margin."""
        end_s = max(end_s, 1e-6)
        edge_s = 1.01 * end_s  # room for a marker at the very end
        x_range = Range1d(start=0.0, end=edge_s, bounds=(0.0, edge_s), min_interval=min(1e-6, end_s), name="time")
        margin = min(120, max(64, 24 + 7 * max(map(len, labels), default=0)))
        return cls(end_s, x_range, margin, Span(dimension="height", line_width=1, line_alpha=0.6, tags=["ink"]))


def time_figure(name: str, height: int, axis: TimeAxis, y_label: str, y_range: Range1d | None = None) -> figure:
    fig = plain_figure(name, height, "seconds since the start", y_label, axis.range, y_range)
    fig.update(min_border_left=axis.margin)
    fig.add_tools(CrosshairTool(overlay=axis.pointer, dimensions="height", visible=False))
    return fig


def plain_figure(
    name: str, height: int, x_label: str, y_label: str, x_range: Range | None = None, y_range: Range | None = None
) -> figure:
    """A figure of the page's width that zooms along x only."""
    ranges: dict[str, Any] = {key: value for key, value in (("x_range", x_range), ("y_range", y_range)) if value}
    # Zoom needs Ctrl, since the wheel alone scrolls the page; browsers report a pinch on a touch pad as Ctrl + wheel.
    drag, wheel = BoxZoomTool(dimensions="width"), WheelZoomTool(dimensions="width", modifiers="ctrl")
    zooms = (ZoomInTool(dimensions="width"), ZoomOutTool(dimensions="width"))
    fig = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        x_axis_label=x_label,
        y_axis_label=y_label or None,
        tools=[drag, PanTool(dimensions="width"), wheel, *zooms, ResetTool(), SaveTool(filename=name)],
        active_drag=drag,
        active_scroll=wheel,
        toolbar_location="above",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        min_border_right=12,
        lod_threshold=None,  # otherwise bokeh drops points while the user pans
        **ranges,
    )
    fig.toolbar.logo = None
    for axis in (*fig.xaxis, *fig.yaxis):
        axis.update(axis_label_text_font=FONT, major_label_text_font=FONT, axis_label_text_font_style="normal")
        axis.update(axis_label_text_font_size="12px", major_label_text_font_size="12px", minor_tick_line_color=None)
        axis.update(formatter=BasicTickFormatter(use_scientific=False))
    return fig


def source(columns: Mapping[str, Any]) -> ColumnDataSource:
    """A data source with numbers as arrays, which bokeh encodes compactly, and texts as lists."""
    return ColumnDataSource({name: _as_column(values) for name, values in columns.items()})


def _as_column(values: Any) -> Any:
    if isinstance(values, np.ndarray) or any(isinstance(value, str) for value in values):
        return values
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def paint(renderer: Drawn, name: str, colour: str, level: Level = "") -> Drawn:
    """Set the name and colour of a renderer; one with a level shows only when zoomed in ("fine") or out ("coarse")."""
    renderer.update(name=name, tags=[colour, level])
    return renderer


def add_tooltip(fig: figure, renderers: Sequence[Drawn], tooltip: str) -> None:
    """Show a tooltip for the element under the pointer; `tooltip` is HTML with @columns."""
    text = f'<div class="tooltip" style="max-width: 300px; font: 13px/1.45 {FONT}">{tooltip}</div>'
    fig.add_tools(HoverTool(renderers=list(renderers), tooltips=text, point_policy="follow_mouse", visible=False))


def add_boxes(
    fig: figure, columns: Mapping[str, Any], name: str, colour: str, tooltip: str = "", zoom: Level = "", **look: Any
) -> Drawn:
    """Rectangles from `left` to `right` and from `bottom` to `top`, without edges."""
    boxes = fig.quad(left="left", right="right", bottom="bottom", top="top", source=source(columns), **look)
    boxes.glyph.update(line_color=None)
    if tooltip:
        add_tooltip(fig, [boxes], tooltip)
    return paint(boxes, name, colour, zoom)


def add_curve(chart: Chart, name: str, label: str, place: int, columns: Mapping[str, Any], tooltip: str) -> None:
    """A line with dots at `x` and `y`, in the colour and dashes of its place, and its key above the chart."""
    colour, dash = rank_colour(place), rank_dash(place)
    fig, table = chart.figure, source(columns)
    line = fig.line(x="x", y="y", source=table, line_width=2, line_dash=dash)
    dots = fig.scatter(x="x", y="y", source=table, size=7 if len(columns["x"]) <= FEW_DOTS else 3)
    names = (name, f"{name}-dots")
    paint(line, names[0], colour)
    add_tooltip(fig, [paint(dots, names[1], colour)], tooltip)
    chart.keys.append(Key(label, names, colour, dash))


def add_steps(
    chart: Chart, name: str, label: str, place: int, points: Sequence[tuple[float, float]], end_s: float
) -> None:
    """As a curve, of values that hold from their time on until the next one, the last one until the end."""
    columns = {"x": [*(x for x, _ in points), end_s], "y": [*(y for _, y in points), points[-1][1]]}
    colour, dash = rank_colour(place), rank_dash(place)
    line = chart.figure.step(x="x", y="y", source=source(columns), mode="after", line_width=2, line_dash=dash)
    add_tooltip(chart.figure, [paint(line, name, colour)], f"{label}<br>@y{{0.0}} at @x{{0.000}} s")
    chart.keys.append(Key(label, (name,), colour, dash))


def mark_epochs(fig: figure, epochs: Epochs) -> None:
    """Draw a line at the end of every epoch; of many epochs only every second, fifth, tenth ..."""
    times_s = list(thin_epochs(epochs).values())
    lines = fig.vspan(x="x", source=source({"x": times_s}), line_width=1, line_dash=[2, 3], level="underlay")
    paint(lines, f"{fig.name}-epochs", "epoch")


def thin_epochs(epochs: Epochs) -> dict[int, float]:
    """At most EPOCH_LINES epochs: the multiples of the smallest of 1, 2, 5, 10, 20, 50 ... that gives so few."""
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    step = next(step for step in steps if len(epochs) // step <= EPOCH_LINES)
    return {number: time_s for number, time_s in epochs.items() if number % step == 0}


def rank_colour(rank: int) -> str:
    return f"rank-{rank % RANK_COLOURS}"


def rank_dash(rank: int) -> str:
    """A dash pattern, so that ranks can be distinguished without colour."""
    return DASHES[rank % len(DASHES)]


def embed_charts(charts: Sequence[Chart]) -> tuple[str, dict[str, str]]:
    """The script of all charts, and the HTML of each by the name of its figure."""
    if not charts:
        return "", {}
    document = Document()
    with document.models.freeze():  # bokeh would look through all charts again with each one that is added
        for chart in charts:
            document.add_root(chart.figure)
    script, divs = components({str(chart.figure.name): chart.figure for chart in charts})
    return script, {str(chart.figure.name): _figure_html(chart, divs[str(chart.figure.name)]) for chart in charts}


def keys_html(keys: Sequence[Key]) -> str:
    """Buttons that show and hide what they name; page.js listens to them."""
    buttons = "".join(
        f'<button type="button" class="key" aria-pressed="true" data-names="{escape(json.dumps(key.renderers))}">'
        f'<i class="{key.look}" style="--own: var(--{key.colour})"></i>{escape(key.label)}</button>'
        for key in keys
    )
    return f'<div class="keys">{buttons}</div>' if keys else ""


def _figure_html(chart: Chart, div: str) -> str:
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in chart.notes)
    return f'<figure id="{chart.figure.name}">{keys_html(chart.keys)}{div}{notes}</figure>'
