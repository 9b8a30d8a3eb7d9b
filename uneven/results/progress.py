"""What a person sees while a run trains: live bars on a terminal, one line per epoch elsewhere.

All of it is drawn from one record: the status of each rank, as it travels in the heartbeats (launch/run_status.py). A
launcher hands on what it hears (`ranks`); a process that trains, what it knows itself (`draw`). On several devices the
first bar is the run as a whole, from 0 to 100 %. Below it each device has a section of that bar, as long as the samples
it has trained, with its share, its speed and, where params are averaged, its round. Devices of several machines stand
below the name of theirs, which has the section of them all. It goes to stderr: a script's own output stays clean.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table

from uneven.config import results_of
from uneven.format import format_clock
from uneven.results.terminal import Terminal

Status = Mapping[str, Any]
_COLOURS = ("cyan", "magenta", "yellow", "blue")
_NAMED_PHASES = ("compile", "evaluation", "checkpoint", "user")  # shown in place of the loss: no bar moves in them
MOST_SAID = 200
REFRESHES_PER_S = 4  # drawing three bars takes 3 ms of a slow core, which may be one that trains
WIDEST = 40  # of a bar, in characters

_prints_bars_only: ContextVar[bool] = ContextVar("uneven_bars_only", default=False)


@contextmanager
def bars_only() -> Iterator[None]:
    """Reporters made inside show bars and print no lines: for a program of many runs that prints its own."""
    token = _prints_bars_only.set(True)
    try:
        yield
    finally:
        _prints_bars_only.reset(token)


class Reporter:
    """`style`: bar, lines, off, or auto (bars on a terminal, else lines). `close()` leaves the bars as they stand."""

    def __init__(self, style: str, title: str = "train") -> None:
        if style == "auto":
            style = "bar" if sys.stderr.isatty() else "lines"
        self.style = style
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._prints_bars_only = _prints_bars_only.get()
        self._title = title
        self._log: Callable[[Sequence[str]], None] | None = None  # keeps the lines, too
        self._said: list[str] = []  # before there was one
        self._live: Live | None = None
        self._terminal = Terminal(rows=self._rows)
        stream: Any = sys.stderr
        if style == "bar" and hasattr(stream, "terminal"):
            # What this process prints is kept in a log (launch/control/rank_log.py), which is no place for bars.
            self._terminal, self._log = Terminal(stream.terminal, self._rows), stream.log.write
        self._console = Console(file=cast(TextIO, self._terminal), highlight=False)
        self._is_closed = False
        self._has_begun = False  # all ranks train, and time counts from there
        self._began_s = time.monotonic()
        self._num_rows = 0  # of the picture that was drawn last
        self._statuses: Sequence[Status] = ()  # of all ranks, as they are drawn
        self._first = 0  # of the ranks that were there at the start, the one that is rank 0
        self._epochs = 0
        self._last_entry: Mapping[str, Any] = {}  # of the history
        self._heard_epochs = 0  # of the history in rank 0's heartbeats
        self._heard_notes = 0

    def say(self, lines: Sequence[str], logged: Sequence[str] | None = None) -> None:
        """Print lines; a log has `logged` in their place, where they hold a secret."""
        kept = lines if logged is None else logged
        if self._log is not None:
            self._log(kept)
        else:
            self._said = [*self._said, *kept][-MOST_SAID:]
        if self.style == "off" or self._prints_bars_only or not lines:
            return
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)

    def keep_in(self, log: Callable[[Sequence[str]], None]) -> None:
        """Hand all lines to a log, those that were said already included."""
        log(self._said)
        self._log, self._said = log, []

    def share_terminal(self, folder: Path) -> None:
        """Ranks write to this terminal, too, or draw its bars: all of them know this folder."""
        self._terminal.folder = folder

    def leave_bars(self) -> None:
        """No process of the run is left: what follows is below the bars of one that was ended while it drew them."""
        self._terminal.leave_bars()

    def ranks(self, statuses: Sequence[dict[str, Any]], first: int = 0) -> None:
        """The last heartbeat of each rank, in the order of the start; {} for a rank that has not sent one yet.

        `first` of them is rank 0 now: its lines and its history are shown.
        """
        lead = statuses[first]
        notes, history = lead.get("notes", []), lead.get("history", [])
        # What a rank said before it became the first is known from the one that was, or does not matter.
        self.say(notes[self._heard_notes :] if first == self._first else [])
        self._heard_notes, self._first = len(notes), first
        self._epochs = lead.get("epochs", self._epochs)
        for entry in history[self._heard_epochs :]:
            self._heard_epochs += 1
            self.epoch_done(entry)
        self.draw(statuses, first)

    def draw(self, statuses: Sequence[Status], first: int = 0) -> None:
        """What the bars show from now on. Any thread may call it, and it costs next to nothing: others draw."""
        self._epochs = statuses[first].get("epochs", self._epochs)
        if self.style != "bar" or self._is_closed:
            return
        if not self._has_begun and all("own" in status for status in statuses):
            self._has_begun, self._began_s = True, time.monotonic()  # the time until now was the start's
        self._statuses, self._first = statuses, first
        if self._live is None:
            self._live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=REFRESHES_PER_S)
            self._live.start(refresh=True)
            _keep_prints()

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """From now on it is called with the entry of every epoch and evaluation."""
        self._listeners.append(listener)

    def epoch_done(self, entry: dict[str, Any]) -> None:
        self._last_entry = entry
        for listener in self._listeners:
            listener(entry)
        line = epoch_line(entry, self._epochs)
        self.say([] if line is None else [line])

    def close(self) -> None:
        self._is_closed = True
        if self._live is not None:
            self._live.stop()
            if not self._console.is_interactive:
                self._console.print()
            self._live = None

    def _rows(self) -> int | None:
        """How many rows of bars this process draws; None where it draws none."""
        if self._live is None or not self._console.is_interactive:
            return None
        return min(self._num_rows, self._console.size.height) if self._live.is_started else 0

    def _picture(self) -> Table:
        spent_s = time.monotonic() - self._began_s
        table = bars(self._title, self._statuses, self._first, self._last_entry, spent_s)
        self._num_rows = table.row_count
        return table


def bars(title: str, statuses: Sequence[Status], first: int, last: Status, spent_s: float) -> Table:
    """The bars of a run. `last` is the newest entry of its history; `first` of the statuses is rank 0's."""
    table = Table.grid(padding=(0, 1))
    for name in ("name", "bar", "share", "speed", "rest"):  # on a narrow terminal the bars shrink, not the text
        table.add_column(name, justify="right" if name in ("share", "speed") else "left", no_wrap=name != "bar")
    if not statuses or not all("own" in status for status in statuses):
        table.add_row(title, _Bar(ProgressBar(total=None, pulse=True)), "", "", f"starting  {format_clock(spent_s)}")
        return table
    lead = statuses[first]
    total, steps = lead["total"], lead.get("steps")
    own = sum(status["own"] for status in statuses)
    # Heartbeats are a little old, and the last steps of a run are in none: it is over with its last epoch.
    done = max(own, last.get("samples", 0), *(status.get("samples", 0) for status in statuses))
    is_over = last.get("samples") == total or last.get("step", -1) == steps
    done = done if total is None else total if is_over else min(done, total)
    seconds = max(status["seconds"] for status in statuses)
    speed = _speed(own, seconds)
    words = ["samples/s"] if speed else []
    if lead.get("has_max_steps") and total:
        words.append(f"step {int(done / total * steps):,}/{steps:,}")
    words += [_loss_or_phase(statuses), format_clock(spent_s)]
    if total is not None and done < total:
        words.append(f"ETA {format_clock((total - done) * seconds / own if own and seconds else None)}")
    percent = "" if total is None else f"{int(100 * done / max(1, total))} %"  # 100 % means that the run is over
    table.add_row(
        title, _Bar(ProgressBar(total=total, completed=done, pulse=total is None)), percent, speed, "  ".join(words)
    )
    if len(statuses) > 1:
        _add_ranks(table, statuses, own, 1.0 if total is None else done / max(1, total))
    return table


