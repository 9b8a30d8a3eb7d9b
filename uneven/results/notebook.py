"""Progress in a notebook: one block of text below the cell, updated in place. Used by results/progress.py.

A notebook keeps everything that is printed, so bars drawn again and again would fill the page. IPython is not required:
it is asked for only where it is loaded already.
"""

import html
import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, RenderableType

WIDTH = 100
SECONDS = 0.25  # between two updates at least: each is a message to the browser


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, and not a shell in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Text:
    """Text as a notebook shows it: fixed width, as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.3">{html.escape(self._text)}</pre>'


class Block:
    """One output of a cell: lines that stay, and below them what `draw` gives, until `close`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: list[str] = []
        self._handle: Any = None
        self._shown = ""
        self._shown_s = float("-inf")
        self.draw: Callable[[], RenderableType] | None = None

    def say(self, lines: Sequence[str]) -> None:
        self._lines += lines
        self.update(at_once=True)

    def update(self, *, at_once: bool = False) -> None:
        """Show the block as it is now; now and then, unless `at_once`."""
        if not at_once and self._clock() - self._shown_s < SECONDS:
            return
        text = "\n".join([*self._lines, *self._drawn()])
        if text == self._shown:
            return
        self._shown, self._shown_s = text, self._clock()
        if self._handle is None:
            from IPython.display import display

            self._handle = display(Text(text), display_id=True)
        else:
            self._handle.update(Text(text))

    def close(self) -> None:
        """The drawing stays as it stands; lines that follow come below it."""
        if self.draw is not None:
            self._lines += self._drawn()
            self.draw = None
            self.update(at_once=True)

    def _drawn(self) -> list[str]:
        if self.draw is None:
            return []
        console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False, force_terminal=False, highlight=False)
        console.print(self.draw())
        assert isinstance(console.file, io.StringIO)
        return [line.rstrip() for line in console.file.getvalue().splitlines()]
