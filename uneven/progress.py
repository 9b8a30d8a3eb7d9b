"""What a person sees while a run trains: a live bar on a terminal, one line per epoch elsewhere.

All of it goes to stderr, so that a script's own output stays clean.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from uneven.policy.axis import Axis

_TIMES = ("epoch", "samples", "lr", "train_seconds", "samples_per_s")


class Reporter:
    """`style`: bar, lines, off, or auto (a bar on a terminal, else lines); `close()` clears the bar."""

    def __init__(self, style: str, title: str = "train") -> None:
        if style == "auto":
            style = "bar" if sys.stderr.isatty() else "lines"
        self.style = style
        self._title = title
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._epochs = 0
        self._told = 0
        self.listeners: list[Callable[[dict[str, Any]], None]] = []  # told of every finished epoch
        self._noted = 0

    def say(self, lines: Sequence[str]) -> None:
        if self.style != "off":
            for line in lines:
                self._console.print(line, markup=False, soft_wrap=True)

    def started(self, axis: Axis, place: str) -> None:
        del place
        self._epochs = axis.epochs
        if self.style == "bar":
            self._open(axis.samples * axis.epochs, [self._title])

    def _open(self, total: int, titles: Sequence[str]) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.fields[speed]} samples/s"),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=5,
        )
        self._tasks = [self._bar.add_task(title, total=total, speed="-", loss="-") for title in titles]
        self._last = (0, 0.0)
        self._bar.start()

    def ranks(self, posts: Sequence[dict[str, Any]]) -> None:
        """What the ranks of a run last said of themselves."""
        notes = posts[0].get("notes", [])
        self.say(notes[self._noted :])
        self._noted = len(notes)
        for entry in posts[0].get("history", [])[self._told :]:
            self._told += 1
            self._epochs = posts[0]["epochs"]
            self.epoch_done(entry)
        if self.style != "bar" or not all("own" in post for post in posts):
            return
        if self._bar is None:
            self._open(posts[0]["total"], [f"rank {rank}" for rank in range(len(posts))])
        everybody = sum(post["own"] for post in posts)
        for task, post in zip(self._tasks, posts, strict=True):
            assert self._bar is not None
            speed = f"{post['own'] / post['seconds']:,.0f}" if post["seconds"] else "-"
            share = f"{100 * post['own'] / max(1, everybody):.0f} % of the samples"
            self._bar.update(task, completed=post["own"], speed=speed, loss=f"{post['loss']:.4f}  {share}")

    def stepped(self, samples: int, own_samples: int, training_s: float, loss: float) -> None:
        del own_samples
        if self._bar is None:
            return
        before, then_s = self._last
        if training_s - then_s >= 0.5:
            speed = (samples - before) / (training_s - then_s)
            self._last = (samples, training_s)
            self._bar.update(self._tasks[0], completed=samples, speed=f"{speed:,.0f}", loss=f"{loss:.4f}")
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


def _figure(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.3g}"