def _add_ranks(table: Table, statuses: Sequence[Status], trained: int, filled: float) -> None:
    """A row per rank, those of a machine below its name; together their sections fill this part of the bar."""
    places = [int(status.get("machine", 0)) for status in statuses]
    begin = 0.0
    for place in sorted(set(places)):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        devices = [statuses[rank].get("device", "rank") for rank in ranks]
        indent = "  "
        if len(set(places)) > 1:
            own = sum(statuses[rank]["own"] for rank in ranks)
            seconds = max(statuses[rank]["seconds"] for rank in ranks)
            host = statuses[ranks[0]].get("host", f"machine {place}")
            share = own / max(1, trained)
            section = _Section(begin, begin + share * filled, "default")
            table.add_row(f"  {host}", section, f"share {100 * share:.0f} %", _speed(own, seconds), "")
            indent = "    "
        for rank, device in zip(ranks, devices, strict=True):
            status = statuses[rank]
            share = status["own"] / max(1, trained)
            name = device if devices.count(device) == 1 else f"{device} #{rank}"
            section = _Section(begin, begin + share * filled, _COLOURS[rank % len(_COLOURS)])
            speed = _speed(status["own"], status["seconds"])
            rounds = describe_rounds(status.get("rounds", {}))
            table.add_row(indent + name, section, f"share {100 * share:.0f} %", speed, rounds)
            begin += share * filled


