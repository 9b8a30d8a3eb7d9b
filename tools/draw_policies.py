"""Make the drawings of docs/how-it-works.md: policies on a simulated clock, the axis, and the merge of an average.

Usage: python tools/draw_policies.py [FOLDER] [svg|png]     (needs matplotlib: pip install -e '.[docs]')

The drawings show simulations (tools/simulated_policies.py): two devices with a speed ratio of 2.5 run the policies of
the package. Times are assumed, not measured. Files contain no dates and no random names: the same code gives the same
bytes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as MplPath
from simulated_policies import BATCH, COSTS, SHOWN_MS, SLOT_MS, WIRE_MS, Average, Trace, run_exact, run_local

from uneven.policy.axis import Axis
from uneven.policy.exact import Balanced, Fixed

DEVICE = ("#0072B2", "#E69F00")  # fast, slow
WORDS = ("#0072B2", "#8A5D00")  # the same, dark enough for text
WIRE, IDLE, INK, FAINT = "#A3195B", "#D9DCE0", "#1F2328", "#8C959F"
NAMES = ("fast", "slow")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "uneven",
    "svg.fonttype": "none",  # small files; other fonts than this one are rarely wider
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",  # so that it reads on a dark page too
    "hatch.linewidth": 0.6,
}


def draw_policies() -> Figure:
    """One second of two devices under each of the four policies."""
    long = Axis(samples=BATCH * 70, slot_size=BATCH, epochs=1)
    panels = {
        "sync: equal batches, as in DDP": run_exact(Fixed.even(2)),
        "balanced: the same global batch, cut by speed": run_exact(Balanced(COSTS, 2 * BATCH)),
        "cadence: own steps, blocking average of params": run_local(False, long, anchor=3),
        "async: claimed batches, average in the background": run_local(True, long, anchor=3),
    }
    figure, axes = plt.subplots(len(panels), 1, figsize=(7.3, 5.6), sharex=True)
    for ax, (title, trace) in zip(axes, panels.items(), strict=True):
        _draw_lanes(ax, trace)
        if title.startswith("async"):
            _draw_rounds_in_flight(ax, trace.rounds)
        ax.set_title(title, loc="left", fontsize=8.5, fontweight="bold", pad=4)
        ax.set_title(f"{100 * trace.efficiency():.0f} % of both alone", loc="right", fontsize=8.5, pad=4)
        ax.set_yticks([1, 0], NAMES)
        ax.set_ylim(-0.62, 1.4)
        _bare(ax)
    axes[0].set_xlim(0, SHOWN_MS)
    axes[-1].set_xlabel("ms, simulated: a batch takes 40 and 100 ms +- 8 %, a sum over both 5 ms")
    handles = [
        Patch(facecolor=DEVICE[0], label="compute, fast"),
        Patch(facecolor=DEVICE[1], label="compute, slow"),
        Patch(facecolor=IDLE, hatch="////", edgecolor="white", label="wait"),
        Patch(facecolor=WIRE, label="communication"),
        Patch(facecolor="white", edgecolor=WIRE, label="in the background"),
    ]
    figure.legend(handles=handles, loc="upper center", ncols=5, frameon=False, handlelength=1.4, columnspacing=1.4)
    figure.subplots_adjust(left=0.065, right=0.97, top=0.895, bottom=0.085, hspace=0.5)
    return figure


def _draw_lanes(ax: Axes, trace: Trace) -> None:
    for rank in range(len(COSTS)):
        looks: dict[str, dict[str, Any]] = {
            "compute": {"facecolor": DEVICE[rank], "edgecolor": "white", "linewidth": 0.6},
            "wait": {"facecolor": IDLE, "edgecolor": "white", "linewidth": 0.0, "hatch": "////"},
            "wire": {"facecolor": WIRE, "edgecolor": "none"},
        }
        for kind, look in looks.items():
            spans = [span for span in trace.spans if span.rank == rank and span.kind == kind]
            bars = [(span.start_ms, min(span.end_ms, SHOWN_MS)) for span in spans if span.start_ms < SHOWN_MS]
            _bars(ax, [bar for bar in bars if bar[1] > bar[0]], 1 - rank, 0.62, **look)


def _draw_rounds_in_flight(ax: Axes, rounds: Sequence[Average]) -> None:
    for rank in range(len(COSTS)):
        bars = [(round_.entered_ms[rank], round_.averaged_ms) for round_ in rounds]
        shown = [bar for bar in bars if bar[0] < SHOWN_MS]
        _bars(ax, shown, 0.56 - rank, 0.16, facecolor="white", edgecolor=WIRE, linewidth=0.8)


def draw_axis() -> Figure:
    """The rank that trained each slot of two epochs, where rounds were due, and where ranks entered and merged them."""
    axis = Axis(samples=BATCH * 24 - BATCH // 2, slot_size=BATCH, epochs=2)
    figure, axes = plt.subplots(2, 1, figsize=(7.3, 3.7), sharex=True)
    titles = (
        "cadence: a window's slots are cut by the counts, in rank order",
        "async: slots are claimed, first come first served",
    )
    for ax, title, is_async in zip(axes, titles, (False, True), strict=True):
        _draw_strip(ax, axis, run_local(is_async, axis, anchor=2))
        ax.set_title(title, loc="left", fontsize=8.5, fontweight="bold", pad=20)
    axes[0].set_xlim(-BATCH * 0.3, axis.samples_before(axis.total) + BATCH * 0.3)
    ticks = [*range(0, axis.total, 6), axis.total]
    axes[1].set_xticks([axis.samples_before(slot) for slot in ticks], [str(slot) for slot in ticks])
    axes[1].tick_params(axis="x", length=3)
    axes[1].set_xlabel("slot (drawn as wide as its samples: an epoch's last one is short)")
    handles = [
        Patch(facecolor=DEVICE[0], label="trained by fast"),
        Patch(facecolor=DEVICE[1], label="trained by slow"),
        Line2D([], [], color=WIRE, marker="v", linestyle="none", markersize=5, label="round due"),
        Line2D([], [], color=INK, linewidth=1.6, label="event: epoch end, evaluated"),
        Line2D([], [], color=FAINT, linewidth=2.2, label="entered -> merged"),
    ]
    figure.legend(handles=handles, loc="upper center", ncols=5, frameon=False, handlelength=1.2, columnspacing=1.1)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.79, bottom=0.13, hspace=0.75)
    return figure


def _draw_strip(ax: Axes, axis: Axis, trace: Trace) -> None:
    place = axis.samples_before
    for rank, color in enumerate(DEVICE):
        own = [slot for slot in axis.slots() if trace.owner[slot.index] == rank]
        bars = [(place(slot.index), place(slot.index) + slot.samples) for slot in own]
        _bars(ax, bars, 1.0, 0.7, facecolor=color, edgecolor="white", linewidth=0.8)
    for epoch in range(axis.epochs):
        ax.plot([place(axis.epoch_end(epoch))] * 2, [-0.5, 1.62], color=INK, linewidth=1.6, clip_on=False)
    for number, round_ in enumerate(trace.rounds, start=1):
        ax.plot(place(round_.due), 1.52, color=WIRE, marker="v", markersize=5, clip_on=False)
        ax.text(place(round_.due), 1.78, str(number), color=WIRE, ha="center", va="bottom", fontsize=8)
        for rank, row in round_.rows.items():
            ends = [place(int(row.next_slot)), place(round_.merged_at[rank])]
            y = 0.25 - 0.42 * rank
            ax.plot(ends, [y, y], color=DEVICE[rank], linewidth=2.2, solid_capstyle="butt")
            ax.plot(ends[:1], [y], color=DEVICE[rank], marker="|", markersize=7, markeredgewidth=1.6)
    ax.set_yticks([0.25, -0.17], NAMES)
    ax.set_ylim(-0.5, 1.5)
    _bare(ax)


def draw_merge() -> Figure:
    """One param on two ranks: their steps move it apart, it is snapshot and averaged, and the average is merged."""
    figure, ax = plt.subplots(figsize=(7.3, 3.5))
    pulls = ((1.0, 0.10), (-0.7, 0.20))  # where a rank's own samples pull the param, and how far a step goes
    entries_ms, averaged_ms, end_ms = (200.0, 300.0), 300.0 + WIRE_MS, 555.0
    paths: list[list[tuple[float, float]]] = [[(0.0, 0.0)], [(0.0, 0.0)]]
    params, snapshots, average = [0.0, 0.0], [0.0, 0.0], 0.0
    is_merged = [False, False]
    ends = sorted((number * SLOT_MS[rank], rank) for rank in range(2) for number in range(1, 15))
    for now_ms, rank in [end for end in ends if end[0] <= end_ms]:
        target, rate = pulls[rank]
        params[rank] += rate * (target - params[rank])
        paths[rank] += [(now_ms, paths[rank][-1][1]), (now_ms, params[rank])]
        if now_ms == entries_ms[rank]:
            snapshots[rank] = params[rank]
            ax.plot(now_ms, params[rank], "o", color="white", markeredgecolor=DEVICE[rank], markersize=7, zorder=4)
            if rank == 1:  # it came last: weighted by the samples since the last round
                weights = (entries_ms[0] / SLOT_MS[0], entries_ms[1] / SLOT_MS[1])
                average = sum(w * s for w, s in zip(weights, snapshots, strict=True)) / sum(weights)
        elif now_ms >= averaged_ms and not is_merged[rank]:
            is_merged[rank] = True
            before = params[rank]
            params[rank] += average - snapshots[rank]
            paths[rank].append((now_ms, params[rank]))
            arrow = {"arrowstyle": "-|>", "color": WIRE, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (now_ms, params[rank]), (now_ms, before), arrowprops=arrow, zorder=5)
            words = ("work since then: kept", "kept")[rank]
            _show_kept(ax, words, now_ms, params[rank], average)
    for rank, path in enumerate(paths):
        path.append((end_ms, path[-1][1]))
        ax.plot(*zip(*path, strict=True), color=DEVICE[rank], linewidth=1.8, label=NAMES[rank])
    ax.plot([averaged_ms, end_ms], [average] * 2, color=WIRE, linewidth=1.2, linestyle=(0, (4, 3)))
    ax.text(end_ms - 4, average + 0.015, "the average", color=WIRE, ha="right", va="bottom")
    for rank, y in enumerate((0.1, -0.1)):
        va = "bottom" if rank == 0 else "top"
        place = (entries_ms[rank] - 8, snapshots[rank] + y)
        ax.text(*place, f"snapshot of {NAMES[rank]}", color=WORDS[rank], ha="right", va=va)
    ax.axvspan(entries_ms[0], averaged_ms, color=IDLE, alpha=0.5, linewidth=0)
    ax.text((entries_ms[0] + averaged_ms) / 2, 0.86, "round in flight", ha="center", va="top", color=INK)
    ax.set_xlim(0, end_ms)
    ax.set_ylim(-0.55, 0.9)
    ax.set_xlabel("ms, simulated")
    ax.set_ylabel("one param")
    ax.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.08, right=0.985, top=0.98, bottom=0.13)
    return figure


def _show_kept(ax: Axes, words: str, now_ms: float, param: float, average: float) -> None:
    """Mark the rank's own work that is kept after the merge: the distance of the param from the average."""
    arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (now_ms + 12, param), (now_ms + 12, average), arrowprops=arrow)
    ax.text(now_ms + 19, (param + average) / 2, words, va="center")


