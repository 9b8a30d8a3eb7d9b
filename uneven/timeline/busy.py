"""The chart of how busy everything was: a lane per device, filled up to the fraction of the time in which it computed.

page.py calls it. Lanes of their own below show what the sampler saw of the machine: its cores, rank 0's process, GPUs.
Curves are smoothed: the steps of two devices in one plot of the raw values hid each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from bokeh.core.properties import value
from bokeh.models import FixedTicker, Range1d

from uneven.timeline.charts import (
    FONT,
    Chart,
    Epochs,
    TimeAxis,
    add_tooltip,
    mark_epochs,
    paint,
    rank_colour,
    source,
    time_figure,
)
from uneven.timeline.idle import mean_sampled
from uneven.timeline.lanes import lane_label
from uneven.timeline.thin import busy_shares, smooth, thin_samples
from uneven.timeline.timeline import Lane, Timeline

MAX_POINTS = 500  # of a lane
BIN_NS = 100_000_000  # the interval of the sampler
WINDOW_NS = 1_000_000_000  # curves are means over this time, or over WINDOW of a long run, but never over a quarter
WINDOW = 0.03
HEIGHT = 50  # px of a lane
LOW, FULL = 0.08, 0.68  # where 0 % and 100 % are in a lane, whose height is 1


@dataclass(frozen=True)
class _Curve:
    """A lane of the chart: `values` in percent at `times_s`, of which `most` fills the lane."""

    name: str  # of its renderer
    label: str
    text: str  # inside the lane: what is shown, and its mean
    colour: str
    times_s: Sequence[float]
    values: Sequence[float | None]
    most: float = 100.0


def busy_chart(timeline: Timeline, epochs: Epochs, axis: TimeAxis) -> Chart:
    """How busy each device was according to its lane, and the sampled utilisation of the machines."""
    end_ns = max(lane.spans[-1][2] for lane in timeline.lanes)
    curves = [_device_curve(lane, end_ns) for lane in timeline.lanes]
    for number in sorted({sample.machine for sample in timeline.samples}):
        curves += _sampled_curves(timeline, number)
    top = float(len(curves))
    fig = time_figure("busy", round(90 + HEIGHT * top), axis, "", Range1d(start=0.0, end=top))
    ticks = {top - 1 - place + (LOW + FULL) / 2: curve.label for place, curve in enumerate(curves)}
    fig.yaxis.update(ticker=FixedTicker(ticks=list(ticks)), major_label_overrides=ticks)
    fig.ygrid.update(visible=False)
    chart = Chart(fig)
    mark_epochs(fig, epochs)
    for place, curve in enumerate(curves):
        _draw(chart, curve, top - 1 - place + LOW)
    seconds = _window_ns(end_ns) / 1e9
    chart.notes.append(
        "A lane is full at 100 %, unless its text says otherwise (a process has 100 % for each core). "
        f"Means over about {seconds:.2g} s."
    )
    return chart


def _device_curve(lane: Lane, end_ns: int) -> _Curve:
    bins = max(1, min(MAX_POINTS, end_ns // BIN_NS))
    edges = [end_ns * index // bins for index in range(bins + 1)]
    shares = smooth(busy_shares(lane.spans, edges), max(1, _window_ns(end_ns) * bins // max(1, end_ns)))
    return _Curve(
        f"busy-{lane.rank}",
        lane_label(lane),
        f"computes {_mean_busy(lane):.0f} % of the time",
        rank_colour(lane.rank),
        [(first + last) / 2e9 for first, last in pairwise(edges)],
        [None if share is None else 100.0 * share for share in shares],
    )


def _sampled_curves(timeline: Timeline, number: int) -> list[_Curve]:
    """What a machine sampled of itself; the texts carry its name where there are several."""
    samples = thin_samples([sample for sample in timeline.samples if sample.machine == number], MAX_POINTS)
    means = mean_sampled(timeline, machine=number)
    ranks = [lane.rank for lane in timeline.lanes if lane.machine == number]
    of, own = ("", "") if timeline.is_one_machine else (f"{timeline.machines[number].host}: ", f"-{number}")
    times = [sample.t_ns / 1e9 for sample in samples]
    spaced_ns = (samples[-1].t_ns - samples[0].t_ns) / max(1, len(samples) - 1)
    size = max(1, round(_window_ns(samples[-1].t_ns) / max(1.0, spaced_ns)))

    def curve(name: str, label: str, words: str, colour: str, values: Sequence[float | None], mean: float) -> _Curve:
        smoothed = smooth(values, size)
        cores = max(1, -(-int(max((value for value in smoothed if value is not None), default=0.0)) // 100))
        scale = f" (full: {100 * cores} %)" if cores > 1 else ""
        text = f"{of}{words}, mean {mean:.0f} %{scale}"
        return _Curve(f"busy-{name}{own}", label, text, colour, times, smoothed, 100.0 * cores)

    first = min(ranks, default=0)
    curves = [curve("cpu", "cores", "all cores", "faint", [one.cpu for one in samples], means.get("cpu", 0.0))]
    words = f"process of rank {first}"
    used = [one.process_cpu for one in samples]
    curves.append(curve("process", "process", words, "faint", used, means.get("process", 0.0)))
    for index in sorted({gpu[0] for sample in samples for gpu in sample.gpus}):
        by_sample = [{gpu: utilisation for gpu, utilisation, _ in sample.gpus}.get(index) for sample in samples]
        mean = means.get(f"gpu {index}", 0.0)
        curves.append(curve(f"gpu-{index}", f"GPU {index}", f"GPU {index} (NVML)", rank_colour(index), by_sample, mean))
    return curves


def _draw(chart: Chart, curve: _Curve, bottom: float) -> None:
    heights = [0.0 if value is None else (FULL - LOW) * min(value, curve.most) / curve.most for value in curve.values]
    known = [place for place, value in enumerate(curve.values) if value is not None]
    table = source(
        {
            "x": [curve.times_s[place] for place in known],
            "low": np.full(len(known), bottom, dtype=np.float32),
            "high": np.array([bottom + heights[place] for place in known], dtype=np.float32),
            "percent": np.array([curve.values[place] for place in known], dtype=np.float32),
        }
    )
    fig = chart.figure
    paint(fig.varea(x="x", y1="low", y2="high", source=table, fill_alpha=0.35), curve.name, curve.colour)
    line = paint(fig.line(x="x", y="high", source=table, line_width=1.5), curve.name, curve.colour)
    add_tooltip(fig, [line], f"{curve.label}<br>@percent{{0.0}} % at @x{{0.000}} s")
    at = {"x": [0.0], "y": [bottom + FULL - LOW + 0.04], "text": [curve.text]}
    text = fig.text(x="x", y="y", text="text", source=source(at), x_offset=4)
    text.glyph.update(text_font=value(FONT), text_font_size="11px", text_baseline="bottom")
    paint(text, "busy-texts", "faint")


def _window_ns(end_ns: int) -> int:
    return int(max(WINDOW * end_ns, min(WINDOW_NS, end_ns / 4)))


def _mean_busy(lane: Lane) -> float:
    """The percentage of a lane's whole time that is compute, which is the mean of its curve."""
    busy_ns = sum(last - first for state, first, last in lane.spans if state == "compute")
    return 100.0 * busy_ns / max(1, lane.spans[-1][2] - lane.spans[0][1])
