"""What the charts of a page have in common: their figure, its tools, and the keys that show and hide what is drawn.

Colours are the style sheet's (page.css): a renderer carries the name of its colour as a tag, and the page's script
paints it, so that a page follows its reader's light or dark. Needs bokeh, as everything that imports this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
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

EPOCH_LINES = 60

Drawn: TypeAlias = "GlyphRenderer[Any]"
Epochs: TypeAlias = Mapping[int, float]  # its number, and when it had ended, in seconds


@dataclass(frozen=True)
class Key:
    """A button beside a chart that shows and hides renderers; `look` says how its swatch is drawn."""

    label: str
    renderers: tuple[str, ...]
    colour: str
    look: str = "box"


@dataclass
class Chart:
    """A figure with what stands around it."""

    figure: figure
    keys: list[Key] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TimeAxis:
    """What the charts over time share: their range, where it begins on the page, and the line under the pointer."""

    end_s: float
    range: Range1d
    margin: int  # in pixels: moments lie below each other
    pointer: Span

    @classmethod
    def until(cls, end_s: float, labels: Sequence[str]) -> "TimeAxis":
        """`labels` name the lanes, and take the widest place at the side."""
        end_s = max(end_s, 1e-6)
        edge_s = 1.01 * end_s  # room for a marker on the last moment
        wide = Range1d(start=0.0, end=edge_s, bounds=(0.0, edge_s), min_interval=min(1e-6, end_s), name="time")
        margin = min(120, max(64, 24 + 7 * max(map(len, labels), default=0)))
        return cls(end_s, wide, margin, Span(dimension="height", line_width=1, line_alpha=0.6, tags=["ink"]))


def time_figure(name: str, height: int, axis: TimeAxis, y_label: str, y_range: Range1d | None = None) -> figure:
    fig = plain_figure(name, height, "seconds since the start", y_label, axis.range, y_range)
    fig.update(min_border_left=axis.margin)
    fig.add_tools(CrosshairTool(overlay=axis.pointer, dimensions="height", visible=False))
    return fig


def plain_figure(
    name: str, height: int, x_label: str, y_label: str, x_range: Range | None = None, y_range: Range | None = None
) -> figure:
    """A figure as wide as its page, that zooms along x."""
    ranges: dict[str, Any] = {key: value for key, value in (("x_range", x_range), ("y_range", y_range)) if value}
    # Ctrl (or a pinch on a touch pad, which browsers report as that): a bare wheel scrolls the page.
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
        lod_threshold=None,  # else bokeh draws rough while one pans
        **ranges,
    )
    fig.toolbar.logo = None
    for axis in (*fig.xaxis, *fig.yaxis):
        axis.update(axis_label_text_font=FONT, major_label_text_font=FONT, axis_label_text_font_style="normal")
        axis.update(axis_label_text_font_size="12px", major_label_text_font_size="12px", minor_tick_line_color=None)
        axis.update(formatter=BasicTickFormatter(use_scientific=False))
    return fig


def source(columns: Mapping[str, Any]) -> ColumnDataSource:
    """Numbers as arrays, which travel packed, and words as lists."""
    return ColumnDataSource({name: _packed(values) for name, values in columns.items()})


def _packed(values: Any) -> Any:
    if isinstance(values, np.ndarray) or any(isinstance(value, str) for value in values):
        return values
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def paint(renderer: Drawn, name: str, colour: str, level: str = "") -> Drawn:
    """Gives it its name and colour; one of a level is seen only from near (fine) or from afar (coarse)."""
    renderer.update(name=name, tags=[colour, level])
    return renderer


def explain(fig: figure, renderers: Sequence[Drawn], tooltip: str) -> None:
    """What is said about the thing under the pointer; `tooltip` is HTML with @columns."""
    text = f'<div class="told" style="max-width: 300px; font: 13px/1.45 {FONT}">{tooltip}</div>'
    fig.add_tools(HoverTool(renderers=list(renderers), tooltips=text, point_policy="follow_mouse", visible=False))


def mark_epochs(fig: figure, epochs: Epochs) -> None:
    """A line at the end of every epoch, or of every second, fifth, tenth ... where there are many."""
    times_s = list(every_so_many(epochs, EPOCH_LINES).values())
    lines = fig.vspan(x="x", source=source({"x": times_s}), line_width=1, line_dash=[2, 3], level="underlay")
    paint(lines, f"{fig.name}-epochs", "epoch")


def every_so_many(epochs: Epochs, most: int) -> dict[int, float]:
    """Those whose number is a multiple of a round one, so that there are at most so many."""
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    step = next(step for step in steps if len(epochs) // step <= most)
    return {number: time_s for number, time_s in epochs.items() if number % step == 0}


def rank_colour(rank: int) -> str:
    return f"rank-{rank % RANK_COLOURS}"


def rank_dash(rank: int) -> str:
    """Ranks differ by more than their colour."""
    return DASHES[rank % len(DASHES)]
