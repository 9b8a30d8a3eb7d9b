"""`uneven devices`: what this machine can train on and, with --measure, how fast and what that allows.

Lists the hardware, or the devices given; measuring trains a small network on all of them side by side.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from uneven.errors import InputError

if TYPE_CHECKING:
    from uneven.hardware.cores import CorePlan
    from uneven.hardware.device import Device
    from uneven.hardware.measure import Measured


def devices(
    names: Annotated[
        str | None,
        typer.Argument(
            metavar="DEVICES",
            help="Devices to look at, as in cuda:0,cpu or cpu,cpu@0.4 (@: slower by sleeping; %: a slice of a GPU).",
            show_default=False,
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
    rows, notes = _describe(chosen)
    if not measure:
        plan = assign_cores(chosen, available_cores()) if chosen else None
        _print(rows, notes, plan, [], as_json, is_choice=chosen is not None)
        return

    from uneven.hardware.measure import measure as measure_devices
    from uneven.hardware.preflight import refuse_unsupported, usable_devices

    refuse_unsupported()
    if chosen is None:
        # What a run with devices "auto" would take; a list without GPUs needs no torch to know it.
        chosen = tuple(usable_devices()) if len(rows) > 1 else parse_devices("cpu")
        rows.sort(key=lambda row: row["device"] not in map(str, chosen))
    plan = assign_cores(chosen, available_cores())
    with _spinner(is_shown=not as_json and sys.stderr.isatty()) as tell:
        measured = measure_devices(chosen, plan, seconds=seconds, tell=tell)
    _print(rows, notes, plan, measured, as_json, is_choice=names is not None)


def _describe(chosen: "Sequence[Device] | None") -> tuple[list[dict[str, Any]], list[str]]:
    """One row per device (of the choice, else of the machine), and what is worth saying about them."""
    from uneven.hardware.device import Device
    from uneven.hardware.gpus import Gpu, read_gpus
    from uneven.hardware.inventory import Visible, read_visible, why_unusable
    from uneven.hardware.preflight import check_device
    from uneven.hardware.system import read_system
    from uneven.hardware.torchbuild import read_torch

    for device in dict.fromkeys(chosen or ()):
        check_device(device)
    system, report = read_system(), read_gpus()
    visible, gpus = Visible(), report.gpus
    notes: list[str] = []
    if report.gpus:
        # Only now is torch worth its seconds: it alone knows which GPU is cuda:0.
        build = read_torch()
        visible = read_visible(build, report)
        gpus = visible.gpus or report.gpus
        for gpu in gpus:
            why = visible.error if not visible.gpus else why_unusable(gpu, build)
            if why:
                notes.append(f"cuda:{gpu.index} cannot be used: {why}; run 'uneven diagnose' for the fix")
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
    """A line on stderr that says what is happening; nothing when shown to nobody."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("measuring") as status:
        yield lambda phase: status.update(f"measuring: {phase}")


def verdict(speeds: Sequence[float]) -> str:
    """What these speeds allow, in one plain sentence."""
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
    measured: "list[Measured]",
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
    for place, row in enumerate(rows):
        memory = f"{row['memory_bytes'] / 2**30:.1f} GiB" if row["memory_bytes"] else "-"
        cells = [row["device"], row["name"] or "-", memory, row["arch"] or "-", cores[place]]
        if measured:
            one = measured[place] if place < len(measured) else None
            cells += [f"{one.speed:,.0f}", f"{one.slowest:,.0f}-{one.fastest:,.0f}"] if one else ["-", "-"]
        table.add_row(*cells)
    console.print(table)
    for line in _sentences(measured):
        console.print(line)
    for note in notes:
        console.print(f"Note: {note}")


def _cores_by_row(rows: list[dict[str, Any]], plan: "CorePlan | None", is_choice: bool) -> list[str]:
    """How many cores a device has; of CPU ranks that were chosen, how many each one gets."""
    shown = [str(row["cores"] or "-") for row in rows]
    if plan is not None and is_choice and plan.pinned:
        for place, cores in enumerate(plan.cores):
            if rows[place]["device"].startswith("cpu"):
                shown[place] = str(len(cores))
    return shown


def _sentences(measured: "list[Measured]") -> list[str]:
    from uneven.hardware.yardstick import gap

    if not measured:
        return []
    first = measured[0].device
    if len(measured) == 1:
        second = f"{first.torch_name},{first.torch_name}@0.4"
        return [
            "One device: there is nothing to share. To simulate a second one:",
            f"  uneven devices {second} --measure",
        ]
    speeds = [one.speed for one in measured]
    lines = [f"Measured gap (fastest / slowest): {gap(speeds):.2f}", verdict(speeds)]
    if any(one.device.speed < 1 for one in measured):
        lines.insert(1, "A simulated speed (@) is not exact: the measured gap is the one that counts.")
    return lines


def _to_json(
    rows: list[dict[str, Any]],
    notes: list[str],
    plan: "CorePlan | None",
    measured: "list[Measured]",
    is_choice: bool,
) -> dict[str, Any]:
    import uneven
    from uneven.hardware import yardstick

    for place, row in enumerate(rows):
        if plan is not None and is_choice:
            row["pinned_to"] = list(plan.cores[place])
        if place < len(measured):
            one = measured[place]
            row |= {"samples_per_s": one.speed, "slowest": one.slowest, "fastest": one.fastest}
    result: dict[str, Any] = {"version": uneven.__version__, "devices": rows, "notes": notes}
    if measured:
        speeds = [one.speed for one in measured]
        result["measured"] = {
            "gap": yardstick.gap(speeds),
            "ddp_bound": yardstick.ddp_bound(speeds),
            "ddp_over_fast": yardstick.ddp_over_fast(speeds),
            "joint_over_fast": yardstick.joint_over_fast(speeds),
        }
    return result
