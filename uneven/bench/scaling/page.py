"""The plot of a scaling measurement: speed-up over ranks, measured and by the fitted law. Needs bokeh."""

from importlib.util import find_spec
from pathlib import Path

from uneven.bench.scaling.measure import Scaling, predict
from uneven.bench.single.folders import write_file
from uneven.errors import MachineError


def write_scaling_page(scaling: Scaling, title: str, path: Path) -> None:
    """Write one self-contained page; MachineError if bokeh is missing or the file cannot be written."""
    if find_spec("bokeh") is None:
        raise MachineError("a plot needs bokeh, which is not installed: pip install 'uneven[pages]'")
    from bokeh.embed import file_html
    from bokeh.models.annotations import Whisker
    from bokeh.models.sources import ColumnDataSource
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    alone = scaling.points[0].per_s
    ranks = [point.ranks for point in scaling.points]
    chart = figure(title=title, width=760, height=460, x_axis_label=scaling.counted, y_axis_label="speed-up")
    most = max(ranks)
    steps = [1 + place * (most - 1) / 60 for place in range(61)]
    chart.line(steps, steps, legend_label="perfect", color="#8C8C8C", line_dash="dashed")
    if scaling.alpha is not None:
        law = [predict(step, scaling.alpha) for step in steps]
        chart.line(steps, law, legend_label=f"N / (1 + {scaling.alpha:.3f} (N - 1))", color="#D55E00", line_width=2)
    halves = [0.0 if point.half_width == float("inf") else point.half_width / alone for point in scaling.points]
    bars = ColumnDataSource(
        {
            "ranks": ranks,
            "low": [point.speedup - half for point, half in zip(scaling.points, halves, strict=True)],
            "high": [point.speedup + half for point, half in zip(scaling.points, halves, strict=True)],
        }
    )
    chart.add_layout(Whisker(base="ranks", lower="low", upper="high", source=bars))
    chart.scatter(ranks, [point.speedup for point in scaling.points], size=9, legend_label="measured", color="#0072B2")
    chart.legend.location = "top_left"
    write_file(path, file_html(chart, INLINE, title))
