"""The HTML document around charts: one self-contained file that loads nothing. Imports bokeh, an optional dependency.

page.py (a run) and bench/demo_page.py (two runs side by side) fill it. It holds bokeh's script, the style sheet and the
data; its content security policy forbids the browser to load anything.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from bokeh.document import Document
from bokeh.embed import components
from bokeh.resources import Resources

from uneven.timeline.charts import Chart, Key

_HINT = (
    "Drag over a chart, or use Ctrl and the wheel, to zoom. The double arrow pans, the round arrow resets. Charts over "
    "time move together. Click a name above a chart to show or hide it; hover over anything for details."
)
_TOUCH_HINT = (
    "Tap a tool of a chart (zoom, pan) to use it, and again to scroll. Tap a name above a chart to show or hide it."
)


def render_document(title: str, head: str, sections: str, script: str) -> str:
    """`head` stands below the title, `script` is that of the charts."""
    here = Path(__file__)
    return _PAGE.format(
        title=escape(title),
        style=here.with_name("page.css").read_text(),
        bokeh=Resources(mode="inline", minified=True, components=["bokeh"]).render_js(),
        script=here.with_name("page.js").read_text(),
        charts=script,
        head=head,
        hint=escape(_HINT),
        touch_hint=escape(_TOUCH_HINT),
        sections=sections,
    )


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


def facts_html(facts: Mapping[str, str]) -> str:
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline' blob:; img-src data: blob:; font-src data:">
<title>{title}</title>
<style>
{style}
</style>
{bokeh}
</head>
<body>
<main>
<header>
<h1>{title}</h1>
{head}
</header>
{sections}
<p class="hint fine">{hint}</p>
<p class="hint coarse">{touch_hint}</p>
</main>
{charts}
<script>
{script}
</script>
</body>
</html>
"""
