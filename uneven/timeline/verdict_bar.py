"""The drawing of a verdict: its sentence, one bar, and the amounts with how each is known. HTML and CSS alone.

The pages of runs, the report and the demo begin with it; page.css has its style.
"""

from html import escape

from uneven.timeline.verdict import ABSENT, UNKNOWN, Amount, Verdict

# Losses have the colours of their states.
_COLOURS = {"this run": "compute", ABSENT: "apart", UNKNOWN: "other"}


def verdict_html(verdict: Verdict, heading: str = "") -> str:
    """A verdict without known speeds is its sentence alone."""
    parts = [f"<h2>{escape(heading)}</h2>"] if heading else []
    parts.append(f'<p class="sentence">{escape(verdict.sentence)}</p>')
    if verdict.owned is not None and verdict.gave is not None:
        parts += [_bar(verdict, verdict.gave, verdict.owned), _amounts(verdict, verdict.gave, verdict.owned)]
    parts += [f'<p class="note">{escape(note)}</p>' for note in verdict.notes]
    return f'<section class="verdict">{"".join(parts)}</section>'


def _bar(verdict: Verdict, gave: Amount, owned: Amount) -> str:
    pieces = "".join(
        f'<i style="--part: {100 * verdict.part(amount):.2f}%; {_own(amount)}"></i>'
        for amount in (gave, *verdict.losses)
    )
    bound = ""
    if verdict.ddp is not None:
        at = 100 * verdict.part(verdict.ddp)
        side = " left" if at > 50 else ""
        text = f"DDP at most {100 * verdict.ddp.samples_per_s / owned.samples_per_s:.0f} %"
        bound = f'<b class="bound{side}" style="--at: {at:.2f}%"><span>{text}</span></b>'
    return f'<div class="bar" role="img" aria-label="{escape(verdict.sentence)}">{pieces}{bound}</div>'


def _amounts(verdict: Verdict, gave: Amount, owned: Amount) -> str:
    rows = [_amount(amount, owned, "box") for amount in (gave, *verdict.losses)]
    rows += [_amount(verdict.ddp, owned, "line")] if verdict.ddp is not None else []
    rows.append(_amount(owned, owned, "whole"))
    return f'<ul class="amounts">{"".join(rows)}</ul>'


def _amount(amount: Amount, owned: Amount, look: str) -> str:
    part = 100 * amount.samples_per_s / owned.samples_per_s
    percent = f"{part:.0f}" if part >= 9.95 else f"{part:.1f}"
    speed = f"{amount.samples_per_s:,.0f}" if amount.samples_per_s >= 9.95 else f"{amount.samples_per_s:.2g}"
    speed += " samples/s" if look == "whole" else ""
    colour = f' style="{_own(amount)}"' if look == "box" else ""
    return (
        f'<li><i class="{look}"{colour}></i>'
        f"<span>{escape(amount.name)}</span> <b>{speed}</b> <small>{percent} %, {amount.source}</small></li>"
    )


def _own(amount: Amount) -> str:
    return f"--own: var(--{_COLOURS.get(amount.name, amount.name)})"
