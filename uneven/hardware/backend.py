"""Which backend ranks sum and average with: NCCL between CUDA devices, or Gloo through host memory."""

from collections.abc import Sequence

from uneven.config import Backend
from uneven.errors import InputError
from uneven.hardware.device import Device


def is_crowded(devices: Sequence[Device]) -> bool:
    """Whether two ranks of one machine share a CUDA device."""
    cuda = [device.index for device in devices if device.kind == "cuda"]
    return len(set(cuda)) < len(cuda)


def choose_backend(
    asked: Backend, devices: Sequence[Device], has_nccl: bool, crowded: bool | None = None
) -> tuple[Backend, str]:
    """'nccl' or 'cpu', and why; InputError where NCCL is asked for and cannot be.

    `devices` are those of all ranks; where they are on several machines, `crowded` says whether any of them is.
    """
    crowded = is_crowded(devices) if crowded is None else crowded
    names = ",".join(str(device) for device in devices)
    if asked == "cpu":
        return "cpu", "as asked"
    why_not = None
    if any(device.kind != "cuda" for device in devices):
        why_not = "NCCL needs a CUDA device for every rank"
    elif any(device.percent is not None for device in devices):
        why_not = "NCCL dead-locks between slices of one GPU"
    elif not has_nccl:
        why_not = "this torch was built without NCCL"
    if asked == "nccl":
        if why_not is not None:
            raise InputError(f"backend='nccl' with devices={names!r}: {why_not}; use backend='cpu' or 'auto'")
        crowd = ": two ranks share a GPU and take turns, fine for tests but no gain in speed"
        return "nccl", "as asked" + (crowd if crowded else "")
    if why_not is None and crowded:
        why_not = "two ranks share a GPU"
    return ("nccl", "every rank has a CUDA device of its own") if why_not is None else ("cpu", why_not)
