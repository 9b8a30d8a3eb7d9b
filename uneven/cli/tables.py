"""Tables of figures on a terminal of any width.

Invariant: no figure is shortened. Where a table does not fit, rich would cut 0.530 to "0.5" and dots; here the terminal
breaks such lines, and where there is none they are as long as they have to be.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 1000


def print_whole(console: "Console", table: "Table") -> None:
    """Print a table in the width that it needs."""
    width = console.width
    needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
    console.width = max(width, needed)  # print(width=...) would be bounded by the terminal
    try:
        console.print(table)
    finally:
        console.width = width
