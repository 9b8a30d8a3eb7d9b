"""`uneven data`: list the data sets and download them.

Results go to stdout, progress to stderr: messages, a bar on a terminal, nothing with --json.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.cli import complete
from uneven.cli.output import Json, print_json

if TYPE_CHECKING:
    from uneven.data.datasets import Event, Presence, Progress

SETS = ("mnist-mini", "mnist", "cifar10", "shakespeare")
app = typer.Typer(
    no_args_is_help=True,
    help="List the data sets and download them.",
    epilog="Sets are stored in $UNEVEN_DATA, by default ~/.cache/uneven. Example: uneven data list",
)


@dataclass(frozen=True)
class DataSet:
    """One data set."""

    name: str
    title: str
    bytes: int
    here: bool
    where: str | list[str]  # its files, or that it is in the package
    licence: str


@dataclass(frozen=True)
class Listed:
    """What list --json prints."""

    folder: str
    sets: list[DataSet]


@dataclass(frozen=True)
class Fetched:
    """What get --json prints."""

    name: str
    bytes: int
    source: str | None  # null if nothing was downloaded
    where: str | list[str]
    seconds: float


@app.command("list", epilog="Example: uneven data list --json")
def list_sets(as_json: Json = False) -> None:
    """Show every set: title, size, licence, and where its files are on this machine."""
    from uneven.data import datasets

    sets = datasets.presence()
    if as_json:
        rows = [
            DataSet(item.name, item.title, item.num_bytes, item.is_here, _places(item), item.licence) for item in sets
        ]
        print_json(Listed(str(datasets.data_folder()), rows))
        return
    for item in sets:
        size = f"{item.num_bytes / 1e6:.1f} MB" if item.num_bytes else "-"
        typer.echo(f"{item.name:<18} {size:>9}  {_where(item)}")
        typer.echo(f"{'':<30}{item.title}; licence: {item.licence}")
    typer.echo(f"\nfolder: {datasets.data_folder()} (choose another: UNEVEN_DATA=/some/folder)")


def _places(item: "Presence") -> str | list[str]:
    return "in the package" if item.is_embedded else [str(path) for path in item.places]


def _where(item: "Presence") -> str:
    if item.is_embedded:
        return "present, in the package"
    if not item.places:
        return f"not on this machine; get it with: uneven data get {item.name}"
    folders = dict.fromkeys(str(path.parent) for path in item.places)
    return "present, in " + ", ".join(str(item.places[0]) if len(item.places) == 1 else folder for folder in folders)


@app.command(
    "get",
    epilog="Examples:\n\nuneven data get mnist-mini\n\nUNEVEN_DATA=/big/disk uneven data get cifar10",
)
def get_set(
    name: Annotated[
        str,
        typer.Argument(help="mnist-mini, mnist, cifar10 or shakespeare.", autocompletion=complete.one_of(SETS)),
    ],
    force: Annotated[bool, typer.Option("--force", help="Download it again, even if it is present.")] = False,
    as_json: Json = False,
) -> None:
    """Download a set from its official mirrors; every file is verified by checksum."""
    from uneven.data import datasets

    start = time.monotonic()
    with _progress_display(as_json) as progress:
        fetched = datasets.get(name, force=force, progress=progress)
    item = next(item for item in datasets.presence() if item.name == name)
    seconds = time.monotonic() - start
    if as_json:
        print_json(Fetched(name, item.num_bytes, fetched.source or None, _places(item), round(seconds, 2)))
    elif fetched.source:
        typer.echo(f"{name}: {_where(item)} (from {fetched.source}, {seconds:.1f} s)")
    else:
        typer.echo(f"{name}: {_where(item)} (nothing to download)")


@contextmanager
def _progress_display(is_quiet: bool) -> Iterator["Progress | None"]:
    """The callback for download progress, None if quiet: messages on stderr, and on a terminal a bar below them."""
    if is_quiet:
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    with bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        tasks: dict[str, bars.TaskID] = {}

        def show(event: "Event") -> None:
            if event.done is None:
                progress.console.print(event.text, markup=False, highlight=False, soft_wrap=True)
                for task in tasks.values():
                    progress.remove_task(task)  # of a download that is finished
                tasks.clear()
                return
            if event.text not in tasks:
                tasks[event.text] = progress.add_task(event.text, total=event.total)
            progress.update(tasks[event.text], completed=event.done, total=event.total)

        yield show
