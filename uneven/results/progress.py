"""What a person sees while a run trains: live bars on a terminal or in a notebook, one line per epoch elsewhere.

A Reporter gets its figures in one of two ways: a process that trains calls it directly (it is a Report, see
train/rank_info.py), and the launcher hands it the heartbeats of its ranks. On several devices the first bar is the run
as a whole, from 0 to 100 %. Below it each device has a section of that bar, as long as the samples it has trained,
with its share, its speed and, where params are averaged, its round. Devices of several machines stand below the name
of theirs, which has the section of them all. All of it goes to stderr: a script's own output stays clean.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from uneven.config import results_of
from uneven.format import format_clock
from uneven.policy.axis import Axis
from uneven.results.notebook import Block, in_notebook
from uneven.results.terminal import Terminal

_COLOURS = ("cyan", "magenta", "yellow", "blue")
_NAMED_PHASES = ("compile", "evaluation", "checkpoint", "user")  # shown in place of the loss: no bar moves in them
MOST_SAID = 200
REFRESHES_PER_S = 4  # drawing three bars takes 3 ms of a slow core, which may be one that trains

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
    """`style`: bar, lines, off, or auto (bars on a terminal and in a notebook, else lines).

    `close()` leaves the bars as they stand. In a notebook lines and bars are one block that is updated in place.
    """

    def __init__(self, style: str, title: str = "train") -> None:
        is_notebook = style in ("auto", "bar") and in_notebook()
        if style == "auto":
            style = "bar" if is_notebook or sys.stderr.isatty() else "lines"
        self._block = Block() if is_notebook else None
        self.style = style
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # called with every finished epoch's entry
        self._prints_bars_only = _prints_bars_only.get()
        self._title = title
        self._log: Callable[[Sequence[str]], None] | None = None  # keeps the lines, too
        self._said: list[str] = []  # before there was one
        self._bar: Progress | None = None
        self._terminal = Terminal(rows=self._rows)
        stream: Any = sys.stderr
        if style == "bar" and hasattr(stream, "terminal"):
            # What this process prints is kept in a log (launch/control/rank_log.py), which is no place for bars.
            self._terminal, self._log = Terminal(stream.terminal, self._rows), stream.log.write
        self._console = Console(file=cast(TextIO, self._terminal), highlight=False)
        self._headings: dict[int, TaskID] = {}  # of machines, where there are several
        self._epochs = 0
        self._shown_epochs = 0  # of the history in rank 0's heartbeats
        self._shown_notes = 0
        self._first = 0  # of the ranks that were there at the start, the one that is rank 0
        self._places: dict[int, list[int]] = {}  # the ranks of each machine, as they were first drawn
        self._loss = "-"
        self._last = (0, 0.0)  # samples and training seconds when the speed was last computed

    def say(self, lines: Sequence[str], logged: Sequence[str] | None = None) -> None:
        """Print lines; a log has `logged` in their place, where they hold a secret."""
        kept = lines if logged is None else logged
        if self._log is not None:
            self._log(kept)
        else:
            self._said = [*self._said, *kept][-MOST_SAID:]
        if self.style == "off" or self._prints_bars_only or not lines:
            return
        if self._block is not None:
            self._block.say(lines)
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

    def started(self, axis: Axis, place: str) -> None:
        del place
        self._epochs = axis.epochs
        if self.style == "bar":
            self._open(axis.total_samples, [self._title])
            self._bar_steps(None if axis.max_slots is None else axis.total)

    def ranks(self, statuses: Sequence[dict[str, Any]], first: int = 0) -> None:
        """The last heartbeat of each rank, in the order of the start; {} for a rank that has not sent one yet.

        `first` of them is rank 0 now: its lines and its history are shown.
        """
        lead = statuses[first]
        notes = lead.get("notes", [])
        # What a rank said before it became the first is known from the one that was, or does not matter.
        self.say(notes[self._shown_notes :] if first == self._first else [])
        self._shown_notes, self._first = len(notes), first
        for entry in lead.get("history", [])[self._shown_epochs :]:
            self._shown_epochs += 1
            self._epochs = lead["epochs"]
            self.epoch_done(entry)
        if self.style != "bar":
            return
        if self._bar is None:
            self._open(None, [self._title])
        if all("own" in status for status in statuses):
            assert self._bar is not None, "opened above"
            self._draw_ranks(self._bar, statuses, first)
        if self._block is not None:
            self._block.update()

    def devices(self, statuses: Sequence[dict[str, Any]], first: int = 0) -> None:
        """For a rank that trains and is told of the others: their sections, as `ranks` draws them. On any thread."""
        bar = self._bar
        if bar is not None and all("own" in status for status in statuses):
            self._draw_ranks(bar, statuses, first)

    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float | None) -> None:
        del own_samples
        if self._bar is None or len(self._tasks) > 1:  # `devices` draws the bar of the run, too
            return
        before, then_s = self._last
        if training_s - then_s >= 0.5:
            speed = (samples - before) / (training_s - then_s)
            self._last = (samples, training_s)
            self._loss = self._loss if loss is None else f"{loss:.4f}"
            self._bar.update(self._tasks[0], completed=samples, speed=f"{speed:,.0f}", loss=f"loss {self._loss}")
        else:
            self._bar.update(self._tasks[0], completed=samples)
        if self._block is not None:
            self._block.update()

    def epoch_done(self, entry: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener(entry)
        if self._bar is not None and len(self._tasks) == 1:
            self._bar.update(self._tasks[0], completed=entry["samples"])
        line = epoch_line(entry, self._epochs)
        self.say([] if line is None else [line])

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._block is not None:
            self._block.close()

    def _rows(self) -> int | None:
        """How many rows of bars this process draws; None where it draws none."""
        if self._bar is None or self._block is not None or not self._console.is_interactive:
            return None
        return min(len(self._bar.tasks), self._console.size.height) if self._bar.live.is_started else 0

    def _open(self, total: int | None, titles: Sequence[str]) -> None:
        """Without a total the run has not begun, or trains on a stream without length: nothing to take a part of."""
        self._bar = Progress(
            _TextColumn(lambda task: task.description),
            _BarColumn(),
            _TextColumn(_percent_or_share, is_right=True),
            _TextColumn(lambda task: str(task.fields["speed"]), is_right=True),
            _TextColumn(_remaining_columns),
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            disable=self._block is not None,  # the block draws it
        )
        self._tasks = [self._bar.add_task(title, total=total, speed="", loss="") for title in titles]
        self._bar.start()
        _keep_prints()
        if self._block is not None:
            self._block.draw = self._bar.get_renderable
            self._block.update(at_once=True)

    def _bar_steps(self, steps: int | None) -> None:
        """Count steps in the run's bar, where the run has a number of them."""
        assert self._bar is not None, "opened by the caller"
        self._bar.update(self._tasks[0], steps=steps)

    def _draw_ranks(self, bar: Progress, statuses: Sequence[dict[str, Any]], first: int) -> None:
        lead = statuses[first]
        total, trained = lead["total"], sum(status["own"] for status in statuses)
        if len(self._tasks) == 1:
            bar.reset(self._tasks[0], total=total)  # the time until now was the start's
            bar.update(self._tasks[0], steps=lead["steps"] if lead.get("has_max_steps") else None)
            self._places = _machines(statuses)
            self._tasks += self._add_ranks(bar, statuses, self._places, total)
        # Heartbeats are a little old, and the last steps of a run are in none: it is over with its last epoch.
        last = lead.get("history", [{}])[-1]
        is_over = last.get("samples") == total or last.get("step", -1) == lead.get("steps")
        done = trained if total is None else total if is_over else min(trained, total)
        seconds = max(status["seconds"] for status in statuses)
        bar.update(self._tasks[0], completed=done, speed=_speed(trained, seconds), loss=self._loss_or_phase(statuses))
        begin = 0.0
        for machine, ranks in self._places.items():
            before = begin
            for rank in ranks:
                status = statuses[rank]
                share = status["own"] / max(1, trained)
                end = begin + (share if total is None else share * done / total)
                bar.update(
                    self._tasks[1 + rank],
                    part=(begin, end),
                    colour=_COLOURS[rank % len(_COLOURS)],
                    share=share,
                    speed=_speed(status["own"], status["seconds"]),
                    rest=describe_rounds(status.get("rounds", {})),
                )
                begin = end
            if (heading := self._headings.get(machine)) is not None:
                own = sum(statuses[rank]["own"] for rank in ranks)
                speed = _speed(own, max(statuses[rank]["seconds"] for rank in ranks))
                bar.update(heading, part=(before, begin), colour="default", share=own / max(1, trained), speed=speed)

    def _add_ranks(
        self,
        bar: Progress,
        statuses: Sequence[dict[str, Any]],
        machines: Mapping[int, Sequence[int]],
        total: int | None,
    ) -> list[TaskID]:
        """A bar per rank, those of a machine below its name; returned in rank order."""
        found: dict[int, TaskID] = {}
        for machine, ranks in machines.items():
            indent = "  "
            if len(machines) > 1:
                host = statuses[ranks[0]].get("host", f"machine {machine}")
                self._headings[machine] = bar.add_task(f"  {host}", total=total, speed="", part=(0.0, 0.0))
                indent = "    "
            names = _names([statuses[rank].get("device", "rank") for rank in ranks], ranks)
            for rank, name in zip(ranks, names, strict=True):
                found[rank] = bar.add_task(indent + name, total=total, speed="", part=(0.0, 0.0))
        return [found[rank] for rank in range(len(statuses))]

    def _loss_or_phase(self, statuses: Sequence[dict[str, Any]]) -> str:
        """The loss, or the phase where no rank trains. A rank that has just merged a round has no loss yet: None.

        A loss that is NaN is shown as it is."""
        phases = {status.get("phase") for status in statuses}
        if len(phases) == 1 and phases <= set(_NAMED_PHASES):
            return str(phases.pop())
        known = [status for status in statuses if status["loss"] is not None and status["own"]]
        if known:
            weighted = sum(status["loss"] * status["own"] for status in known)
            self._loss = f"{weighted / sum(status['own'] for status in known):.4f}"
        return f"loss {self._loss}"


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


