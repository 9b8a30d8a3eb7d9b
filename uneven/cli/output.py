"""What verbs print: one JSON document, or tables of figures on a terminal of any width.

Invariant: no figure is shortened. Where a table does not fit, rich would cut 0.530 to "0.5" and dots; here the terminal
breaks such lines, and where there is none they are as long as they have to be.
"""

import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.files import json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 1000
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def print_json(document: Any) -> None:
    print(json_text(document), flush=True)


def teller(is_quiet: bool) -> Callable[[str], None]:
    """Prints lines of progress on stderr; nothing beside a JSON document."""
    return lambda line: None if is_quiet else print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """A message, where stdout has the result."""
    print(f"uneven: {line}", file=sys.stderr, flush=True)


def new_console(width: int | None = None, *, is_forced: bool = False) -> "Console":
    """No markup: folders and scripts have the names that users give them, as in runs/[lr=0.1].

    `width` is that of its lines where it is no terminal, or `is_forced`; None: as rich does.
    """
    from rich.console import Console

    is_used = is_forced or not sys.stdout.isatty()
    return Console(highlight=False, markup=False, emoji=False, width=width if is_used else None)


def new_table(*headings: str, left: Collection[str] = (), no_wrap: bool = False, **options: Any) -> "Table":
    """An empty table without lines; columns are aligned to the right but those that `left` names."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", **options)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=no_wrap)
    return table


def print_whole(table: "Table") -> None:
    """Print a table in the width that it needs."""
    console = new_console()
    needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
    new_console(max(console.width, needed), is_forced=True).print(table)  # print(width=...) stays within the terminal
