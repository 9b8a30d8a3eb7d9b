"""Tables of the pages, as HTML that fits every screen: page.css turns the rows into cards where columns have no room.

The pages of runs, the report and the demo use it. Cells are HTML; the caller escapes what users wrote.
"""

from collections.abc import Sequence
from html import escape


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
