"""`uneven setup`: find the hardware, choose the torch for it, install that into this environment, and train a step.

Exit codes: 0 done (or a dry run), 1 not confirmed or a device does not train, 2 bad input, 3 there is nothing that
setup can install here; the message says what to do.
"""

import json
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.errors import InputError, MachineError

if TYPE_CHECKING:
    from uneven.install.advice import Advice
    from uneven.install.check import Checked
    from uneven.install.environment import Environment
    from uneven.install.machine import Machine


def setup(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would do, and stop.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Install without asking.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Install even if the right torch is installed.")] = False,
    system: Annotated[
        bool, typer.Option("--system", help="Install into a Python that is not a virtual environment.")
    ] = False,
    build: Annotated[
        str | None,
        typer.Option(help="Install this build instead of the recommended one: cpu, cu126, cu128, cu130, rocm7.1, ..."),
    ] = None,
    index_url: Annotated[
        str | None, typer.Option(help="Take the wheel from this index, such as a mirror.", metavar="URL")
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(help="Advise for the machine recorded in FILE; with --dry-run.", metavar="FILE")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write this machine to FILE, for a bug report, and stop.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the hardware, choose and install the torch that covers it, and check it with a training step per device.

    Installs into the environment that this uneven runs in, through uv or pip, after a confirmation. Examples:

    uneven setup --dry-run    what it would do, and why

    uneven setup -y           install without asking, then check

    uneven setup --dry-run --machine their-machine.json    the advice for a recorded machine
    """
    from uneven.install.advice import advise, from_index
    from uneven.install.environment import current, pip_command
    from uneven.install.machine import read_machine, read_record, write_record

    if machine is not None and not dry_run:
        raise InputError(f"--machine {machine}: a recorded machine is only advised on: add --dry-run")
    only_looks = dry_run or record is not None
    found = read_record(machine) if machine is not None else read_machine()
    advice = advise(found, build)
    if index_url is not None:
        advice = from_index(found, advice, index_url)
    environment = current() if machine is None else None
    if record is not None:
        write_record(found, record)
        typer.echo(f"this machine is recorded in {record}", err=True)
    is_needed = advice.kind == "install" and (force or not advice.is_installed)
    command: list[str] | None = None
    if environment is not None and is_needed and advice.package is not None:
        try:
            command = pip_command(environment.python, [advice.package], advice.index_url, advice.replaces or force)
        except MachineError as error:
            if not only_looks:
                raise
            advice = replace(advice, notes=(*advice.notes, str(error)))
    if not as_json:
        _print_plan(found, advice, environment, command)
    checks: list[Checked] | None = None
    if not only_looks:
        assert environment is not None
        _install(advice, environment, command, system, yes, as_json)
        checks = _check(found, advice, environment, as_json)
    if as_json:
        _print_json(found, advice, environment, command, checks)
    failed = [check.device for check in checks or () if not check.ok]
    if failed:
        typer.echo(f"uneven: torch does not train on {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _install(
    advice: "Advice", environment: "Environment", command: list[str] | None, system: bool, yes: bool, as_json: bool
) -> None:
    """Run `command` if there is one, into an environment that may be changed, after a confirmation."""
    from uneven.cli.torch_builds import ask
    from uneven.install.environment import install, refuse_shared

    if command is None:
        if advice.is_installed:
            return
        raise MachineError(f"setup cannot install torch here: {advice.why}; {advice.action}")
    if not system:
        refuse_shared(environment)
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("there is no terminal to ask for confirmation: add -y to install, or --dry-run to look")
        if not ask(f"Install into {environment.prefix}?"):
            typer.echo("uneven: nothing was installed", err=True)
            raise typer.Exit(1)
    install(command, lambda line: typer.echo(f"  {line}", err=as_json))


def _check(machine: "Machine", advice: "Advice", environment: "Environment", as_json: bool) -> "list[Checked]":
    from uneven.install.check import Checked, check_devices

    def say(check: Checked) -> None:
        typer.echo(f"  {check}", err=as_json or not check.ok)

    typer.echo("Training step on every device:", err=as_json)
    checks = check_devices(environment.python, say)
    # A GPU build that shows no GPU has failed, though the CPU of it trains.
    if advice.covers and [check.device for check in checks] == ["cpu"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them" if hidden is not None else "run 'uneven diagnose'"
        checks.append(Checked("cuda", False, error=f"torch shows none of {', '.join(advice.covers)}: {why}"))
        say(checks[-1])
    if not as_json and all(check.ok for check in checks):
        on_cpu = not machine.gpus.gpus and not machine.amd.gpus
        typer.echo(f"torch trains here. Next: {'uneven demo' if on_cpu else 'uneven devices --measure'}")
    return checks


def _print_plan(
    machine: "Machine", advice: "Advice", environment: "Environment | None", command: list[str] | None
) -> None:
    from rich.console import Console
    from rich.text import Text

    from uneven.cli.diagnose import print_sections

    console = Console(highlight=False, markup=False, emoji=False)
    build = f"{advice.build}: {advice.why}" if advice.build else advice.why
    plan = [("torch build", build), ("to do", advice.action)]
    plan += [("note", note) for note in advice.notes]
    if environment is not None:
        plan.append(("environment", _describe(environment)))
        other = os.environ.get("VIRTUAL_ENV")
        if other and Path(other).resolve() != environment.prefix.resolve():
            plan.append(("note", f"{other} is active, but this uneven is installed in {environment.prefix}"))
    print_sections(console, {"Hardware": _hardware(machine), "Advice": plan})
    line = shlex.join(command) if command else advice.command if not advice.is_installed else None
    if line is not None:
        console.print(Text(f"  {line}"), soft_wrap=True)  # on one line, to be copied


def _hardware(machine: "Machine") -> list[tuple[str, str]]:
    system, surroundings = machine.system, machine.system.surroundings
    around = [f"WSL {surroundings.wsl}"] if surroundings.wsl else []
    around += [f"in a container ({surroundings.container})"] if surroundings.container else []
    around += [f"Jetson Linux {machine.nvidia.jetson}"] if machine.nvidia.jetson else []
    lines = [
        ("system", ", ".join([system.os_name or system.platform, system.cpu.architecture, *around])),
        ("CPU", f"{system.cpu.model or 'unknown model'}, {len(system.available_cores)} cores"),
    ]
    for gpu in machine.gpus.gpus:
        memory = f", {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
        lines.append((f"GPU {gpu.index}", f"{gpu.name}, {gpu.sm or 'sm_?'}{memory}{', MIG on' if gpu.mig else ''}"))
    if machine.gpus.driver is not None:
        lines.append(("driver", f"NVIDIA {machine.gpus.driver}, up to CUDA {machine.gpus.driver_cuda or '?'}"))
    for amd in machine.amd.gpus:
        memory = f", {amd.memory_bytes / 2**30:.0f} GiB" if amd.memory_bytes else ""
        lines.append((f"AMD GPU {amd.index}", f"{amd.gfx}{memory}, ROCm {machine.amd.rocm or 'not installed'}"))
    if not machine.gpus.gpus and not machine.amd.gpus:
        lines.append(("GPUs", f"none ({machine.gpus.reason})"))
    torch = machine.torch
    text = f"{torch.version} for {' '.join(torch.archs) or 'the CPU'}" if torch.error is None else torch.error
    return [*lines, ("torch", text if torch.installed else "not installed")]


def _describe(environment: "Environment") -> str:
    if environment.is_managed:
        return f"{environment.prefix}, which the operating system manages: refused without --system"
    kind = "" if environment.is_virtual else ", not a virtual environment: refused without --system"
    free = shutil.disk_usage(environment.prefix).free / 2**30
    return f"{environment.prefix} (Python {environment.version}, {free:.0f} GiB free){kind}"


def _print_json(
    machine: "Machine",
    advice: "Advice",
    environment: "Environment | None",
    command: list[str] | None,
    checks: "list[Checked] | None",
) -> None:
    import uneven

    place = None
    if environment is not None:
        place = {
            "prefix": str(environment.prefix),
            "python": str(environment.python),
            "is_virtual": environment.is_virtual,
            "is_managed": environment.is_managed,
        }
    document = {
        "version": uneven.__version__,
        "machine": machine.to_json(),
        "advice": advice.to_json(),
        "environment": place,
        "command": command,
        "installed": command is not None and checks is not None,
        "checks": None if checks is None else [vars(check) for check in checks],
    }
    print(json.dumps(document, indent=2))
