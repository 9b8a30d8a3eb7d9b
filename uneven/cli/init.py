"""`uneven init`: a new project that trains at once."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from uneven.cli.output import Json, print_json, say
from uneven.errors import MachineError

# Literal names in the help, so that `uneven --help` need not load the templates; tests/templates compares them.
TEMPLATE_HELP = (
    "vision (a CNN on digits), text (a small GPT), own-loop (your own training loop) or plain (the smallest)."
)


@dataclass(frozen=True)
class Made:
    """What --json prints."""

    name: str
    folder: str
    template: str
    files: list[str]
    python: str
    torch: str | None
    devices: tuple[str, ...]
    written: bool
    next: list[str]  # commands


def init(
    name: Annotated[Path, typer.Argument(help="The project and its folder, which is made; . is the current folder.")],
    template: Annotated[str, typer.Option("--template", "-t", help=TEMPLATE_HELP, metavar="NAME")] = "vision",
    force: Annotated[
        bool, typer.Option("--force", help="Replace existing files of the project; other files stay.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files, and write none.")] = False,
    as_json: Json = False,
) -> None:
    """Make a project that trains at once: train.py, run.toml, a test, README, Makefile, Dockerfile.

    It asks nothing: versions and devices are those of this machine. It replaces existing files only with --force.

    Examples:

      uneven init demo

      uneven init demo --template text

      uneven init demo --template own-loop --dry-run
    """
    from uneven.templates.machine import read_machine
    from uneven.templates.project import check_folder, make_files, read_name, write_project

    _check_current_folder(name)
    title = read_name(name)
    machine = read_machine()
    contents = make_files(title, template, machine)
    check_folder(name, contents, force)
    if not dry_run:
        write_project(name, contents)
    steps = next_steps(name, machine.torch is not None, machine.devices)
    if as_json:
        document = Made(
            name=title,
            folder=str(name.resolve()),
            template=template,
            files=list(contents),
            python=machine.python,
            torch=machine.torch,
            devices=machine.devices,
            written=not dry_run,
            next=[command for command, _ in steps],
        )
        print_json(document)
        return
    for path in contents:
        print(name / path)
    if dry_run:
        say("nothing was written (--dry-run)")
        return
    width = max(len(command) for command, _ in steps)
    print("\nNext:", *(f"  {command:<{width}}  # {why}" for command, why in steps), sep="\n")


def _check_current_folder(name: Path) -> None:
    """MachineError where the shell's folder was removed: nothing can be written below it."""
    try:
        Path.cwd()
    except OSError as error:
        raise MachineError(
            f"cannot write to {name}: the current folder is no longer there ({error.strerror}); cd to one that is"
        ) from error


def next_steps(folder: Path, has_torch: bool, devices: tuple[str, ...]) -> list[tuple[str, str]]:
    """Three commands and what each does."""
    enter = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    where = ", ".join(devices[:-1]) or devices[-1]
    first = " && ".join([*enter, "make test"]) if has_torch else " && ".join([*enter, "uneven setup"])
    steps = [(first, "a few steps on the CPU" if has_torch else "installs the torch build that fits this machine")]
    steps += [] if has_torch else [("make test", "a few steps on the CPU")]
    steps += [("uneven run train.py", f"trains on {where}")]
    return [*steps, ("uneven run train.py --devices cpu,cpu@0.4", "the same on two devices that do not match")][:3]
