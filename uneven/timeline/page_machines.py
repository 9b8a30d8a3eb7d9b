"""What a page shows of several machines: headings above their lanes, their clocks, and the links between them."""

from collections.abc import Sequence
from html import escape

from bokeh.models import Range1d
from bokeh.models.annotations import Label

from uneven.format import format_bytes, format_count, format_ns
from uneven.timeline.charts import FONT, Chart, Epochs, TimeAxis, add_boxes, add_curve, mark_epochs, time_figure
from uneven.timeline.clock import Machine
from uneven.timeline.document import fit_table
from uneven.timeline.links import Link, machine_links, short
from uneven.timeline.thin import evenly_spaced
from uneven.timeline.timeline import Timeline, rank_rounds

HEADING = 0.42  # the height of a heading, where that of a lane is 1
MAX_POINTS = 1_000


def draw_headings(chart: Chart, timeline: Timeline, headings: Sequence[tuple[Machine, float]], axis: TimeAxis) -> None:
    """A band with the machine's name above its lanes; `headings` holds the bottom of each, none for one machine."""
    if not headings:
        return
    columns = {
        "left": [0.0] * len(headings),
        "right": [axis.range.end] * len(headings),
        "bottom": [low for _, low in headings],
        "top": [low + HEADING for _, low in headings],
    }
    add_boxes(chart.figure, columns, "machines", "line", level="underlay")
    for machine, low in headings:
        # At a fixed place of the screen: it stays when the user zooms.
        label = Label(x=8, x_units="screen", y=low + HEADING / 2, text=describe_machine(timeline, machine))
        label.update(text_font=FONT, text_font_size="13px", text_baseline="middle", tags=["ink"])
        chart.figure.add_layout(label)
    chart.notes.append(
        f"All times are on the clock of {timeline.machines[0].host}. Those of another machine may be off by what "
        "stands beside its name; lanes of one machine fit together exactly."
    )


def describe_machine(timeline: Timeline, machine: Machine) -> str:
    """The heading of a machine's lanes: its name, how many ranks it has, and how exactly its times are known."""
    ranks = len(timeline.lanes_of(machine))
    words = f"{machine.host}: {format_count(ranks, 'rank')}"
    if machine.error_ns is None:
        return f"{words}, its clock was not compared"
    return words if machine.number == 0 else f"{words}, times +-{format_ns(machine.error_ns)}"


def link_chart(timeline: Timeline, epochs: Epochs, axis: TimeAxis) -> Chart | None:
    """The speed of every round on each machine, over time; None where there was no network or there were no rounds."""
    rounds = [] if timeline.is_one_machine else rank_rounds(timeline.events)
    chart: Chart | None = None
    fastest = 0.0
    for machine in timeline.machines if rounds else ():
        first = min(lane.rank for lane in timeline.lanes_of(machine))
        own = [(round_, speed) for round_ in rounds if round_.rank == first and (speed := round_.mb_per_s) is not None]
        if not own:
            continue
        if chart is None:
            chart = Chart(time_figure("links", 220, axis, "MB/s of a round"))
            mark_epochs(chart.figure, epochs)
        fastest = max(fastest, *(speed for _, speed in own))
        shown = evenly_spaced(own, MAX_POINTS)
        columns = {
            "x": [round_.averaged_ns / 1e9 for round_, _ in shown],
            "y": [speed for _, speed in shown],
            "number": [float(round_.number) for round_, _ in shown],
            "bytes": [format_bytes(round_.wire_bytes) for round_, _ in shown],
            "ms": [(round_.averaged_ns - round_.joined_ns) / 1e6 for round_, _ in shown],
        }
        tooltip = f"<b>{escape(machine.host)}</b>, round @number<br>@bytes in @ms{{0.[00]}} ms: @y{{0.[0]}} MB/s"
        add_curve(chart, f"link-{machine.number}", machine.host, machine.number, columns, tooltip)
    if chart is not None:
        chart.figure.y_range = Range1d(start=0.0, end=1.1 * fastest)
        chart.notes.append(
            "Bytes of the params over the time of their sum, once all ranks had joined. With n machines each sends and "
            "receives 2 (n - 1) / n times as much: what a link carries is up to twice this."
        )
    return chart


def machine_table(timeline: Timeline) -> str:
    """Clocks and links, a row per machine; "" for one machine."""
    links = machine_links(timeline)
    if not links:
        return ""
    unit = "round" if any(link.rounds for link in links) else "step"
    head = [
        "machine",
        "ranks",
        "clock",
        "drift",
        f"{unit}s",
        f"bytes per {unit}",
        f"time per {unit}",
        "speed",
        "in all",
    ]
    rows = [[escape(link.machine.host), *_cells(link)] for link in links]
    return (
        fit_table(head, rows, "machines")
        + '<p class="note">Clock: what was added to the times of a machine, and how far they may still be off. '
        "Bytes: of what its first rank had summed with the other machines.</p>"
    )


def _cells(link: Link) -> list[str]:
    machine = link.machine
    error = "" if machine.error_ns is None else f"<small>+-{format_ns(machine.error_ns)}</small>"
    clock = "reference" if machine.number == 0 else f"{_signed(machine.offset_ns)}{error}"
    clock = clock if machine.readings or machine.number == 0 else "not compared"
    size = link.round_bytes if link.rounds else link.step_bytes
    time_ms = link.round_ms if link.rounds else link.step_ms
    return [
        ", ".join(str(rank) for rank in link.ranks),
        clock,
        f"{round(machine.drift_ppm, 1) + 0.0:+.1f} ppm" if len(machine.readings) > 1 else "",  # no -0.0
        f"{link.rounds or link.steps:,}",
        "" if size is None else format_bytes(size),
        "" if time_ms is None else f"{short(time_ms)} ms",
        "" if link.mb_per_s is None else f"{short(link.mb_per_s)} MB/s",
        format_bytes(link.total_bytes) if size is not None else "",
    ]


def _signed(ns: int) -> str:
    return f"{ns / 1e9:+,.3f} s" if abs(ns) >= 1e9 else f"{'-' if ns < 0 else '+'}{format_ns(abs(ns))}"
