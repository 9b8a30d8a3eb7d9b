"""`uneven torch build`: torch from its sources for given GPU architectures, with everything told before it begins."""

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.errors import InputError, Terminated

if TYPE_CHECKING:
    from uneven.install.source_build import SourceBuild


def build(
    archs: Annotated[
        str | None,
        typer.Option("--archs", help="Compute capabilities, as in '6.1;12.0'; else those of the GPUs."),
    ] = None,
    torch: Annotated[str | None, typer.Option("--torch", help="The release of PyTorch; 2.13.0 by default.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Compilers at once; else by cores and memory.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The build's name; by default as in sm61-sm120.")] = None,
    docker: Annotated[bool, typer.Option("--docker", help="Print the command for a container, run nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show all steps and estimates, and do nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an interrupted build, or start over.")
    ] = True,
    keep_sources: Annotated[bool, typer.Option("--keep-sources", help="Keep sources and object files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Build torch from source for exactly these GPUs, where no prebuilt one covers them: hours of work, about 35 GB.

    What is missing is told beforehand. Interrupted or failed, the same command goes on with the step that was reached.
    Exit codes: 0 built, 1 a step failed, 2 bad input, 3 something is missing here, 130 stopped by Ctrl-C.
    """
    from uneven.install.source_build import (
        DEFAULT_TORCH,
        check_requirements,
        plan_source_build,
        read_build_machine,
        run_source_build,
    )
    from uneven.install.steps import StepError
    from uneven.install.toolkits import parse_archs

    wanted = parse_archs(archs if archs is not None else _archs_of_gpus())
    plan = plan_source_build(wanted, read_build_machine(), torch or DEFAULT_TORCH, jobs, name)
    if docker:
        _print_docker(plan, as_json)
        return
    if dry_run:
        _print_plan(plan, as_json)
        return
    check_requirements(plan)
    _say(f"torch {plan.torch} for {plan.arch_list}: {_estimate(plan)}")
    _say(f"log: {plan.log}")
    again = shlex.join(_again(plan))
    try:
        made = run_source_build(plan, _say, resume, keep_sources)
    except StepError as error:
        _say(f"uneven: {error}\nuneven: go on with: {again}")
        raise typer.Exit(error.exit_code) from None
    except (KeyboardInterrupt, Terminated):
        _say(f"uneven: stopped; go on with: {again}")
        raise
    if as_json:
        document = {"name": made.name, "version": made.version, "cuda": made.cuda, "archs": list(made.archs)}
        typer.echo(json.dumps({**document, "python": made.python, "wheels": str(plan.work / "wheels")}, indent=2))
        return
    typer.echo(f"{made.name}: torch {made.version}, {made.kind}; use it: uneven torch activate {made.name}")
    typer.echo(f"its wheel, for machines with the same CUDA toolkit: {plan.work / 'wheels'}")


def _again(plan: "SourceBuild") -> list[str]:
    words = ["uneven", "torch", "build", "--archs", plan.arch_list, "--torch", plan.torch]
    return [*words, "--name", plan.name, "--jobs", str(plan.jobs), "--resume"]


def _archs_of_gpus() -> str:
    from uneven.hardware.gpus import read_gpus

    sms = [gpu.sm for gpu in read_gpus().gpus if gpu.sm]
    if not sms:
        raise InputError("no NVIDIA GPU is found here: name the architectures, as in --archs '6.1;12.0'")
    return ";".join(sms)


def _estimate(plan: "SourceBuild") -> str:
    from uneven.install.source_build import DISK_BYTES

    low, high = plan.hours / 2, plan.hours * 2
    disk = f"about {DISK_BYTES / 1e9:.0f} GB of disk"
    return f"about {plan.hours:.1f} h ({low:.1f} to {high:.1f}) with {plan.jobs} jobs ({plan.jobs_why}), {disk}"


def _print_plan(plan: "SourceBuild", as_json: bool) -> None:
    from uneven.install.source_build import HOW_ESTIMATED
    from uneven.install.steps import done_steps

    done = done_steps(plan.steps, plan.state)
    if as_json:
        typer.echo(json.dumps(_document(plan, done), indent=2))
        return
    typer.echo(f"torch {plan.torch} for {plan.arch_list}, as build {plan.name}")
    found = f"{plan.toolkit.home}" if plan.toolkit else "not found here"
    typer.echo(f"CUDA toolkit: {plan.toolkits} ({found})")
    typer.echo(f"estimated: {_estimate(plan)}")
    typer.echo(f"  time: {HOW_ESTIMATED}; disk: sources, object files, wheel, environment")
    for number, step in enumerate(plan.steps, start=1):
        typer.echo(f"{number}. {step.name}{' (done)' if number <= done else ''}\n   {step.line}")
    typer.echo(f"log: {plan.log}")
    for note in plan.notes:
        typer.echo(f"note: {note}")
    for missing in plan.missing:
        typer.echo(f"missing here: {missing}")
    typer.echo("nothing was done (--dry-run)")


def _document(plan: "SourceBuild", done: int) -> dict[str, Any]:
    from uneven.install.source_build import DISK_BYTES, HOW_ESTIMATED

    return {
        "name": plan.name,
        "torch": plan.torch,
        "archs": [str(arch) for arch in plan.archs],
        "toolkit": {"needed": str(plan.toolkits), "found": str(plan.toolkit.home) if plan.toolkit else None},
        "jobs": plan.jobs,
        "estimated": {"hours": round(plan.hours, 1), "disk_bytes": DISK_BYTES, "how": HOW_ESTIMATED},
        "steps": [
            {
                "name": step.name,
                "command": list(step.command),
                "environment": dict(step.environment),
                "done": number < done,
            }
            for number, step in enumerate(plan.steps)
        ],
        "missing": list(plan.missing),
        "notes": list(plan.notes),
        "log": str(plan.log),
        "state": str(plan.state),
    }


def _print_docker(plan: "SourceBuild", as_json: bool) -> None:
    from uneven.install.source_build import docker_command, wheel_file

    command, wheel = docker_command(plan), wheel_file(plan)
    afterwards = f"uneven torch install {shlex.quote(str(wheel))} --name {plan.name}"
    if as_json:
        document = {"command": command, "image": plan.toolkits.image, "wheel": str(wheel), "afterwards": afterwards}
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(command)
    _say(f"{_estimate(plan)}; the same command again goes on where it stopped")
    _say(f"afterwards, where the CUDA libraries of {plan.toolkits.image} are installed: {afterwards}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
