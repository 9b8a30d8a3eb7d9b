"""`uneven diagnose`: print the hardware report, with every problem and the command that fixes it.

Exit code 0 when all is fine, 3 when there is a problem. No GPU is not a problem.
"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.errors import MachineError

if TYPE_CHECKING:
    from uneven.hardware.diagnosis import Diagnosis

_SUPPORT_COLORS = {"OK": "green", "JIT": "yellow", "MISSING": "red"}


def diagnose(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report the system, GPUs, torch, what fits together, and for each problem the command that fixes it.

    Exit code 0 when all is fine, 3 when this machine has a problem that stops or breaks training. Examples:

    uneven diagnose           the report

    uneven diagnose --json    the same for a script or a bug report
    """
    from uneven.hardware.diagnosis import diagnose as run_diagnosis

    diagnosis = run_diagnosis()
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        _print(diagnosis)
    raise typer.Exit(0 if diagnosis.is_fine else MachineError.exit_code)


def sections(diagnosis: "Diagnosis") -> dict[str, list[tuple[str, str]]]:
    """The report as (label, text) lines by heading, without markup."""
    return {
        "System": _system(diagnosis),
        "GPUs and driver": _gpus(diagnosis),
        "torch build": _torch(diagnosis),
        "Compatibility": _compatibility(diagnosis),
        "Precision": [
            (choice.device, f"{choice.precision}  {choice.name}: {choice.why}") for choice in diagnosis.precision
        ],
        "Backends": [
            ("gloo", "available" if diagnosis.torch.gloo else "missing"),
            (
                "nccl",
                f"available {diagnosis.torch.nccl_version or ''}".strip()
                if diagnosis.torch.nccl
                else _no_nccl(diagnosis),
            ),
        ],
        "Network": _network(diagnosis),
    }


def _compatibility(diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    lines = []
    for fit in diagnosis.compatibility:
        name = f"{fit.gpu.name} ({fit.gpu.sm or 'sm_?'})"
        lines.append((f"GPU {fit.gpu.index}", f"{fit.support.value}  {name}: {fit.detail}"))
    return lines or [("GPUs", "none to check")]


def _gib(number: int | None) -> str:
    return "?" if number is None else f"{number / 2**30:.1f} GiB"


def _count(number: int | None, noun: str) -> str:
    return f"{'?' if number is None else number} {noun}{'' if number == 1 else 's'}"


def _system(diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    system, cpu, surroundings = diagnosis.system, diagnosis.system.cpu, diagnosis.system.surroundings
    topology = ", ".join([_count(cpu.sockets, "socket"), _count(cpu.cores, "core"), _count(cpu.threads, "thread")])
    quota = f" (quota {system.cpu_quota:g})" if system.cpu_quota is not None else ""
    limited = " (cgroup limit)" if system.memory_is_limited else ""
    engine = "engine responds" if surroundings.docker_engine else "no engine responds"
    lines = [
        ("OS", f"{system.os_name or system.platform}, kernel {system.kernel or '?'}"),
        ("CPU", f"{cpu.model or 'unknown model'} ({cpu.architecture}): {topology}"),
        ("usable cores", f"{len(system.available_cores)}{quota}"),
        ("bf16 flags", ", ".join(cpu.flags) or "none"),
        ("memory", f"{_gib(system.memory_bytes)}{limited}, {_gib(system.memory_available_bytes)} available"),
        ("Python", system.python),
        ("container", surroundings.container or "none"),
        ("Docker", f"{surroundings.docker_client or 'no client'}, {engine}"),
    ]
    if surroundings.wsl is not None:
        lines.insert(1, ("WSL", str(surroundings.wsl)))
    return lines


def _gpus(diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    report = diagnosis.gpus
    if not report.gpus:
        return [("GPUs", f"none ({report.reason})")]
    lines = [
        (
            "driver",
            f"{report.driver or '?'} (up to CUDA {report.driver_cuda or '?'}), read by {report.source}",
        )
    ]
    for gpu in report.gpus:
        parts = [gpu.name, gpu.sm or "sm_?", _gib(gpu.memory_bytes)]
        parts += [_count(gpu.cores, "core")] if gpu.cores else []
        parts += [f"PCI {gpu.pci}"] if gpu.pci else []
        parts += ["MIG on"] if gpu.mig else []
        lines.append((f"GPU {gpu.index}", ", ".join(parts)))
    if report.mps_running:
        lines.append(("MPS", "the daemon is running"))
    return lines


def _torch(diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    build = diagnosis.torch
    if not build.installed:
        return [("torch", "not installed")]
    if build.error is not None:
        return [("torch", f"does not import: {build.error}")]
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPU build"
    return [
        ("version", f"{build.version} ({kind})"),
        ("archs", " ".join(build.archs) or "none (no GPU code)"),
        ("CPU code", f"{build.cpu_capability or '?'}, {_count(build.threads, 'thread')}"),
    ]


def _no_nccl(diagnosis: "Diagnosis") -> str:
    return "not in this build" + ("" if diagnosis.gpus.gpus else " (needs CUDA GPUs; ranks here use gloo)")


def _network(diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    lines = []
    for interface in diagnosis.interfaces:
        if not interface.is_up and not interface.v4:
            continue  # a laptop has a dozen of these; --json lists all
        state = "up" if interface.is_up else "down"
        speed = f", {interface.speed_mbps} Mbit/s" if interface.speed_mbps else ""
        addresses = ", ".join([*interface.v4, *interface.v6]) or "no address"
        lines.append((interface.name, f"{state}, {interface.kind}{speed}: {addresses}"))
    chosen = f"{diagnosis.likely}: {diagnosis.likely_why}" if diagnosis.likely else f"none: {diagnosis.likely_why}"
    return [*lines, ("between machines", chosen)]


def _print(diagnosis: "Diagnosis") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    for heading, lines in sections(diagnosis).items():
        console.print(Text(heading, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=18, no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines:
            first_word = text.split(" ", 1)[0]
            cell = Text(text)
            if first_word in _SUPPORT_COLORS:
                cell.stylize(_SUPPORT_COLORS[first_word], 0, len(first_word))
            table.add_row(Text(f"  {label}"), cell)
        console.print(table)
    # Text, not markup: an error may contain brackets. soft_wrap keeps a command on one line for copying.
    for note in diagnosis.notes:
        console.print(Text(f"Note: {note}"))
    for number, problem in enumerate(diagnosis.problems, start=1):
        console.print(Text(f"Problem {number}: {problem.what}", style="red"), soft_wrap=True)
        console.print(Text(f"  fix: {problem.fix}"), soft_wrap=True)
    count = len(diagnosis.problems)
    console.print("All fine." if count == 0 else f"{count} problem{'s' if count > 1 else ''}.", style="bold")
