"""`uneven torch`: several builds of torch side by side, each in an environment of its own; one may be active.

Nothing here loads torch. Results go to stdout, progress and messages to stderr.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import typer

from uneven.cli.output import Json, print_json
from uneven.errors import InputError, Terminated
from uneven.files import ABSENT
from uneven.format import align_columns, format_bytes
from uneven.hardware.gpus import Gpu, read_gpus
from uneven.hardware.torchbuild import installed_version
from uneven.install import builds
from uneven.install.builds import Build, builds_folder
from uneven.install.source_build import parse_archs, plan_source_build, run_source_build

app = typer.Typer(
    no_args_is_help=True,
    help="Keep several torch builds side by side: install, build from source, choose, remove.",
    epilog="Builds are in $UNEVEN_HOME/torch, by default ~/.local/share/uneven/torch. Example: uneven torch list",
)

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]


@dataclass(frozen=True, kw_only=True)
class Covered(Build):
    """A build, and whether it has code for the GPUs here: null where that cannot be said."""

    support: dict[str, str] | None  # of each architecture: OK, JIT or MISSING
    covers: bool | None
    wheels: str | None = field(default=None, metadata=ABSENT)  # the folder of the wheel that was built


@dataclass(frozen=True)
class Listed:
    """What list --json prints."""

    folder: str
    active: str | None
    gpus: tuple[Gpu, ...]
    builds: list[Covered]
    unfinished: list[str]
    current: str | None  # the torch of the environment in which it was called


@dataclass(frozen=True)
class Plan:
    """What install --dry-run --json prints."""

    name: str
    source: str
    folder: str
    commands: list[str]


@dataclass(frozen=True)
class SourcePlan:
    """What build --dry-run --json prints."""

    name: str
    torch: str
    archs: str
    toolkit: str | None
    jobs: int
    commands: list[str]
    missing: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class Activated:
    """What activate --json prints."""

    active: str | None


@dataclass(frozen=True)
class Removed:
    """What remove --json prints."""

    removed: str


@app.command("list", epilog="Example: uneven torch list --json")
def list_all(as_json: Json = False) -> None:
    """Show all builds: version, CUDA, architectures, size, which is active, and whether it covers the GPUs here. The
    torch of the current environment is listed, too.
    """
    gpus, known = read_gpus().gpus, builds.list_builds()
    active, unfinished = builds.active_name(), builds.unfinished_builds()
    current = installed_version()  # of this environment
    if as_json:
        covered = [_covered(one, gpus) for one in known]
        print_json(Listed(str(builds_folder()), active, gpus, covered, unfinished, current))
        return
    rows = [_row(build, gpus) for build in known]
    rows += [] if current is None else [("(this environment)", current, "-", "-", "-", "-", sys.prefix)]
    headings = ("name", "torch", "for", "archs", "size", "covers the GPUs here", "")
    lines = align_columns([headings, *rows]) if rows else []
    lines += [f"{name}: interrupted; install it again, or: uneven torch remove {name}" for name in unfinished]
    if not known:
        lines.append(f"no builds in {builds_folder()}; install one: uneven torch install")
    elif active is None:
        lines.append(f"none is active: uneven uses this environment; choose one: uneven torch activate {known[0].name}")
    typer.echo("\n".join(lines))


def _covered(build: Build, gpus: tuple[Gpu, ...] = (), wheels: str | None = None) -> Covered:
    found = build.coverage(gpus)
    covers = None if found is None else "MISSING" not in found.values()
    return Covered(**vars(build), support=found, covers=covers, wheels=wheels)


def _row(build: Build, gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    archs = " ".join(arch.removeprefix("sm_") for arch in build.archs) or "-"
    found = build.coverage(gpus) or {}
    missing = [sm for sm, support in found.items() if support == "MISSING"]
    slow = [sm for sm, support in found.items() if support == "JIT"]
    covers = f"no: not {' '.join(missing)}" if missing else f"yes, {' '.join(slow)} from PTX" if slow else "yes"
    active = "active" if build.is_active else ""
    size = format_bytes(build.size_bytes)
    return build.name, build.version, build.kind, archs, size, covers if found else "-", active


@app.command(
    "install",
    epilog="Examples:\n\nuneven torch install --dry-run\n\nuneven torch install cu126 --activate -y\n\n"
    "uneven torch install cpu --version 2.12.0 --name cpu-old",
)
def install(
    variant: Annotated[
        str, typer.Argument(help="cpu, cu126, cu128, cu130, a wheel's file, or auto: covers all GPUs here.")
    ] = "auto",
    name: Annotated[str | None, typer.Option("--name", help="The build's name; by default the variant.")] = None,
    version: Annotated[str | None, typer.Option("--version", help="Of torch, such as 2.13.0; else the newest.")] = None,
    index_url: Annotated[
        str | None, typer.Option("--index-url", help="An index instead of PyTorch's: a mirror, NVIDIA's for a Jetson.")
    ] = None,
    use: Annotated[bool, typer.Option("--activate/--no-activate", help="Make it the active build.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Install a torch, and the same uneven, into a new environment of their own. The current one is not touched.

    If it is interrupted, the same command continues. Exit codes: 0 installed, 1 not confirmed, 2 bad input, 3 not
    possible on this machine, or it failed.
    """
    plan = builds.plan_build(variant, name, version, index_url)
    builds.check_absent(plan.name)
    lines = [step.line for step in plan.steps]
    title = f"{plan.name}: {plan.source} into {plan.folder}"
    if dry_run:
        document = Plan(plan.name, plan.source, str(plan.folder), lines)
        print_json(document) if as_json else typer.echo("\n".join([title, *lines, "nothing was done (--dry-run)"]))
        return
    _say(title)
    _confirm("install it?", yes)
    with _interruption_told():
        build = builds.make_build(plan, _say)
    if use:
        builds.activate(build.name)
    if as_json:
        print_json(_covered(builds.find_build(build.name)))
        return
    typer.echo(f"{build.name}: torch {build.version}, {build.kind}, {format_bytes(build.size_bytes)}")
    typer.echo("it is active now" if use else f"use it: uneven torch activate {build.name}")