def _keep_prints() -> None:
    """While bars are drawn rich prints what is printed above them, past the log of this process: add it there again."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        kept: Any = getattr(stream, "rich_proxied_file", None)
        if hasattr(kept, "log"):
            setattr(sys, name, type(kept)(stream, kept.log))  # rich puts back the one that was there before it


class _TextColumn(ProgressColumn):
    """A column of plain text, made anew at every refresh."""

    def __init__(self, text_of: Callable[[Task], str], is_right: bool = False) -> None:
        super().__init__(Column(no_wrap=True))  # on a narrow terminal the bars shrink, not the text
        self._text_of = text_of
        self._is_right = is_right

    def render(self, task: Task) -> Text:
        return Text(self._text_of(task), justify="right" if self._is_right else "left")


class _BarColumn(ProgressColumn):
    """The bars: rich's own for the run, and for each device its section of it."""

    def render(self, task: Task) -> "_BarSection":
        part = task.fields.get("part")
        whole = ProgressBar(total=task.total, completed=task.completed, pulse=task.total is None)
        return _BarSection(whole, part, task.fields.get("colour", _COLOURS[0]))


class _BarSection:
    """A bar as wide as there is room, up to a limit. `part`: from where to where it is filled, as fractions of 1."""

    WIDEST = 40

    def __init__(self, whole: ProgressBar, part: tuple[float, float] | None, colour: str) -> None:
        self._whole, self._part, self._colour = whole, part, colour

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        del console
        return Measurement(4, min(self.WIDEST, max(4, options.max_width)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.WIDEST, options.max_width)
        if self._part is None:
            self._whole.width = width
            yield self._whole
            return
        begin, end = (round(place * width) for place in self._part)
        line = "-" if options.ascii_only or options.legacy_windows else "\u2501"
        yield Segment(" " * begin)
        yield Segment(line * (end - begin), console.get_style(self._colour))


def _percent_or_share(task: Task) -> str:
    if "part" in task.fields:
        return f"share {100 * task.fields.get('share', 0.0):.0f} %"
    # Rounded down: 100 % means that the run is over.
    return f"{int(task.percentage)} %" if task.total is not None else ""


def _remaining_columns(task: Task) -> str:
    """After the speed: a device's round, or the run's loss and times."""
    if "part" in task.fields:
        return str(task.fields.get("rest", ""))
    spent = format_clock(task.finished_time if task.finished else task.elapsed)
    if task.total is None and not task.completed:
        return f"starting  {spent}"
    steps = task.fields.get("steps")
    place = "" if steps is None or not task.total else f"step {int(task.completed / task.total * steps):,}/{steps:,}"
    words = ["samples/s"] * (task.fields["speed"] not in ("", "-")) + [place, task.fields["loss"], spent]
    has_eta = task.total is not None and not task.finished
    return "  ".join([word for word in words if word] + [f"ETA {format_clock(task.time_remaining)}"] * has_eta)


def _machines(statuses: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """The ranks of each machine, in the order of their numbers."""
    places = [int(status.get("machine", 0)) for status in statuses]
    return {place: [rank for rank, other in enumerate(places) if other == place] for place in sorted(set(places))}


def _names(devices: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """The devices of a machine by name; those that share a name, with their rank."""
    return [name if devices.count(name) == 1 else f"{name} #{rank}" for rank, name in zip(ranks, devices, strict=True)]


def _speed(samples: int, seconds: float) -> str:
    return f"{samples / seconds:,.0f}" if seconds else ""


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3g}"
