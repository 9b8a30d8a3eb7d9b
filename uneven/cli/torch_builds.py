"""`uneven torch`: several builds of torch side by side, each in an environment of its own; one may be active.

Nothing here loads torch. Results go to stdout, progress and messages to stderr.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli.torch_source import build
from uneven.errors import InputError, Terminated
from uneven.format import align_columns, format_bytes

if TYPE_CHECKING:
    from uneven.hardware.gpus import Gpu
    from uneven.install.builds import Build
    from uneven.install.new_build import BuildPlan

app = typer.Typer(
    no_args_is_help=True,
    help="Keep several torch builds side by side: install, build from source, choose, remove.",
    epilog="Builds are in $UNEVEN_HOME/torch, by default ~/.local/share/uneven/torch. Example: uneven torch list",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a build, as in 'uneven torch list'.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list", epilog="Example: uneven torch list --json")
def list_all(as_json: Json = False) -> None:
    """Show all builds: version, CUDA, architectures, size, which is active, and whether it covers the GPUs here. The
    torch of the current environment is listed, too.
    """
    from uneven.hardware.gpus import read_gpus
    from uneven.install.builds import active_name, builds_folder, list_builds, unfinished_builds

    gpus = read_gpus().gpus
    builds, unfinished, current = list_builds(), unfinished_builds(), current_torch()
    if as_json:
        document = {
            "folder": str(builds_folder()),
            "active": active_name(),
            "gpus": [{"index": gpu.index, "name": gpu.name, "sm": gpu.sm} for gpu in gpus],
            "builds": [_document(build, gpus) for build in builds],
            "unfinished": unfinished,
            "current": current,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    rows = [_row(build, gpus) for build in builds]
    if current is not None:
        rows.append(("(this environment)", current["version"], current["kind"], "-", "-", "-", sys.prefix))
    if rows:
        headings = ("name", "torch", "for", "archs", "size", "covers the GPUs here", "")
        typer.echo("\n".join(align_columns([headings, *rows])))
    for name in unfinished:
        typer.echo(f"{name}: interrupted; install it again, or: uneven torch remove {name}")
    if not builds:
        typer.echo(f"no builds in {builds_folder()}; install one: uneven torch install")
    elif active_name() is None:
        typer.echo(f"none is active: uneven uses this environment; choose one: uneven torch activate {builds[0].name}")


def current_torch() -> dict[str, Any] | None:
    """The torch of this environment, read from its files: importing it takes seconds."""
    import re
    from importlib.util import find_spec
    from pathlib import Path

    from uneven.hardware.torchbuild import installed_version

    version = installed_version()
    if version is None:
        return None
    spec = find_spec("torch")
    cuda = hip = None
    if spec is not None and spec.origin is not None:
        try:
            text = (Path(spec.origin).parent / "version.py").read_text()
        except OSError:
            text = ""
        found = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *'([^']+)'", text, flags=re.MULTILINE))
        cuda, hip = found.get("cuda"), found.get("hip")
    kind = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return {"version": version, "cuda": cuda, "hip": hip, "kind": kind, "python": sys.executable}


def _document(build: "Build", gpus: "tuple[Gpu, ...]") -> dict[str, Any]:
    from uneven.install.builds import coverage

    found = coverage(build.cuda, build.hip, build.archs, gpus)
    covers = None if found is None else "MISSING" not in found.values()
    return {**asdict(build), "archs": list(build.archs), "kind": build.kind, "support": found, "covers": covers}


def _row(build: "Build", gpus: "tuple[Gpu, ...]") -> tuple[str, ...]:
    archs = " ".join(arch.removeprefix("sm_") for arch in build.archs) or "-"
    active = "active" if build.is_active else ""
    return build.name, build.version, build.kind, archs, _size(build.size_bytes), _covers(build, gpus), active


def _covers(build: "Build", gpus: "tuple[Gpu, ...]") -> str:
    from uneven.install.builds import coverage

    found = coverage(build.cuda, build.hip, build.archs, gpus)
    if found is None:
        return "-" if not gpus else "not known"
    missing = [sm for sm, support in found.items() if support == "MISSING"]
    slow = [sm for sm, support in found.items() if support == "JIT"]
    if missing:
        return f"no: not {' '.join(missing)}"
    return f"yes, {' '.join(slow)} from PTX" if slow else "yes"


def _size(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


@app.command("info", epilog="Examples:\n\nuneven torch info cu126\n\nuneven torch info --json")
def info(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A build; the active one by default.")] = None,
    as_json: Json = False,
) -> None:
    """Show one build: what its torch is, for which GPUs here it has code, and how to install more into it."""
    from uneven.hardware.gpus import read_gpus
    from uneven.install.builds import active_name, coverage, find_build

    name = name or active_name()
    if name is None:
        raise InputError("no build is active: name one of 'uneven torch list'; 'uneven diagnose' shows the torch here")
    build, gpus = find_build(name), read_gpus().gpus
    if as_json:
        typer.echo(json.dumps(_document(build, gpus), indent=2))
        return
    found = coverage(build.cuda, build.hip, build.archs, gpus)
    lines = {
        "name": build.name + (" (active)" if build.is_active else ""),
        "torch": f"{build.version}, {build.kind}",
        "architectures": " ".join(build.archs) or "-",
        "size": _size(build.size_bytes),
        "source": build.source,
        "python": f"{build.python} ({build.python_version or 'version not known'})",
        **{
            f"GPU {gpu.index}": f"{gpu.name} ({gpu.sm or '?'}): {(found or {}).get(gpu.sm or '', 'not known')}"
            for gpu in gpus
        },
        "more packages": f"{shlex.quote(build.python)} -m pip install ...",
    }
    for label, text in lines.items():
        typer.echo(f"{label + ':':<15} {text}")


@app.command(
    "install",
    epilog="Examples:\n\nuneven torch install --dry-run\n\nuneven torch install cu126 --activate -y\n\n"
    "uneven torch install cpu --version 2.12.0 --name cpu-old",
)
def install(
    variant: Annotated[
        str,
        typer.Argument(help="cpu, cu126, cu128, cu130, rocm7.1, a wheel's file, or auto: covers all GPUs here."),
    ] = "auto",
    name: Annotated[str | None, typer.Option("--name", help="The build's name; by default the variant.")] = None,
    version: Annotated[str | None, typer.Option("--version", help="Of torch, such as 2.13.0; else the newest.")] = None,
    index_url: Annotated[
        str | None, typer.Option("--index-url", help="An index instead of PyTorch's: a mirror, NVIDIA's for a Jetson.")
    ] = None,
    use: Annotated[bool, typer.Option("--activate/--no-activate", help="Make it the active build.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Install a torch, and the same uneven, into a new environment of their own. The current one is not touched.

    If it is interrupted, the same command continues. Exit codes: 0 installed, 1 not confirmed, 2 bad input, 3 not
    possible on this machine.
    """
    from uneven.install.builds import activate as make_active
    from uneven.install.new_build import check_absent, check_space, make_build, plan_build

    plan = plan_build(variant, name, version, index_url)
    check_absent(plan.name)
    if dry_run:
        _show_plan(plan, as_json)
        return
    free = check_space(plan)
    _say(f"{plan.name}: {plan.torch} into {plan.folder}; {_sizes(plan)}; {_size(free)} free")
    _confirm("install it?", yes)
    with _interruption_told():
        build = make_build(plan, _say)
    if use:
        make_active(build.name)
    if as_json:
        from uneven.install.builds import find_build

        typer.echo(json.dumps(_document(find_build(build.name), ()), indent=2))
        return
    typer.echo(f"{build.name}: torch {build.version}, {build.kind}, {_size(build.size_bytes)}")
    typer.echo("it is active now" if use else f"use it: uneven torch activate {build.name}")


