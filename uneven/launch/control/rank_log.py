"""What the processes of a run print, kept in files beside what the terminal shows: rank-N.log and launcher.log.

In a rank process `begin_log` puts a Tee in the place of sys.stdout and sys.stderr. What is printed still goes where it
went, a terminal stays a terminal, and every line is added to the file with its time. The file is in the private folder
of the run until training begins, and then in OUT/logs, where the run has `out`. Bars are not kept, and neither is what
other programs or libraries in C write. launch/control/read_logs.py reads the files. Nothing here ever raises: a run
must not fail because a log cannot be written. No torch in this file.
"""

import os
import re
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from weakref import WeakSet

from uneven.files import is_closed
from uneven.results.terminal import SharedTerminal, share

FOLDER = "logs"  # below `out`, and below the private folder of a run
LAUNCHER = "launcher.log"
SWITCH = "UNEVEN_LOGS"  # 0 in the environment: no logs in the folders of runs
MOST_BYTES = 10 << 20  # of one file; the one before is kept as NAME.1
MOST_LINES = 10_000  # kept in memory while there is no folder yet
MOST_REST = 1 << 16  # of a line that does not end
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def rank_file(rank: int) -> str:
    return f"rank-{rank}.log"


class LogFile:
    """Lines with their times, added to a file of bounded size. Any thread may write."""

    def __init__(self, path: Path | None = None, most_bytes: int = MOST_BYTES) -> None:
        """Without a path lines are kept until `move` names a folder."""
        self._path, self._most_bytes = path, most_bytes
        self._waiting: list[str] = []  # the lines with which the next file begins
        self._is_kept = False  # it is in the folder of a run
        self._begins = False  # another run begins, whose folder is not known yet
        self._lock = threading.Lock()
        _files.add(self)

    @property
    def path(self) -> Path | None:
        return self._path

    def write(self, lines: Iterable[str]) -> None:
        stamp = datetime.now().isoformat(timespec="milliseconds")
        new = [f"{stamp} {_CONTROL.sub('', one)}\n" for line in lines for one in str(line).splitlines() or [""]]
        with self._lock, suppress(OSError):
            if self._path is None or self._begins:
                self._waiting = [*self._waiting, *new][-MOST_LINES:]
            if self._path is not None:
                self._add("".join(new).encode(errors="replace"))

    def begin_run(self) -> None:
        """Another run of this process begins: what is printed from here on is its own, too."""
        with self._lock:
            self._begins = self._is_kept
            self._waiting = [] if self._is_kept else self._waiting

    def move(self, path: Path) -> None:
        """Go on in another file, with what was written so far. A file in the folder of an earlier run stays there."""
        with self._lock, suppress(OSError):
            before, self._path = self._path, path
            waiting, self._waiting = self._waiting, []
            was_kept, self._is_kept = self._is_kept, True
            self._begins = False
            if before == path and path.exists():
                return
            if before is None or was_kept:
                self._add("".join(waiting).encode(errors="replace"))
            else:
                for old, new in ((_older(before), _older(path)), (before, path)):
                    if old.exists():
                        path.parent.mkdir(mode=0o700, exist_ok=True)
                        with _open(new) as file:
                            file.write(old.read_bytes())
                        old.unlink()

    def _add(self, data: bytes) -> None:
        assert self._path is not None, "the caller has looked"
        if not data:
            return
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        size = self._path.stat().st_size if self._path.exists() else 0
        if size and size + len(data) > self._most_bytes:
            self._path.replace(_older(self._path))
        with _open(self._path) as file:
            file.write(data)


_files: "WeakSet[LogFile]" = WeakSet()


def _renew_locks() -> None:
    """In a fork of this process: another thread may have held one just then."""
    for file in tuple(_files):
        file._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _open(path: Path) -> BinaryIO:
    """For this user alone: nobody knows what a script prints."""
    return open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


class Tee:
    """In the place of sys.stdout or sys.stderr: all of it goes to `terminal`, the lines to a log as well."""

    def __init__(self, terminal: TextIO, log: LogFile) -> None:
        self.terminal, self.log = terminal, log
        self._rest = ""  # of a line that is not complete

    def write(self, text: str) -> int:
        try:
            return self.terminal.write(text)
        finally:  # a terminal that is gone is no reason to lose the line here
            self._keep(text)

    def _keep(self, text: str) -> None:
        with suppress(Exception):
            *lines, rest = (self._rest + text).split("\n")
            if len(rest) > MOST_REST:
                lines, rest = [*lines, rest], ""
            self._rest = rest.rpartition("\r")[2] if len(rest) > 4096 else rest
            if lines:
                # A bar that is drawn over itself is kept as it stood last.
                self.log.write(line.rstrip("\r").rpartition("\r")[2] for line in lines)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.terminal.flush()

    def end_line(self) -> None:
        """The process ends: what has no line end yet is a line, too."""
        rest, self._rest = self._rest, ""
        if isinstance(self.terminal, SharedTerminal):
            self.terminal.end_line()
        if rest:
            self.log.write([rest.rpartition("\r")[2]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def begin_log(path: Path | None, folder: Path | None = None) -> LogFile:
    """In a process of ours, before anything of the user's runs: keep what it prints.

    `folder`: of the run, where other processes of it write to the same terminal."""
    log = LogFile(path)
    if folder is not None:
        sys.stdout, sys.stderr = share(sys.stdout, folder), share(sys.stderr, folder)
    sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
    return log


def own_log() -> LogFile | None:
    """The log of this process, where it keeps one."""
    return sys.stderr.log if isinstance(sys.stderr, Tee) else None


def keep_logs_in(folder: Path, name: str) -> None:
    """Training begins: from now on the log of this process, if it has one, is in this folder of a run."""
    if os.environ.get(SWITCH) != "0" and (log := own_log()) is not None and folder.is_dir() and not is_closed(folder):
        log.move(folder / FOLDER / name)


def begin_run_log() -> None:
    """A run begins in this process, which may have had others: their logs stay with them."""
    if (log := own_log()) is not None:
        log.begin_run()


def end_log(*lines: str) -> None:
    """The process ends: complete its log, with these lines that are printed elsewhere."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Tee):
            stream.end_line()
    if lines and (log := own_log()) is not None:
        log.write(lines)
