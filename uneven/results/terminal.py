"""Where progress is printed: stderr, or another stream, for as long as anybody reads it.

Used by results/progress.py. Invariant: a line that cannot be written never ends a run. rich ends the process where a
pipe is closed (`uneven run train.py 2>&1 | head`), and a terminal that is gone raises OSError in the middle of
training: hours of work and their result would be lost for a line that nobody reads. tests/results/test_terminal.py.
"""

import sys
from contextlib import suppress
from typing import Any


class Terminal:
    """A text stream for rich's Console. Without `stream` it is what sys.stderr is at each moment."""

    def __init__(self, stream: Any = None) -> None:
        self._own = stream

    @property
    def rich_proxied_file(self) -> "Terminal":
        """While bars are drawn rich puts a stream of its own in the place of sys.stderr, and asks for this one here."""
        return self

    @property
    def _stream(self) -> Any:
        stream = sys.stderr if self._own is None else self._own
        return getattr(stream, "rich_proxied_file", stream)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
