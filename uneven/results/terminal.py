"""Where progress is printed: stderr, or another stream, for as long as anybody reads it.

Used by results/progress.py, and by every process of a run that prints (launch/control/rank_log.py). Two invariants. A
line that cannot be written never ends a run: rich ends the process where a pipe is closed (`uneven run train.py 2>&1 |
head`), and a terminal that is gone raises OSError in the middle of training. And lines stand above the bars, whichever
process writes them: [Note: one terminal]. tests/results/test_terminal.py.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# [Note: one terminal] The launcher, all ranks and `uneven chaos` write to one terminal, and one of them draws bars in
# it. A line of another one was glued to the last bar, and the next drawing erased it, or left half a bar behind. So the
# one that draws keeps its bars in a file of the run's folder, too. Who has a line clears the bars, writes it, and
# draws the bars again below it: the cursor is where the drawer left it.
LOCKED_S = 0.3  # for the lock: who holds it may be stopped in the middle, and a line must not wait for ever
MOST_REST = 1 << 16  # of a line without an end that waits for it below bars
CLEAR, UP = "\x1b[2K", "\x1b[1A"
SHOW_CURSOR = "\x1b[?25h"


class SharedTerminal:
    """In the place of a stream that is a terminal, in each process of a run; `folder` is known to all of them."""

    def __init__(self, stream: Any, folder: Path) -> None:
        self._stream = stream
        self._path = folder / f"bars-{os.fstat(stream.fileno()).st_rdev}"
        self._rest = ""  # of a line that has no end yet, while there are bars

    def write(self, text: str) -> int:
        """Lines, above the bars. What has no line end waits for it while there are bars."""
        with self._locked() as file:
            drawn = _read(file)
            lines, self._rest = self._rest + text, ""
            if drawn is not None:
                lines, end, self._rest = lines.rpartition("\n")
                lines += end
                self._rest = self._rest if len(self._rest) < MOST_REST else self._rest.rpartition("\r")[2][-MOST_REST:]
            if drawn is None or lines:
                self._write_above(file, drawn, lines)
        return len(text)

    def draw(self, text: str, rows: int) -> None:
        """Text of this process that ends with so many rows of bars; 0: they stay as they stand, the cursor is below."""
        with self._locked() as file:
            self._stream.write(text)
            self._stream.flush()
            bars = "\n".join(text.split("\n")[-rows:]).rpartition(CLEAR)[2] if rows else ""
            _keep(file, json.dumps([os.getpid(), bars]) if rows else "")

    def leave(self) -> None:
        """Bars of a process that has ended without closing them stay as they stand; what follows is below them."""
        with self._locked() as file:
            drawn = _read(file)
            if drawn is not None and drawn[0] != os.getpid():
                self._stream.write(f"\n{SHOW_CURSOR}")
                self._stream.flush()
                _keep(file, "")

    def end_line(self) -> None:
        """This process ends: what waits for the end of its line is a line, too."""
        if self._rest:
            self.write("\n")

    def flush(self) -> None:
        if self._rest:
            self.write("")
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write_above(self, file: int | None, drawn: tuple[int, str] | None, lines: str) -> None:
        if drawn is None:
            self._stream.write(lines)
            return
        drawer, bars = drawn
        has_ended = not _is_alive(drawer)
        clear = "\r" + CLEAR + (UP + CLEAR) * bars.count("\n")
        self._stream.write(clear + lines + (SHOW_CURSOR if has_ended else bars))
        self._stream.flush()
        if has_ended:
            _keep(file, "")

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """The file that says what bars there are, while no other process writes; None where the run has ended."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield None
            return
        try:
            end = time.monotonic() + LOCKED_S
            while time.monotonic() < end:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.002)
            yield file
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing it does not, where a process was forked meanwhile
            os.close(file)


def share(stream: Any, folder: Path) -> Any:
    """The stream as one that several processes of a run write to; itself where it is no terminal."""
    with suppress(OSError, ValueError, AttributeError):  # one without a file: a notebook's, or a test's
        if stream.isatty() and not isinstance(stream, SharedTerminal):
            return SharedTerminal(stream, folder)
    return stream


def _read(file: int | None) -> tuple[int, str] | None:
    """The process that draws, and its bars as they stand; None where there are none."""
    if file is None:
        return None
    with suppress(OSError, ValueError, TypeError):
        drawer, bars = json.loads(os.pread(file, 1 << 20, 0) or "null")
        return int(drawer), str(bars)
    return None


def _keep(file: int | None, text: str) -> None:
    if file is not None:
        with suppress(OSError):  # a full disk
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode(), 0)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Terminal:
    """A text stream for rich's Console. Without `stream` it is what sys.stderr is at each moment."""

    def __init__(self, stream: Any = None, rows: Callable[[], int | None] = lambda: None) -> None:
        """`rows`: of the bars that the text ends with, None where this process draws none."""
        self._own, self._rows = stream, rows
        self.folder: Path | None = None  # of the run, where other processes write to this terminal, too

    @property
    def rich_proxied_file(self) -> "Terminal":
        """While bars are drawn rich puts a stream of its own in the place of sys.stderr, and asks for this one here."""
        return self

    @property
    def _stream(self) -> Any:
        stream = sys.stderr if self._own is None else self._own
        stream = getattr(stream, "rich_proxied_file", stream)
        return stream if self.folder is None else share(stream, self.folder)

    def write(self, text: str) -> int:
        with suppress(OSError):
            stream, rows = self._stream, self._rows()
            if rows is not None and isinstance(stream, SharedTerminal):
                stream.draw(text, rows)
            else:
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def leave_bars(self) -> None:
        """The processes of the run have ended, and maybe not as they should: what follows is below their bars."""
        with suppress(OSError):
            if isinstance(stream := self._stream, SharedTerminal):
                stream.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