def _show_plan(plan: "BuildPlan", as_json: bool) -> None:
    from uneven.install.new_build import commands_of

    commands = commands_of(plan)
    if as_json:
        document = {**asdict(plan), "folder": str(plan.folder), "uneven": list(plan.uneven), "commands": commands}
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"{plan.name}: {plan.torch} into {plan.folder}; {_sizes(plan)}")
    for line in commands:
        typer.echo(f"  {line}")
    typer.echo("nothing was done (--dry-run)")


def _sizes(plan: "BuildPlan") -> str:
    return f"about {_size(plan.download_bytes)} to download, {_size(plan.disk_bytes)} on disk (estimated)"


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


@app.command("activate", epilog="Examples:\n\nuneven torch activate cu126\n\nuneven torch activate --none")
def activate(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A build, as in 'uneven torch list'.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Use the current environment again.")] = False,
    as_json: Json = False,
) -> None:
    """Use this build for uneven run, demo, bench and all other verbs that need torch.

    For one call only: UNEVEN_TORCH=NAME uneven run ...; UNEVEN_TORCH=none uses the current environment.
    """
    from uneven.install.builds import activate as make_active

    if (name is None) != none:
        raise InputError("uneven torch activate: name a build, or --none for the current environment")
    make_active(name)
    if as_json:
        typer.echo(json.dumps({"active": name}))
    elif name is None:
        typer.echo("no build is active: uneven uses the environment it is called in")
    else:
        from pathlib import Path

        from uneven.install.builds import find_build

        shell = Path(find_build(name).python).with_name("activate")
        typer.echo(f"{name} is active: uneven run, demo, bench, ... use it; back: uneven torch activate --none")
        typer.echo(f"for python in a shell: source {shlex.quote(str(shell))}")


@app.command("remove", epilog="Example: uneven torch remove cu126 -y")
def remove(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Also if it is the active one.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete a build, or what an interrupted installation has left. Only folders made by uneven are deleted."""
    from uneven.install.builds import check_removable
    from uneven.install.builds import remove as delete

    folder = check_removable(name, force)
    _confirm(f"delete {folder}?", yes)
    delete(name, force)
    typer.echo(json.dumps({"removed": name}) if as_json else f"{name} is removed")


app.command(
    "build",
    epilog="Examples:\n\nuneven torch build --archs '6.1;12.0' --dry-run\n\n"
    "uneven torch build --archs '6.1;12.0' --jobs 6\n\nuneven torch build --archs '6.1;12.0' --docker",
)(build)