class _Bar:
    """rich's own bar, as wide as there is room, up to a limit."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        del console
        return Measurement(4, min(WIDEST, max(4, options.max_width)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        self._bar.width = min(WIDEST, options.max_width)
        yield self._bar


class _Section:
    """A part of a bar: from where to where it is filled, as fractions of 1."""

    __rich_measure__ = _Bar.__rich_measure__

    def __init__(self, begin: float, end: float, colour: str) -> None:
        self._begin, self._end = begin, end
        self._colour = colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        begin, end = (round(place * min(WIDEST, options.max_width)) for place in (self._begin, self._end))
        line = "-" if options.ascii_only or options.legacy_windows else "\u2501"
        yield Segment(" " * begin)
        yield Segment(line * (end - begin), console.get_style(self._colour))


def _loss_or_phase(statuses: Sequence[Status]) -> str:
    """The loss, or the phase where no rank trains. A loss that is NaN is shown as it is."""
    phases = {status.get("phase") for status in statuses}
    if len(phases) == 1 and phases <= set(_NAMED_PHASES):
        return str(phases.pop())
    known = [status for status in statuses if status["loss"] is not None and status["own"]]
    if not known:
        return "loss -"
    weighted = sum(status["loss"] * status["own"] for status in known)
    return f"loss {weighted / sum(status['own'] for status in known):.4f}"


def epoch_line(entry: Mapping[str, Any], epochs: int) -> str | None:
    """A finished epoch as one line; None for an entry whose figures the last entry of its span repeats.

    Where a window of a local policy holds several epochs, loss and speed are known only over all of them together:
    such entries name the span in "epochs", and its last one is printed for all. An evaluation ends a window, so only
    the last entry of a span can have metrics of its own.
    """
    first, last = entry.get("epochs", (entry["epoch"], entry["epoch"]))
    if entry["epoch"] < last:
        return None
    name = f"epoch {last}/{epochs}" if first == last else f"epochs {first}-{last} of {epochs}"
    if entry.get("is_inside_epoch"):
        name = f"{name}, step {entry['step']:,}"
    metrics = {metric: _figure(value) for metric, value in results_of(entry).items()}
    if first < last:
        metrics["train_loss"] += " (over both)" if last == first + 1 else f" (over all {last - first + 1})"
    metrics |= {name: f"{entry[name]:,} samples" for name in ("skipped", "dropped") if name in entry}
    figures = "  ".join(f"{metric} {figure}" for metric, figure in metrics.items())
    return f"{name}  {figures}  {entry['samples_per_s']:,.0f} samples/s  {entry['train_seconds']:.1f} s"


def describe_rounds(rounds: Mapping[str, float]) -> str:
    """A rank's round and window under a local policy; empty for the exact policies, which have none."""
    if not rounds:
        return ""
    place = f"round {rounds['round']:.0f} anchor {rounds['anchor']:.0f}"
    return f"{place} staleness {rounds['staleness']:.0f} delay {rounds['delay']:.1f}"


def _speed(samples: int, seconds: float) -> str:
    return f"{samples / seconds:,.0f}" if seconds else ""


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3g}"


def _keep_prints() -> None:
    """While bars are drawn rich prints what is printed above them, past the log of this process: add it there again."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        kept: Any = getattr(stream, "rich_proxied_file", None)
        if hasattr(kept, "log"):
            setattr(sys, name, type(kept)(stream, kept.log))  # rich puts back the one that was there before it
