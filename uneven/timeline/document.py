"""HTML documents that load nothing: their frame, tables, bars, facts, and the verdict that most of them begin with.

The pages of runs and of simulated runs, the report and the demo are made of these. One with charts holds bokeh's script
and its data, others have no script at all; the content security policy forbids the browser to load anything. page.css
has the style; it turns the rows of a table into cards where columns have no room.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from uneven.files import folder_error, write_atomically
from uneven.timeline.verdict import ABSENT, UNKNOWN, Amount, Verdict

_HINT = (
    "Drag over a chart, or use Ctrl and the wheel, to zoom. The double arrow pans, the round arrow resets. Charts over "
    "time move together. Click a name above a chart to show or hide it; hover over anything for details."
)
_TOUCH_HINT = (
    "Tap a tool of a chart (zoom, pan) to use it, and again to scroll. Tap a name above a chart to show or hide it."
)


_SCRIPTS = "script-src 'unsafe-inline'; style-src 'unsafe-inline' blob:; img-src data: blob:; font-src data:"


def render_document(title: str, head: str, sections: str, charts: str | None = None, style: str = "") -> str:
    """`head` stands below the title, `charts` is the script of all charts; without it the page has none."""
    own = Path(__file__).with_name
    library, end = "", "</main>"
    if charts is not None:
        from bokeh.resources import Resources

        library = Resources(mode="inline", minified=True, components=["bokeh"]).render_js()
        hints = f'<p class="hint fine">{escape(_HINT)}</p>\n<p class="hint coarse">{escape(_TOUCH_HINT)}</p>'
        end = f"{hints}\n</main>\n{charts}\n<script>\n{own('page.js').read_text()}\n</script>"
    return _PAGE.format(
        title=escape(title),
        style=own("page.css").read_text() + style,
        allowed="style-src 'unsafe-inline'" if charts is None else _SCRIPTS,
        library=library,
        head=head,
        sections=sections,
        end=end,
    )


def write_document(path: Path, content: str, option: str = "out=... (--out FOLDER)") -> None:
    """MachineError where the file cannot be written; `option` is the way to name another one."""
    try:
        write_atomically(path, content.encode())
    except OSError as error:
        raise folder_error(path.parent, error, option) from error


def section_html(heading: str, body: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>"


def facts_html(facts: Mapping[str, str]) -> str:
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def fit_table(heads: Sequence[str], rows: Sequence[Sequence[str]], name: str = "", kind: str = "some") -> str:
    """The first cell of a row is its heading. `kind`: "some" is as wide as its text, "numbers" stand to the right.

    page.js gives every cell the heading of its column, which a card shows.
    """
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>" for first, *others in rows
    )
    own = f' id="{name}"' if name else ""
    table = f"<table{own}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="fit {kind}">{table}</div>'


def bar_html(parts: Sequence[tuple[float, str]], label: str, over: str = "") -> str:
    """One bar of these fractions of its width, each in a colour of page.css; `over` is drawn over it."""
    pieces = "".join(f'<i style="--part: {100 * part:.2f}%; --own: var(--{colour})"></i>' for part, colour in parts)
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{pieces}{over}</div>'


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
    bound = ""
    if verdict.ddp is not None:
        at = 100 * verdict.part(verdict.ddp)
        side = " left" if at > 50 else ""
        text = f"DDP at most {100 * verdict.ddp.samples_per_s / owned.samples_per_s:.0f} %"
        bound = f'<b class="bound{side}" style="--at: {at:.2f}%"><span>{text}</span></b>'
    parts = [(verdict.part(amount), _colour(amount)) for amount in (gave, *verdict.losses)]
    return bar_html(parts, verdict.sentence, bound)


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
    colour = f' style="--own: var(--{_colour(amount)})"' if look == "box" else ""
    return (
        f'<li><i class="{look}"{colour}></i>'
        f"<span>{escape(amount.name)}</span> <b>{speed}</b> <small>{percent} %, {amount.source}</small></li>"
    )


def _colour(amount: Amount) -> str:
    return _COLOURS.get(amount.name, amount.name)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {allowed}">
<title>{title}</title>
<style>
{style}
</style>
{library}
</head>
<body>
<main>
<header>
<h1>{title}</h1>
{head}
</header>
{sections}
{end}
</body>
</html>
"""