def draw_late() -> Figure:
    """The difference between two replicas when averages are merged after one step, and when a window later."""
    figure, axes = plt.subplots(1, 2, figsize=(7.3, 2.5))
    for ax, late in zip(axes, (1, 10), strict=True):
        values, merges = differences(late, window=10, rounds=6)
        ax.axhline(0.0, color=FAINT, linewidth=0.8)
        ax.plot([step for step, _ in values], [value for _, value in values], color=DEVICE[0], linewidth=1.5)
        ax.plot([step for step, _ in merges], [value for _, value in merges], "o", color=WIRE, markersize=4)
        when = "1 step after the snapshot" if late == 1 else f"{late} steps after it, a window late"
        ax.set_title(f"merged {when}", loc="left", fontsize=8.5, fontweight="bold", pad=5)
        ax.set_xlabel("steps of each rank")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("difference of the replicas")
    figure.subplots_adjust(left=0.08, right=0.985, top=0.89, bottom=0.18, wspace=0.16)
    return figure


def differences(late: int, window: int, rounds: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Two ranks on the loss p^2 / 2, by SGD (lr 0.1, momentum 0.9 of their own): the difference after every step.

    Every window begins with a snapshot, whose average is merged `late` steps later. The second list holds the
    differences right after the merges.
    """
    params, speeds, step = [0.5, -0.5], [0.0, 0.0], 0
    values, merges = [(0, 1.0)], []
    for _ in range(rounds):
        snapshots, average = list(params), sum(params) / 2
        for place in range(1, window + 1):
            speeds = [0.9 * speed + param for speed, param in zip(speeds, params, strict=True)]
            params = [param - 0.1 * speed for speed, param in zip(speeds, params, strict=True)]
            step += 1
            values.append((step, params[0] - params[1]))
            if place == late:
                params = [param + average - snapshot for param, snapshot in zip(params, snapshots, strict=True)]
                values.append((step, params[0] - params[1]))
                merges.append(values[-1])
    return values, merges


def _bars(ax: Axes, bars: Sequence[tuple[float, float]], middle: float, height: float, **look: Any) -> None:
    """Bars from start to end at one height, as one path, which keeps the file small."""
    low, high = middle - height / 2, middle + height / 2
    corners = [
        corner for start, end in bars for corner in ((start, low), (start, high), (end, high), (end, low), (start, low))
    ]
    codes = [MplPath.MOVETO, *[MplPath.LINETO] * 3, MplPath.CLOSEPOLY] * len(bars)
    if bars:
        ax.add_patch(PathPatch(MplPath(corners, codes), **look))


def _bare(ax: Axes) -> None:
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def main(folder: Path, kind: str) -> None:
    drawings = {"policies": draw_policies, "axis": draw_axis, "merge": draw_merge, "late": draw_late}
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcdefaults()  # ignore the user's matplotlibrc
    with mpl.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw()
            metadata = {"Date": None, "Creator": None} if kind == "svg" else None
            figure.savefig(folder / f"{name}.{kind}", metadata=metadata, dpi=96)
            plt.close(figure)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0] if arguments else "docs/images"), arguments[1] if len(arguments) > 1 else "svg")
