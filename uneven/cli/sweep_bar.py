"""What `uneven bench sweep` shows while it runs."""

import sys


class SweepBar:
    """The sweep's progress with the time left, on a terminal as a bar, elsewhere a line per run."""

    def __init__(self, is_quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False, quiet=is_quiet)
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=None, left="")

    def __enter__(self) -> "SweepBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print_line(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def show_run(self, name: str, number: int, many: int, seconds: float) -> None:
        """Called before each run."""
        left = f"about {seconds / number * (many - number) / 60:.0f} min left" if number else ""
        if self._console.is_terminal:
            self._progress.update(self._task, completed=number, total=many, description=name, left=left)
        else:
            self._console.print(f"{number + 1}/{many} {name} {left}".rstrip())
