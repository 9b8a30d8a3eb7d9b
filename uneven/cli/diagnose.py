"""`uneven diagnose`: print the hardware report, with every problem and the command that fixes it.

Exit code 0 when all is fine, 3 when there is a problem. No GPU is not a problem.
"""

from typing import TYPE_CHECKING

import typer

from uneven.cli.output import Json, new_console, print_json
from uneven.errors import MachineError
from uneven.format import format_count, format_gib
from uneven.hardware.gpus import GpuReport
from uneven.install.advice import read_machine
from uneven.install.diagnosis import Diagnosis
from uneven.install.diagnosis import diagnose as run_diagnosis

if TYPE_CHECKING:
    from rich.console import Console

_SUPPORT_COLORS = {"OK": "green", "JIT": "yellow", "MISSING": "red"}


def diagnose(as_json: Json = False) -> None:
    """Report the system, GPUs, torch, what fits together, and for each problem the command that fixes it.

    Exit code 0 when all is fine, 3 when this machine has a problem that stops or breaks training. Examples:

    uneven diagnose           the report

    uneven diagnose --json    the same for a script or a bug report
    """
    diagnosis = run_diagnosis(read_machine())
    if as_json:
        print_json(diagnosis)
    else:
        _print(diagnosis)
    raise typer.Exit(0 if diagnosis.is_fine else MachineError.exit_code)


def sections(diagnosis: Diagnosis) -> dict[str, list[tuple[str, str]]]:
    """The report as (label, text) lines by heading, without markup."""
    return {
        "System": _system(diagnosis),
        "GPUs and driver": gpu_lines(diagnosis.gpus),
        "torch build": [*_torch(diagnosis), *_builds(diagnosis)],
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


def _compatibility(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    names = {gpu.index: gpu.name for gpu in diagnosis.gpus.gpus}
    lines = [
        (f"GPU {fit.gpu}", f"{fit.support.value}  {names[fit.gpu]} ({fit.sm or 'sm_?'}): {fit.detail}")
        for fit in diagnosis.compatibility
    ]
    return lines or [("GPUs", "none to check")]


def _system(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    system = diagnosis.system
    quota = f" (quota {system.cpu_quota:g})" if system.cpu_quota is not None else ""
    limited = " (cgroup limit)" if system.memory_is_limited else ""
    memory = f"{format_gib(system.memory_bytes)}{limited}, {format_gib(system.memory_available_bytes)} available"
    return [
        ("OS", f"{system.os_name}, kernel {system.kernel}{', in a container' if system.is_container else ''}"),
        ("CPU", f"{system.cpu.model or 'unknown model'} ({system.cpu.architecture})"),
        ("usable cores", f"{len(system.available_cores)}{quota}"),
        ("bf16 flags", ", ".join(system.cpu.flags) or "none"),
        ("memory", memory),
        ("Python", system.python),
    ]


def gpu_lines(report: GpuReport) -> list[tuple[str, str]]:
    """The GPUs and their driver; `uneven setup` shows them, too."""
    if not report.gpus:
        return [("GPUs", f"none ({report.reason})")]
    lines = [("driver", f"NVIDIA {report.driver or '?'}, up to CUDA {report.driver_cuda or '?'}")]
    for gpu in report.gpus:
        parts = [gpu.name, gpu.sm or "sm_?", format_gib(gpu.memory_bytes), *(["MIG on"] if gpu.mig else [])]
        lines.append((f"GPU {gpu.index}", ", ".join(parts)))
    return lines


def _torch(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    build = diagnosis.torch
    if not build.installed:
        return [("torch", "not installed")]
    if build.error is not None:
        return [("torch", f"does not import: {build.error}")]
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPU build"
    return [
        ("version", f"{build.version} ({kind})"),
        ("archs", " ".join(build.archs) or "none (no GPU code)"),
        ("CPU code", f"{build.cpu_capability or '?'}, {format_count(build.threads, 'thread')}"),
    ]


def _builds(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The build for this machine, and the others that `uneven torch` keeps."""
    advice = diagnosis.advice
    lines = [] if advice.is_installed else [("for this machine", f"{advice.build or advice.kind}: {advice.action}")]
    for build in diagnosis.builds:
        text = f"torch {build.version} ({build.kind}), {' '.join(build.archs) or 'no GPU code'}"
        lines.append((f"build {build.name}", f"{text}{', active' if build.is_active else ''}"))
    return lines


def _no_nccl(diagnosis: Diagnosis) -> str:
    instead = "" if diagnosis.gpus.gpus else " (needs CUDA GPUs; ranks here use shared memory, gloo between machines)"
    return f"not in this build{instead}"


def _network(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    lines = []
    for interface in diagnosis.network.interfaces:
        if not interface.is_up and not interface.v4:
            continue  # a laptop has a dozen of these; --json lists all
        state = "up" if interface.is_up else "down"
        speed = f", {interface.speed_mbps} Mbit/s" if interface.speed_mbps else ""
        addresses = ", ".join([*interface.v4, *interface.v6]) or "no address"
        lines.append((interface.name, f"{state}, {interface.kind}{speed}: {addresses}"))
    return [*lines, ("between machines", f"{diagnosis.network.likely or 'none'}: {diagnosis.network.why}")]


def print_sections(console: "Console", by_heading: "dict[str, list[tuple[str, str]]]") -> None:
    """Lines of label and text below their headings; `uneven setup` prints in the same way."""
    from rich.table import Table
    from rich.text import Text

    for heading, lines in by_heading.items():
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


def _print(diagnosis: Diagnosis) -> None:
    from rich.text import Text

    console = new_console()
    print_sections(console, sections(diagnosis))
    # Text, not markup: an error may contain brackets. soft_wrap keeps a command on one line for copying.
    for note in diagnosis.notes:
        console.print(Text(f"Note: {note}"))
    for number, problem in enumerate(diagnosis.problems, start=1):
        console.print(Text(f"Problem {number}: {problem.what}", style="red"), soft_wrap=True)
        console.print(Text(f"  fix: {problem.fix}"), soft_wrap=True)
    count = len(diagnosis.problems)
    console.print("All fine." if count == 0 else f"{format_count(count, 'problem')}.", style="bold")
