"""Do the devices of a run match? Judged by what is known before anything is trained, and said in one sentence."""

from collections.abc import Sequence

from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu

GIB = 2**30


def describe_devices(
    devices: Sequence[Device], gpus: Sequence[Gpu] = (), advice: str = "", is_one_machine: bool = True
) -> str:
    """'2 devices, mismatched: cpu, cpu@0.4 (advice)'; the advice is left out where devices are alike.

    `gpus` are this machine's, by CUDA's numbers. Nothing is called alike that is not known: neither GPUs of another
    machine nor those that could not be read.
    """
    known = {gpu.index: gpu for gpu in gpus} if is_one_machine else {}
    found = [known.get(device.index) if device.index is not None else None for device in devices]
    labels = _labels(found)
    if len(devices) == 1:
        return f"1 device: {devices[0]}" + (f" ({labels[0]})" if labels[0] else "")
    count = f"{len(devices)} devices"
    is_known = is_one_machine and all(
        gpu is not None or device.kind == "cpu" for device, gpu in zip(devices, found, strict=True)
    )
    is_mixed = _is_mixed(devices, labels)
    if is_known and not is_mixed:
        names = ", ".join(str(device) for device in devices)
        return f"{count}, alike: {names}" + (f" ({labels[0]})" if labels[0] else "")
    names = ", ".join(f"{device} {label}".strip() for device, label in zip(devices, labels, strict=True))
    judged = ", mismatched" if is_mixed else "" if is_one_machine else " on several machines"
    return f"{count}{judged}: {names}" + (f" ({advice})" if advice else "")


def _is_mixed(devices: Sequence[Device], labels: Sequence[str]) -> bool:
    """An unread GPU has no label; it differs from a read one only in what we know of it."""
    marks = {(device.kind, device.speed, device.percent) for device in devices}
    read = {label for label in labels if label}
    return len(marks) > 1 or len(read) > 1


def _labels(found: Sequence[Gpu | None]) -> list[str]:
    """The GPUs' names; with their memory where one name stands for several sizes."""
    sizes: dict[str, set[int | None]] = {}
    for gpu in found:
        if gpu is not None:
            sizes.setdefault(gpu.name, set()).add(_gigabytes(gpu))
    return [
        "" if gpu is None else gpu.name if len(sizes[gpu.name]) == 1 else f"{gpu.name} {_gigabytes(gpu)} GB"
        for gpu in found
    ]


def _gigabytes(gpu: Gpu) -> int | None:
    # Boards of one kind differ by some MB, which makes them no worse a match.
    return None if gpu.memory_bytes is None else round(gpu.memory_bytes / GIB)
