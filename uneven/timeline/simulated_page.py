"""Simulated runs as one HTML page: a bar for each policy, what limits it, efficiency over time, and lanes.

`uneven simulate --page` calls it. The look is that of a run's page (page.css); the charts are plain SVG without any
script, so that no other package is needed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from uneven.simulate.cluster import Cluster
from uneven.simulate.simulation import Simulated
from uneven.simulate.tally import STATES, Span
from uneven.timeline.document import bar_html, facts_html, render_document, section_html, write_document

COLOURS = {
    "compute": "compute",
    "communication": "communication",
    "wait": "wait",
    "settling": "moment",
    "idle": "round-collecting",
}
NAMES = {"equal": "equal (plain DDP)"}
LANES = 8  # of each policy
LANE_SPANS = 60  # of the busiest lane that is drawn


def write_simulated_page(path: Path, title: str, cluster: Cluster, found: Sequence[Simulated]) -> None:
    """Write the page; MachineError where the file cannot be written."""
    kinds = Counter(kind.name for kind in cluster.ranks)
    facts = {
        "ranks": f"{len(cluster.ranks):,}",
        "machines": f"{len(set(cluster.machines)):,}",
        "devices": ", ".join(f"{count} x {name}" if count > 1 else name for name, count in kinds.items()),
        "simulated": f"{max(one.seconds for one in found):,.0f} s",
    }
    sections = [
        section_html("Which policy, and what limits it", _policies(found)),
        section_html("Efficiency over time", _over_time(found)),
        section_html("What each device does, from the beginning", _lanes(cluster, found)),
    ]
    content = render_document(title, facts_html(facts), "\n".join(sections), style=_STYLE)
    write_document(path, content, "--page FILE")


def _policies(found: Sequence[Simulated]) -> str:
    rows = []
    for one in found:
        parts = [(one.mean(state), COLOURS[state]) for state in STATES if one.mean(state) >= 0.0005]
        epoch = f"{one.seconds_per_epoch:,.1f} s an epoch" if math.isfinite(one.seconds_per_epoch) else "no epoch"
        told = f"efficiency {one.efficiency:.3f}, {epoch}, {one.samples_per_s:,.0f} samples/s"
        faults = f"; {one.failures} lost, {one.joins} joined, {one.trained_again:,} samples trained again"
        rows.append(
            f'<div class="policy"><p><b>{_name(one)}</b> <span>{told}</span></p>{bar_html(parts, told)}'
            f'<p class="note">{escape(one.limits)}{faults if one.failures or one.joins else ""}</p></div>'
        )
    note = '<p class="note">Bars: the time of all ranks; evaluation counts as idle. Simulated, not measured.</p>'
    return _state_keys() + "".join(rows) + note


def _over_time(found: Sequence[Simulated]) -> str:
    end_s = max(one.seconds for one in found)
    top = max(1.05, *(value for one in found for _, value in one.over_time))
    lines, keys = [], []
    for place, one in enumerate(found):
        points = [(0.0, one.over_time[0][1]), *one.over_time] if one.over_time else []
        shown = " ".join(f"{1000 * at / end_s:.1f},{100 - 100 * value / top:.2f}" for at, value in points)
        lines.append(f'<polyline points="{shown}" style="stroke: var(--rank-{place})"/>')
        keys.append(f'<span class="key"><i class="solid" style="--own: var(--rank-{place})"></i>{_name(one)}</span>')
    grid = "".join(
        f'<line x1="0" x2="1000" y1="{100 - 100 * mark / top:.2f}" y2="{100 - 100 * mark / top:.2f}"/>'
        for mark in (0.25, 0.5, 0.75, 1.0)
    )
    marks = "".join(
        f'<span style="bottom: {100 * mark / top:.2f}%">{mark:g}</span>' for mark in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    return (
        f'<figure><div class="keys">{"".join(keys)}</div><div class="plot"><div class="marks">{marks}</div>'
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="efficiency over time">'
        f"<g>{grid}</g>{''.join(lines)}</svg></div>{_axis(end_s)}</figure>"
    )


def _lanes(cluster: Cluster, found: Sequence[Simulated]) -> str:
    """Lanes of all policies on one time axis, so that equal lengths are equal times."""
    end_s = min(_drawn_s(one.lanes) for one in found)
    parts = [_state_keys()]
    for one in found:
        ranks = sorted({span.rank for span in one.lanes})
        shown = [ranks[place * len(ranks) // min(LANES, len(ranks))] for place in range(min(LANES, len(ranks)))]
        rows = []
        for rank in shown:
            boxes = "".join(_box(span, end_s) for span in one.lanes if span.rank == rank and span.start_s < end_s)
            kind = cluster.ranks[rank].name if rank < len(cluster.ranks) else "joined"
            rows.append(
                f'<div class="lane"><span>{rank}: {escape(kind)}</span><svg viewBox="0 0 1000 10" '
                f'preserveAspectRatio="none">{boxes}</svg></div>'
            )
        parts.append(f"<h3>{_name(one)}</h3>{''.join(rows)}")
    parts.append(f'<div class="under">{_axis(end_s)}</div>')
    if len(cluster.ranks) > LANES:
        parts.append(f'<p class="note">{LANES} of {len(cluster.ranks):,} ranks, at even distances.</p>')
    return "".join(parts)


def _drawn_s(lanes: Sequence[Span]) -> float:
    """How much of the beginning has few enough spans to be told apart."""
    seen: dict[int, int] = {}
    end_s = 0.0
    for span in lanes:
        seen[span.rank] = seen.get(span.rank, 0) + 1
        if seen[span.rank] > LANE_SPANS:
            break
        end_s = max(end_s, span.end_s)
    return end_s


def _box(span: Span, end_s: float) -> str:
    left, right = 1000 * span.start_s / end_s, 1000 * min(span.end_s, end_s) / end_s
    text = f"{span.state}, {1e3 * (span.end_s - span.start_s):,.3g} ms"
    return (
        f'<rect x="{left:.2f}" width="{max(0.0, right - left):.2f}" y="0" height="10" '
        f'style="fill: var(--{COLOURS[span.state]})"><title>{text}</title></rect>'
    )


def _axis(end_s: float) -> str:
    marks = "".join(f"<span>{end_s * part / 4:,.3g}{' s' if part == 4 else ''}</span>" for part in range(5))
    return f'<div class="axis">{marks}</div>'


def _state_keys() -> str:
    keys = "".join(
        f'<span class="key"><i style="--own: var(--{colour})"></i>{state}</span>' for state, colour in COLOURS.items()
    )
    return f'<div class="keys">{keys}</div>'


def _name(one: Simulated) -> str:
    return NAMES.get(one.policy, one.policy)


_STYLE = """
.key { cursor: default; }
.policy { margin: 14px 0; } .policy p { margin: 0 0 3px; } .policy span { color: var(--faint); margin-left: 8px; }
.policy .bar { height: 22px; }
.plot { position: relative; height: 240px; padding-left: 40px; }
.plot svg { width: 100%; height: 100%; overflow: visible; }
.plot polyline { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.plot line { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.marks span { position: absolute; left: 0; width: 32px; text-align: right; font-size: 12px; color: var(--faint);
  transform: translateY(50%); }
.axis { display: flex; justify-content: space-between; font-size: 12px; color: var(--faint); padding-left: 40px; }
.lane { display: flex; align-items: center; gap: 8px; margin: 3px 0; }
.lane span { flex: none; width: 132px; font-size: 12px; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.lane svg { flex: 1; min-width: 0; height: 18px; border-radius: 3px; background: var(--card); }
.under .axis { padding-left: 140px; }
@media (max-width: 760px) {
  .lane span { width: 84px; } .under .axis { padding-left: 92px; }
  .policy span { display: block; margin: 0; }
}
"""
