"""`uneven diagnose`: the hardware report, with every problem and the command that fixes it.

Exit code 0 when all is fine, 3 when there is a problem. No GPU is not a problem.
"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from uneven.errors import MachineError

if TYPE_CHECKING:
    from uneven.hardware.diagnosis import Diagnosis

_SAYS = {"OK": "green", "JIT": "yellow", "MISSING": "red"}


def diagnose(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report the system, GPUs, torch, what fits together, and for each problem the command that fixes it.

    Exit code 0 when all is fine, 3 when this machine has a problem that stops or breaks training. Examples:

    uneven diagnose           the report

    uneven diagnose --json    the same for a script or a bug report
    """
    from uneven.hardware.diagnosis import diagnose as look

    found = look()
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _print(found)
    raise typer.Exit(0 if found.is_fine else MachineError.exit_code)


def sections(found: "Diagnosis") -> dict[str, list[tuple[str, str]]]:
    """The report as headings with (label, text) lines; plain text, no markup."""
    return {
        "System": _system(found),
        "GPUs and driver": _gpus(found),
        "torch build": _torch(found),
        "Compatibility": _compatibility(found),
        "Precision": [(one.device, f"{one.precision}  {one.name}: {one.why}") for one in found.precision],
        "Backends": [
            ("gloo", "available" if found.torch.gloo else "missing"),
            (
                "nccl",
                f"available {found.torch.nccl_version or ''}".strip() if found.torch.nccl else _no_nccl(found),
            ),
        ],
        "Network": _network(found),
    }


def _compatibility(found: "Diagnosis") -> list[tuple[str, str]]:
    lines = []
    for one in found.compatibility:
        name = f"{one.gpu.name} ({one.gpu.sm or 'sm_?'})"
        lines.append((f"GPU {one.gpu.index}", f"{one.support.value}  {name}: {one.detail}"))
    return lines or [("GPUs", "none to check")]


def _gib(number: int | None) -> str:
    return "?" if number is None else f"{number / 2**30:.1f} GiB"


def _count(number: int | None, noun: str) -> str:
    return f"{'?' if number is None else number} {noun}{'' if number == 1 else 's'}"


def _system(found: "Diagnosis") -> list[tuple[str, str]]:
    system, cpu, around = found.system, found.system.cpu, found.system.surroundings
    shape = ", ".join([_count(cpu.sockets, "socket"), _count(cpu.cores, "core"), _count(cpu.threads, "thread")])
    quota = f" (quota {system.cpu_quota:g})" if system.cpu_quota is not None else ""
    limited = " (cgroup limit)" if system.memory_is_limited else ""
    engine = "engine answers" if around.docker_engine else "no engine answers"
    lines = [
        ("OS", f"{system.os_name or system.platform}, kernel {system.kernel or '?'}"),
        ("CPU", f"{cpu.model or 'unknown model'} ({cpu.architecture}): {shape}"),
        ("usable cores", f"{len(system.available_cores)}{quota}"),
        ("bf16 flags", ", ".join(cpu.flags) or "none"),
        ("memory", f"{_gib(system.memory_bytes)}{limited}, {_gib(system.memory_available_bytes)} available"),
        ("Python", system.python),
        ("container", around.container or "none"),
        ("Docker", f"{around.docker_client or 'no client'}, {engine}"),
    ]
    if around.wsl is not None:
        lines.insert(1, ("WSL", str(around.wsl)))
    return lines


def _gpus(found: "Diagnosis") -> list[tuple[str, str]]:
    report = found.gpus
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
        lines.append(("MPS", "the daemon runs"))
    return lines


def _torch(found: "Diagnosis") -> list[tuple[str, str]]:
    build = found.torch
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


def _no_nccl(found: "Diagnosis") -> str:
    return "not in this build" + ("" if found.gpus.gpus else " (needs CUDA GPUs; ranks here use gloo)")


def _network(found: "Diagnosis") -> list[tuple[str, str]]:
    lines = []
    for one in found.interfaces:
        if not one.is_up and not one.v4:
            continue  # a laptop has a dozen of these; --json lists them all
        state = "up" if one.is_up else "down"
        speed = f", {one.speed_mbps} Mbit/s" if one.speed_mbps else ""
        addresses = ", ".join([*one.v4, *one.v6]) or "no address"
        lines.append((one.name, f"{state}, {one.kind}{speed}: {addresses}"))
    chosen = f"{found.likely}: {found.likely_why}" if found.likely else f"none: {found.likely_why}"
    return [*lines, ("between machines", chosen)]


def _print(found: "Diagnosis") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    for heading, lines in sections(found).items():
        console.print(Text(heading, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=18, no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines:
            word = text.split(" ", 1)[0]
            shown = Text(text)
            if word in _SAYS:
                shown.stylize(_SAYS[word], 0, len(word))
            table.add_row(Text(f"  {label}"), shown)
        console.print(table)
    # Text, not markup: an error may hold brackets. soft_wrap keeps a command on one line, ready to copy.
    for note in found.notes:
        console.print(Text(f"Note: {note}"))
    for number, problem in enumerate(found.problems, start=1):
        console.print(Text(f"Problem {number}: {problem.what}", style="red"), soft_wrap=True)
        console.print(Text(f"  fix: {problem.fix}"), soft_wrap=True)
    count = len(found.problems)
    console.print("All fine." if count == 0 else f"{count} problem{'s' if count > 1 else ''}.", style="bold")
