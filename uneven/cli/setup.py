"""`uneven setup`: find the hardware, choose the torch for it, install that into this environment, and train a step.

Exit codes: 0 done (or a dry run), 1 not confirmed or a device does not train, 2 bad input, 3 there is nothing that
setup can install here, or it failed; the message says what to do.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from uneven.cli.diagnose import gpu_lines, print_sections
from uneven.cli.output import Json, new_console, print_json, say
from uneven.cli.torch_builds import ask
from uneven.errors import InputError, MachineError
from uneven.install.advice import Advice, Machine, advise, read_machine
from uneven.install.check import Checked, check_devices
from uneven.install.steps import Step, install_step, run_step


@dataclass(frozen=True)
class SetUp:
    """What --json prints."""

    machine: Machine
    advice: Advice
    environment: str
    command: tuple[str, ...] | None  # that installs; null if nothing is to be installed
    installed: bool
    checks: list[Checked] | None


def setup(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would do, and stop.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Install without asking.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Install even if the right torch is installed.")] = False,
    build: Annotated[
        str | None, typer.Option(help="Install this build instead of the recommended one: cpu, cu126, cu128, cu130.")
    ] = None,
    index_url: Annotated[
        str | None, typer.Option(help="Take the wheel from this index, such as a mirror.", metavar="URL")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the hardware, choose and install the torch that covers it, and check it with a training step per device.

    Installs into the environment that this uneven runs in, through uv if that is installed, else through pip, after a
    confirmation. Examples:

    uneven setup --dry-run    what it would do, and why

    uneven setup -y           install without asking, then check
    """
    machine = read_machine()
    advice = advise(machine, build, index_url)
    step: Step | None = None
    if advice.kind == "install" and advice.package is not None and (force or not advice.is_installed):
        tag = advice.build if machine.system.platform == "Linux" else None  # elsewhere the default index has it
        again = advice.replaces or force
        step = install_step(Path(sys.executable), [advice.package], tag, advice.index_url, again)
    if not as_json:
        _print_plan(machine, advice, step)
    checks: list[Checked] | None = None
    if not dry_run:
        _install(advice, step, yes, as_json)
        checks = _check(advice, as_json)
    if as_json:
        command = None if step is None else step.command
        print_json(SetUp(machine, advice, sys.prefix, command, step is not None and checks is not None, checks))
    failed = [check.device for check in checks or () if not check.ok]
    if failed:
        say(f"torch does not train on {', '.join(failed)}")
        raise typer.Exit(1)


def _install(advice: Advice, step: Step | None, yes: bool, as_json: bool) -> None:
    """Run the command, if there is one, after a confirmation."""
    if step is None:
        if advice.is_installed:
            return
        raise MachineError(f"setup cannot install torch here: {advice.why}; {advice.action}")
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("there is no terminal to ask for confirmation: add -y to install, or --dry-run to look")
        if not ask(f"Install into {sys.prefix}?"):
            say("nothing was installed")
            raise typer.Exit(1)
    run_step(step, lambda line: typer.echo(f"  {line}", err=as_json))


def _check(advice: Advice, as_json: bool) -> list[Checked]:
    def show(check: Checked) -> None:
        typer.echo(f"  {check}", err=as_json or not check.ok)

    typer.echo("Training step on every device:", err=as_json)
    checks = check_devices(Path(sys.executable), show)
    # A GPU build that shows no GPU has failed, though the CPU of it trains.
    if advice.covers and [check.device for check in checks] == ["cpu"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them" if hidden is not None else "run 'uneven diagnose'"
        checks.append(Checked("cuda", False, error=f"torch shows none of {', '.join(advice.covers)}: {why}"))
        show(checks[-1])
    if not as_json and all(check.ok for check in checks):
        typer.echo(f"torch trains here. Next: uneven {'devices --measure' if advice.covers else 'demo'}")
    return checks


def _print_plan(machine: Machine, advice: Advice, step: Step | None) -> None:
    from rich.text import Text

    console = new_console()
    system, torch = machine.system, machine.torch
    build = f"{torch.version} for {' '.join(torch.archs) or 'the CPU'}" if torch.error is None else torch.error
    hardware = [
        ("system", f"{system.os_name}, {system.cpu.architecture}{', in a container' if system.is_container else ''}"),
        ("CPU", f"{system.cpu.model or 'unknown model'}, {len(system.available_cores)} cores"),
        *gpu_lines(machine.gpus),
        ("torch", build if torch.installed else "not installed"),
    ]
    plan = [("torch build", f"{advice.build}: {advice.why}" if advice.build else advice.why), ("to do", advice.action)]
    plan += [("note", note) for note in advice.notes]
    plan.append(("environment", sys.prefix))
    print_sections(console, {"Hardware": hardware, "Advice": plan})
    line = step.line if step is not None else advice.action if advice.kind == "source" else None
    if line is not None and not (step is None and advice.is_installed):
        console.print(Text(f"  {line}"), soft_wrap=True)  # on one line, to be copied
