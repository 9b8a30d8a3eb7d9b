"""What a person sees while a run trains: live bars on a terminal, one line per epoch elsewhere.

On several devices the first bar is the run as a whole, from 0 to 100 %. Below it each device has a piece of that bar,
as long as the samples it has trained, with its share, its speed and, where params are averaged, where it is among the
rounds. All of it goes to stderr, so that a script's own output stays clean.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from uneven.policy.axis import Axis

_TIMES = ("epoch", "samples", "lr", "train_seconds", "samples_per_s")
_COLOURS = ("cyan", "magenta", "yellow", "blue")
_APART = ("compile", "evaluation", "checkpoint")  # phases in which no bar moves
REFRESHES_PER_S = 4  # drawing three bars takes 3 ms of a slow core, which may be one that trains

_is_wordless: ContextVar[bool] = ContextVar("uneven_wordless", default=False)


@contextmanager
def bars_only() -> Iterator[None]:
    """Reporters made inside show bars and say nothing: for a program of many runs that has words of its own."""
    token = _is_wordless.set(True)
    try:
        yield
    finally:
        _is_wordless.reset(token)


class Reporter:
    """`style`: bar, lines, off, or auto (bars on a terminal, else lines); `close()` leaves the bars as they stand."""

    def __init__(self, style: str, title: str = "train") -> None:
        if style == "auto":
            style = "bar" if sys.stderr.isatty() else "lines"
        self.style = style
        self._is_wordless = _is_wordless.get()
        self._title = title
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._epochs = 0
        self._told = 0
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # told of every finished epoch
        self._noted = 0
        self._loss = "-"
        self._last = (0, 0.0)  # samples and training seconds when the speed was last taken

    def say(self, lines: Sequence[str]) -> None:
        if self.style != "off" and not self._is_wordless:
            for line in lines:
                self._console.print(line, markup=False, soft_wrap=True)

    def started(self, axis: Axis, place: str) -> None:
        del place
        self._epochs = axis.epochs
        if self.style == "bar":
            self._open(axis.samples * axis.epochs, [self._title])

    def ranks(self, posts: Sequence[dict[str, Any]]) -> None:
        """What the ranks of a run last said of themselves; a rank not heard of yet said nothing."""
        notes = posts[0].get("notes", [])
        self.say(notes[self._noted :])
        self._noted = len(notes)
        for entry in posts[0].get("history", [])[self._told :]:
            self._told += 1
            self._epochs = posts[0]["epochs"]
            self.epoch_done(entry)
        if self.style != "bar":
            return
        if self._bar is None:
            self._open(None, [self._title])
        if all("own" in post for post in posts):
            self._draw_ranks(posts)

    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float) -> None:
        del own_samples
        if self._bar is None:
            return
        before, then_s = self._last
        if training_s - then_s >= 0.5:
            speed = (samples - before) / (training_s - then_s)
            self._last = (samples, training_s)
            self._bar.update(self._tasks[0], completed=samples, speed=f"{speed:,.0f}", loss=f"loss {loss:.4f}")
        else:
            self._bar.update(self._tasks[0], completed=samples)

    def epoch_done(self, entry: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener(entry)
        if self._bar is not None and len(self._tasks) == 1:
            self._bar.update(self._tasks[0], completed=entry["samples"])
        metrics = "  ".join(f"{name} {_figure(value)}" for name, value in entry.items() if name not in _TIMES)
        self.say(
            [
                f"epoch {entry['epoch']}/{self._epochs}  {metrics}  "
                f"{entry['samples_per_s']:,.0f} samples/s  {entry['train_seconds']:.1f} s"
            ]
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open(self, total: int | None, titles: Sequence[str]) -> None:
        """Without a total the run has not begun, and the bar only shows that something is going on."""
        self._bar = Progress(
            _Words(lambda task: task.description),
            _Lane(),
            _Words(_portion, is_right=True),
            _Words(lambda task: str(task.fields["speed"]), is_right=True),
            _Words(_rest),
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
        )
        self._tasks = [self._bar.add_task(title, total=total, speed="", loss="") for title in titles]
        self._bar.start()

    def _draw_ranks(self, posts: Sequence[dict[str, Any]]) -> None:
        assert self._bar is not None, "opened by the caller"
        total, everybody = posts[0]["total"], sum(post["own"] for post in posts)
        if len(self._tasks) == 1:
            self._bar.reset(self._tasks[0], total=total)  # the time until now was the start's
            names = _names([post.get("device", "rank") for post in posts])
            self._tasks += [self._bar.add_task(f"  {name}", total=total, speed="", part=(0.0, 0.0)) for name in names]
        # Posts are a little old, and the last steps of a run are in none: only its last epoch says that it is over.
        is_over = len(posts[0].get("history", [])) == posts[0]["epochs"]
        done = total if is_over else min(everybody, total)
        seconds = max(post["seconds"] for post in posts)
        self._bar.update(self._tasks[0], completed=done, speed=_speed(everybody, seconds), loss=self._state_of(posts))
        begin = 0.0
        for place, (task, post) in enumerate(zip(self._tasks[1:], posts, strict=True)):
            share = post["own"] / max(1, everybody)
            end = begin + share * done / total
            self._bar.update(
                task,
                part=(begin, end),
                colour=_COLOURS[place % len(_COLOURS)],
                share=share,
                speed=_speed(post["own"], post["seconds"]),
                rest=describe_rounds(post.get("rounds", {})),
            )
            begin = end

    def _state_of(self, posts: Sequence[dict[str, Any]]) -> str:
        """The loss, or what all ranks do instead of training. A rank that has just met the others has no loss yet."""
        phases = {post.get("phase") for post in posts}
        if len(phases) == 1 and phases <= set(_APART):
            return str(phases.pop())
        known = [post for post in posts if math.isfinite(post["loss"]) and post["own"]]
        if known:
            weighted = sum(post["loss"] * post["own"] for post in known)
            self._loss = f"{weighted / sum(post['own'] for post in known):.4f}"
        return f"loss {self._loss}"


def describe_rounds(rounds: Mapping[str, float]) -> str:
    """Where a rank is among the rounds of a local policy, in one glance; empty for the exact ones."""
    if not rounds:
        return ""
    place = f"round {rounds['round']:.0f} anchor {rounds['anchor']:.0f}"
    return f"{place} staleness {rounds['staleness']:.0f} delay {rounds['delay']:.1f}"


class _Words(ProgressColumn):
    """A column of plain text, made anew at every refresh."""

    def __init__(self, words: Callable[[Task], str], is_right: bool = False) -> None:
        super().__init__(Column(no_wrap=True))  # where room is short, the bars give way
        self._words = words
        self._is_right = is_right

    def render(self, task: Task) -> Text:
        return Text(self._words(task), justify="right" if self._is_right else "left")


class _Lane(ProgressColumn):
    """The bars: that of the run as rich draws it, and of each device its piece."""

    def render(self, task: Task) -> "_Piece":
        part = task.fields.get("part")
        whole = ProgressBar(total=task.total, completed=task.completed, pulse=task.total is None)
        return _Piece(whole, part, task.fields.get("colour", _COLOURS[0]))


class _Piece:
    """A bar as wide as there is room, up to a limit. `part`: from where to where it is filled, as parts of 1."""

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


def _portion(task: Task) -> str:
    if "part" in task.fields:
        return f"share {100 * task.fields.get('share', 0.0):.0f} %"
    # Rounded down: 100 % is said of nothing that is not over.
    return f"{int(task.percentage)} %" if task.total is not None else ""


def _rest(task: Task) -> str:
    if "part" in task.fields:
        return str(task.fields.get("rest", ""))
    spent = _clock(task.finished_time if task.finished else task.elapsed)
    if task.total is None:
        return f"starting  {spent}"
    words = ["samples/s"] * (task.fields["speed"] not in ("", "-")) + [task.fields["loss"], spent]
    return "  ".join([word for word in words if word] + [f"ETA {_clock(task.time_remaining)}"] * (not task.finished))


def _names(devices: Sequence[str]) -> list[str]:
    """The devices by name; those that have it in common, with their rank."""
    return [name if devices.count(name) == 1 else f"{name} #{rank}" for rank, name in enumerate(devices)]


def _speed(samples: int, seconds: float) -> str:
    return f"{samples / seconds:,.0f}" if seconds else ""


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3g}"
