"""`uneven devices`: list the devices of this machine and, with --measure, their speeds and what those allow.

Measuring trains a small network on all devices at the same time.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.cli import complete
from uneven.errors import InputError
from uneven.format import format_gib

if TYPE_CHECKING:
    from uneven.hardware.cores import CorePlan
    from uneven.hardware.device import Device
    from uneven.hardware.measure import DeviceSpeed


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
    from uneven.hardware.cores import assign_cores, available_cores
    from uneven.hardware.device import parse_devices

    if not 0.1 <= seconds <= 600:
        raise InputError(f"--seconds {seconds:g}: allowed is 0.1 to 600; run 'uneven devices --measure'")
    chosen = parse_devices(names) if names is not None else None
    rows, notes = _device_rows(chosen)
    if not measure:
        plan = assign_cores(chosen, available_cores()) if chosen else None
        _print(rows, notes, plan, [], as_json, is_choice=chosen is not None)
        return

    from uneven.hardware.measure import measure as measure_devices
    from uneven.hardware.preflight import refuse_unsupported, usable_devices

    refuse_unsupported()
    if chosen is None:
        # The devices of a run with "auto"; without GPUs that is the cpu, and torch need not be queried.
        chosen = tuple(usable_devices()) if len(rows) > 1 else parse_devices("cpu")
        rows.sort(key=lambda row: row["device"] not in map(str, chosen))
    plan = assign_cores(chosen, available_cores())
    with _spinner(is_shown=not as_json and sys.stderr.isatty()) as on_phase:
        measured = measure_devices(chosen, plan, seconds=seconds, on_phase=on_phase)
    _print(rows, notes, plan, measured, as_json, is_choice=names is not None)


def _device_rows(chosen: "Sequence[Device] | None") -> tuple[list[dict[str, Any]], list[str]]:
    """A table row for each chosen device, or for each device of the machine, and notes about them."""
    from uneven.hardware.device import Device
    from uneven.hardware.gpus import Gpu, read_gpus
    from uneven.hardware.inventory import VisibleGpus, read_visible, why_unusable
    from uneven.hardware.preflight import check_device
    from uneven.hardware.system import read_system
    from uneven.hardware.torchbuild import read_torch

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
    cores = system.available_cores
    by_index = {gpu.index: gpu for gpu in gpus}

    def row(device: Device) -> dict[str, Any]:
        if device.index is None:
            name = system.cpu.model or system.cpu.architecture
            cells: tuple[Any, ...] = (name, system.memory_bytes, system.cpu.architecture, len(cores))
        else:
            gpu = by_index.get(device.index, Gpu(device.index, "CUDA device"))
            cells = (gpu.name, gpu.memory_bytes, gpu.sm, gpu.cores)
        return {"device": str(device)} | dict(zip(("name", "memory_bytes", "arch", "cores"), cells, strict=True))

    listed = chosen or (Device("cpu"), *(Device("cuda", gpu.index) for gpu in gpus))
    return [row(device) for device in listed], notes


@contextmanager
def _spinner(is_shown: bool) -> "Iterator[Callable[[str], None]]":
    """Yield a callback that shows the current phase on stderr; it does nothing unless `is_shown`."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("measuring") as status:
        yield lambda phase: status.update(f"measuring: {phase}")


def verdict(speeds: Sequence[float]) -> str:
    """What these speeds allow, as one sentence."""
    from uneven.hardware import yardstick

    return (
        f"Equal-batch DDP could reach at most {yardstick.ddp_bound(speeds):.0%} of what you own "
        f"({yardstick.ddp_over_fast(speeds):.2f}x your fast device); "
        f"everything together is {yardstick.joint_over_fast(speeds):.2f}x your fast device."
    ).replace("%", " %")


def _print(
    rows: list[dict[str, Any]],
    notes: list[str],
    plan: "CorePlan | None",
    measured: "list[DeviceSpeed]",
    as_json: bool,
    is_choice: bool,
) -> None:
    if plan is not None and plan.note is not None:
        notes.append(plan.note)
    if as_json:
        print(json.dumps(_to_json(rows, notes, plan, measured, is_choice), indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device", no_wrap=True)
    table.add_column("name", overflow="fold")
    for heading in ("memory", "arch", "cores", *(["samples/s", "range"] if measured else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    cores = _cores_by_row(rows, plan, is_choice)
    for index, row in enumerate(rows):
        memory = format_gib(row["memory_bytes"]) if row["memory_bytes"] else "-"
        cells = [row["device"], row["name"] or "-", memory, row["arch"] or "-", cores[index]]
        if measured:
            speed = measured[index] if index < len(measured) else None
            cells += [f"{speed.speed:,.0f}", f"{speed.slowest:,.0f}-{speed.fastest:,.0f}"] if speed else ["-", "-"]
        table.add_row(*cells)
    console.print(table)
    for line in _summary_lines(measured):
        console.print(line)
    for note in notes:
        console.print(f"Note: {note}")


def _cores_by_row(rows: list[dict[str, Any]], plan: "CorePlan | None", is_choice: bool) -> list[str]:
    """The number of cores of each device; for chosen CPU devices the number that each rank gets."""
    counts = [str(row["cores"] or "-") for row in rows]
    if plan is not None and is_choice and plan.pinned:
        for index, cores in enumerate(plan.cores):
            if rows[index]["device"].startswith("cpu"):
                counts[index] = str(len(cores))
    return counts


def _summary_lines(measured: "list[DeviceSpeed]") -> list[str]:
    from uneven.hardware.yardstick import gap

    if not measured:
        return []
    first = measured[0].device
    if len(measured) == 1:
        second = f"{first.torch_name},{first.torch_name}@0.4"
        return [
            "Only one device, so there is nothing to share. To simulate a second device:",
            f"  uneven devices {second} --measure",
        ]
    speeds = [speed.speed for speed in measured]
    lines = [f"Measured gap (fastest / slowest): {gap(speeds):.2f}", verdict(speeds)]
    if any(speed.device.speed < 1 for speed in measured):
        lines.insert(1, "A simulated speed (@) is not exact: the measured gap is the one that counts.")
    return lines


def _to_json(
    rows: list[dict[str, Any]],
    notes: list[str],
    plan: "CorePlan | None",
    measured: "list[DeviceSpeed]",
    is_choice: bool,
) -> dict[str, Any]:
    import uneven
    from uneven.hardware import yardstick

    for index, row in enumerate(rows):
        if plan is not None and is_choice:
            row["pinned_to"] = list(plan.cores[index])
        if index < len(measured):
            speed = measured[index]
            row |= {"samples_per_s": speed.speed, "slowest": speed.slowest, "fastest": speed.fastest}
    result: dict[str, Any] = {"version": uneven.__version__, "devices": rows, "notes": notes}
    if measured:
        speeds = [speed.speed for speed in measured]
        result["measured"] = {
            "gap": yardstick.gap(speeds),
            "ddp_bound": yardstick.ddp_bound(speeds),
            "ddp_over_fast": yardstick.ddp_over_fast(speeds),
            "joint_over_fast": yardstick.joint_over_fast(speeds),
        }
    return result
