"""`uneven devices`: list the devices of this machine and, with --measure, their speeds and what those allow.

Measuring trains a small network on all devices at the same time.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import typer

import uneven
from uneven.cli import complete
from uneven.cli.output import Json, new_console, print_json
from uneven.errors import InputError
from uneven.files import ABSENT
from uneven.format import format_gib
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.gpus import Gpu, VisibleGpus, read_gpus, read_visible, usable_devices, why_unusable
from uneven.hardware.preflight import check_device, refuse_unsupported
from uneven.hardware.system import read_system
from uneven.hardware.torchbuild import read_torch
from uneven.hardware.yardstick import Yardstick


@dataclass
class DeviceRow:
    """One device, with its speeds where they were measured."""

    device: str
    name: str | None
    memory_bytes: int | None
    arch: str | None
    cores: int | None
    pinned_to: tuple[int, ...] | None = field(default=None, metadata=ABSENT)  # cores, of chosen devices
    samples_per_s: float | None = field(default=None, metadata=ABSENT)


@dataclass(frozen=True)
class Listed:
    """What --json prints."""

    version: str  # of uneven
    devices: list[DeviceRow]
    notes: list[str]
    measured: Yardstick | None = field(default=None, metadata=ABSENT)


def devices(
    names: Annotated[
        str | None,
        typer.Argument(
            metavar="DEVICES",
            help="Devices to look at, as in cuda:0,cpu or cpu,cpu@0.4 (@: slower by sleeping; %: a slice of a GPU).",
            show_default=False,
            autocompletion=complete.devices,
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Train a small network on all of them side by side.")
    ] = False,
    as_json: Json = False,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long to measure.", hidden=True, show_default=True)
    ] = 5.0,
) -> None:
    """List the devices of this machine; with --measure their speeds and what DDP could reach at most.

    Examples:

    uneven devices                          what this machine has

    uneven devices --measure                how fast it is, in about 10 s

    uneven devices cpu,cpu@0.4 --measure    with a simulated slow second device
    """
    if not 0.1 <= seconds <= 600:
        raise InputError(f"--seconds {seconds:g}: allowed is 0.1 to 600; run 'uneven devices --measure'")
    chosen = parse_devices(names) if names is not None else None
    rows, notes = _device_rows(chosen)
    speeds: list[float] = []
    plan = assign_cores(chosen, available_cores()) if chosen else None
    if measure:
        refuse_unsupported()
        # The devices of a run with "auto"; without GPUs that is the cpu, and torch need not be queried.
        tried = chosen or (tuple(usable_devices()) if len(rows) > 1 else parse_devices("cpu"))
        rows.sort(key=lambda row: chosen is None and row.device not in map(str, tried))
        tried_plan = assign_cores(tried, available_cores())
        speeds = _measure(tried, seconds, is_shown=not as_json and sys.stderr.isatty())
        notes += [] if plan is not None or tried_plan.note is None else [tried_plan.note]
    for index, row in enumerate(rows if plan is not None else ()):
        row.pinned_to = None if plan is None else plan.cores[index]
    for row, speed in zip(rows, speeds, strict=False):
        row.samples_per_s = speed
    notes += [] if plan is None or plan.note is None else [plan.note]
    yardstick = Yardstick.of(speeds) if speeds else None
    if as_json:
        print_json(Listed(uneven.__version__, rows, notes, yardstick))
    else:
        _print(rows, notes, yardstick)


def _device_rows(chosen: Sequence[Device] | None) -> tuple[list[DeviceRow], list[str]]:
    """A table row for each chosen device, or for each device of the machine, and notes about them."""
    for device in dict.fromkeys(chosen or ()):
        check_device(device)
    system, report = read_system(), read_gpus()
    visible, gpus = VisibleGpus(), report.gpus
    notes: list[str] = []
    if report.gpus:
        # Importing torch takes seconds, but only torch knows which GPU is cuda:0.
        build = read_torch()
        visible = read_visible(build, report)
        gpus = visible.gpus or report.gpus
        for gpu in gpus:
            reason = visible.error if not visible.gpus else why_unusable(gpu, build)
            if reason:
                notes.append(f"cuda:{gpu.index} cannot be used: {reason}; run 'uneven diagnose' for the fix")
    by_index = {gpu.index: gpu for gpu in gpus}

    def row(device: Device) -> DeviceRow:
        if device.index is None:
            name, cores = system.cpu.model or system.cpu.architecture, len(system.available_cores)
            return DeviceRow(str(device), name, system.memory_bytes, system.cpu.architecture, cores)
        gpu = by_index.get(device.index, Gpu(device.index, "CUDA device"))
        return DeviceRow(str(device), gpu.name, gpu.memory_bytes, gpu.sm, gpu.cores)

    return [row(device) for device in chosen or (Device("cpu"), *(Device("cuda", gpu.index) for gpu in gpus))], notes


def _measure(devices: Sequence[Device], seconds: float, is_shown: bool) -> list[float]:
    from rich.console import Console

    from uneven.cli.device_speeds import measure_devices

    with Console(stderr=True).status("measuring: all of them train side by side") if is_shown else nullcontext():
        return measure_devices(devices, seconds)


def _print(rows: Sequence[DeviceRow], notes: Sequence[str], yardstick: Yardstick | None) -> None:
    from rich import box
    from rich.table import Table

    console = new_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device", no_wrap=True)
    table.add_column("name", overflow="fold")
    for heading in ("memory", "arch", "cores", *(["samples/s"] if yardstick else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        memory = format_gib(row.memory_bytes) if row.memory_bytes else "-"
        own = row.pinned_to if row.device.startswith("cpu") else None
        cells = [row.device, row.name or "-", memory, row.arch or "-", str(len(own) if own else row.cores or "-")]
        if yardstick is not None:
            cells.append("-" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}")
        table.add_row(*cells)
    console.print(table)
    if yardstick is not None:
        console.print("\n".join(_summary([row.device for row in rows if row.samples_per_s is not None], yardstick)))
    for note in notes:
        console.print(f"Note: {note}")


def _summary(measured: Sequence[str], yardstick: Yardstick) -> list[str]:
    if len(measured) == 1:
        name = measured[0]
        return [
            "Only one device, so there is nothing to share. To simulate a second device:",
            f"  uneven devices {name},{name}@0.4 --measure",
        ]
    lines = [f"Measured gap (fastest / slowest): {yardstick.gap:.2f}"]
    if any("@" in device for device in measured):
        lines.append("A simulated speed (@) is not exact: the measured gap is the one that counts.")
    return [
        *lines,
        f"Equal-batch DDP could reach at most {100 * yardstick.ddp_bound:.0f} % of what you own "
        f"({yardstick.ddp_over_fast:.2f}x your fast device); "
        f"everything together is {yardstick.joint_over_fast:.2f}x your fast device.",
    ]