@app.command("activate", epilog="Examples:\n\nuneven torch activate cu126\n\nuneven torch activate --none")
def activate(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A build, as in 'uneven torch list'.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Use the current environment again.")] = False,
    as_json: Json = False,
) -> None:
    """Use this build for uneven run, demo, bench and all other verbs that need torch.

    For one call only: UNEVEN_TORCH=NAME uneven run ...; UNEVEN_TORCH=none uses the current environment.
    """
    if (name is None) != none:
        raise InputError("uneven torch activate: name a build, or --none for the current environment")
    builds.activate(name)
    if as_json:
        print_json(Activated(name))
    elif name is None:
        typer.echo("no build is active: uneven uses the environment it is called in")
    else:
        programs = builds_folder() / name / "bin"
        typer.echo(f"{name} is active: uneven run, demo, bench, ... use it; back: uneven torch activate --none")
        typer.echo(f"for python in a shell: source {shlex.quote(str(programs / 'activate'))}")
        typer.echo(f"for more packages: {shlex.quote(str(programs / 'python'))} -m pip install ...")


@app.command("remove", epilog="Example: uneven torch remove cu126 -y")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a build, as in 'uneven torch list'.")],
    force: Annotated[bool, typer.Option("--force", help="Also if it is the active one.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete a build, or what an interrupted installation has left. Only folders made by uneven are deleted."""
    folder = builds.check_removable(name, force)
    _confirm(f"delete {folder}?", yes)
    builds.remove(name, force)
    if as_json:
        print_json(Removed(name))
    else:
        typer.echo(f"{name} is removed")


@app.command(
    "build",
    epilog="Examples:\n\nuneven torch build --archs '6.1;12.0' --dry-run\n\n"
    "uneven torch build --archs '6.1;12.0' --jobs 6",
)
def build(
    archs: Annotated[
        str | None, typer.Option("--archs", help="Compute capabilities, as in '6.1;12.0'; else those of the GPUs.")
    ] = None,
    torch: Annotated[str | None, typer.Option("--torch", help="The release of PyTorch; 2.13.0 by default.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Compilers at once; else by cores and memory.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The build's name; by default as in sm61-sm120.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Build torch from source for exactly these GPUs, where no prebuilt one covers them: hours of work, about 35 GB.

    What is missing is told beforehand. Interrupted or failed, the same command goes on: git, pip and ninja keep what
    they have. Exit codes: 0 built, 2 bad input, 3 something is missing here or a step failed, 130 stopped by Ctrl-C.
    """
    sms = [gpu.sm for gpu in read_gpus().gpus if gpu.sm] if archs is None else []
    if archs is None and not sms:
        raise InputError("no NVIDIA GPU is found here: name the architectures, as in --archs '6.1;12.0'")
    plan = plan_source_build(parse_archs(";".join(sms) if archs is None else archs), torch, jobs, name)
    lines = [step.line for step in plan.steps]
    toolkit = None if plan.toolkit is None else str(plan.toolkit)
    title = (
        f"torch {plan.torch} for {plan.archs} as build {plan.name}: hours with {plan.jobs} jobs, about 35 GB of disk\n"
        f"CUDA toolkit: {toolkit or 'not found here'}; log: {plan.log}"
    )
    if dry_run and as_json:
        print_json(
            SourcePlan(plan.name, plan.torch, plan.archs, toolkit, plan.jobs, lines, plan.missing, str(plan.log))
        )
        return
    if dry_run:
        numbered = [f"{number}. {line}" for number, line in enumerate(lines, start=1)]
        missing = [f"missing here: {one}" for one in plan.missing]
        typer.echo("\n".join([title, *numbered, *missing, "nothing was done (--dry-run)"]))
        return
    _say(title)
    with _interruption_told():
        made = run_source_build(plan, _say)
    wheels = str(plan.work / "wheels")
    if as_json:
        print_json(_covered(made, wheels=wheels))
        return
    typer.echo(f"{made.name}: torch {made.version}, {made.kind}; use it: uneven torch activate {made.name}")
    typer.echo(f"its wheel, for machines with the same CUDA toolkit: {wheels}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _confirm(question: str, yes: bool) -> None:
    if not yes and not ask(question):
        _say("uneven: nothing was done")
        raise typer.Exit(1)


def ask(question: str) -> bool:
    """The answer at the terminal, to a question on stderr. InputError where the input has ended; `uneven setup` asks
    in the same way. Not by typer's own confirm: that writes a space to stdout, where --json has its document."""
    while True:
        print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline() if sys.stdin is not None else ""
        answer = line.strip().lower()
        if not line:
            _say("")
            raise InputError(f"{question} nobody answered: add -y")
        if answer in ("", "n", "no", "y", "yes"):
            return answer in ("y", "yes")
        _say("answer y or n")


@contextmanager
def _interruption_told() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        _say("uneven: stopped; the same command goes on")
        raise
