"""What follows from the devices of a run before it starts: precision, backend, and whether the devices match.

Called by launch/checks/preflight.py; `uneven diagnose` prints the precision too. Every choice is returned with its
reason, and both are printed.
"""

from collections.abc import Sequence

from uneven.config import Precision
from uneven.config.names import Backend
from uneven.errors import InputError
from uneven.format import GIB
from uneven.hardware.device import Device
from uneven.hardware.gpus import Gpu
from uneven.hardware.system import System
from uneven.hardware.torchbuild import parse_sm


def choose_precision(device: Device, system: System, gpu: Gpu | None) -> tuple[Precision, str]:
    """The number format of precision='auto' on a device, and the reason; `gpu` is the GPU of a CUDA device.

    Depends on this device alone: a CPU rank next to a GPU that has bf16 still gets the format of its CPU.
    """
    if device.kind == "cpu":
        if system.cpu.flags:
            return "bf16", f"the cpu has native bf16 ({', '.join(system.cpu.flags)})"
        return "fp32", "the cpu has no native bf16"
    capability = parse_sm(gpu.sm) if gpu is not None and gpu.sm is not None else None
    if gpu is None or capability is None:
        return "fp32", "the GPU's architecture is unknown"
    if capability >= (8, 0):
        return "bf16", f"{gpu.sm} has native bf16"
    if capability >= (7, 0):
        return "fp16", f"{gpu.sm} has fp16 tensor cores but no native bf16"
    return "fp32", f"{gpu.sm} has no tensor cores"


def native_precisions(device: Device, system: System, gpu: Gpu | None) -> tuple[Precision, ...]:
    """The number formats a device computes by itself; others are emulated, where they work at all."""
    if device.kind == "cpu":
        return ("fp32", "bf16") if system.cpu.flags else ("fp32",)
    capability = parse_sm(gpu.sm) if gpu is not None and gpu.sm is not None else None
    if capability is None:
        return ("fp32", "bf16", "fp16")  # unknown is no reason to refuse
    if capability >= (8, 0):
        return ("fp32", "bf16", "fp16")
    return ("fp32", "fp16") if capability >= (5, 3) else ("fp32",)


def is_crowded(devices: Sequence[Device]) -> bool:
    """Whether two of these devices, all of one machine, are the same GPU."""
    cuda = [device.index for device in devices if device.kind == "cuda"]
    return len(set(cuda)) < len(cuda)


def choose_backend(
    requested: Backend,
    devices: Sequence[Device],
    has_nccl: bool,
    crowded: bool | None = None,
    why_not_shared: str = "",
    machines: Sequence[int] = (),
) -> tuple[Backend, str]:
    """The backend for gradient sums and averages, 'nccl', 'shm' (shared memory), 'gloo' or 'cpu', and the reason.

    'cpu' is shared memory on each machine and Gloo between them. `devices` are those of all ranks. If they are on
    several machines, pass `machines`, that of each rank, and `crowded`: whether ranks of any machine share a GPU.
    `why_not_shared`: why ranks of one machine cannot share memory, '' if they can. InputError if what is requested is
    not possible.
    """
    crowded = is_crowded(devices) if crowded is None else crowded
    names = ",".join(str(device) for device in devices)
    num_machines = len(set(machines))
    if requested == "shm" and num_machines > 1:
        raise InputError(
            f"backend='shm' with devices={names!r}: the ranks are on several machines; use backend='auto' or 'cpu': "
            "shared memory on each machine, and Gloo between them"
        )
    if requested == "shm" and why_not_shared:
        raise InputError(f"backend='shm' with devices={names!r}: {why_not_shared}; use backend='gloo' or 'auto'")
    if requested in ("shm", "gloo"):
        return requested, "as requested"
    host: tuple[Backend, str] = ("gloo", f"; {why_not_shared}") if why_not_shared else ("shm", "")
    if num_machines > 1:
        each = "; ranks of a machine share memory, and one of each machine speaks over Gloo"
        host = ("gloo", "; every rank is on another machine") if num_machines == len(machines) else ("cpu", each)
    if requested == "cpu":
        return host[0], "as requested" + host[1]
    why_not = None
    if any(device.kind != "cuda" for device in devices):
        why_not = "NCCL needs a CUDA device for every rank"
    elif any(device.percent is not None for device in devices):
        why_not = "NCCL dead-locks between slices of one GPU"
    elif not has_nccl:
        why_not = "this torch was built without NCCL"
    if requested == "nccl":
        if why_not is not None:
            raise InputError(f"backend='nccl' with devices={names!r}: {why_not}; use backend='cpu' or 'auto'")
        note = ": two ranks share a GPU and take turns, fine for tests but no gain in speed"
        return "nccl", "as requested" + (note if crowded else "")
    if why_not is None and crowded:
        why_not = "two ranks share a GPU"
    return ("nccl", "every rank has a CUDA device of its own") if why_not is None else (host[0], why_not + host[1])


def describe_devices(
    devices: Sequence[Device], gpus: Sequence[Gpu] = (), advice: str = "", is_one_machine: bool = True
) -> str:
    """One line such as '2 devices, mismatched: cpu, cpu@0.4 (advice)'; without the advice if the devices are alike.

    `gpus` are this machine's, with CUDA's indices. Devices are called alike only if all are known: GPUs of another
    machine, or that could not be queried, are not. Boards of one model differ by some MB, which is no mismatch.
    """
    by_index = {gpu.index: gpu for gpu in gpus} if is_one_machine else {}
    found = [None if device.index is None else by_index.get(device.index) for device in devices]
    labels = ["" if gpu is None else gpu.name for gpu in found]
    is_seen = [gpu is not None or device.kind == "cpu" for device, gpu in zip(devices, found, strict=True)]
    is_known = is_one_machine and all(is_seen)
    settings = {(device.kind, device.speed, device.percent) for device in devices}
    boards = {(gpu.name, gpu.memory_bytes and round(gpu.memory_bytes / GIB)) for gpu in found if gpu is not None}
    is_mixed = len(settings) > 1 or len(boards) > 1
    if is_known and not is_mixed:
        names = ", ".join(map(str, devices)) + (f" ({labels[0]})" if labels[0] else "")
        return f"1 device: {names}" if len(devices) == 1 else f"{len(devices)} devices, alike: {names}"
    names = ", ".join(f"{device} {label}".strip() for device, label in zip(devices, labels, strict=True))
    if len(devices) == 1:
        return f"1 device: {names}"
    verdict = ", mismatched" if is_mixed else "" if is_one_machine else " on several machines"
    return f"{len(devices)} devices{verdict}: {names}" + (f" ({advice})" if advice else "")
