"""The modes of the benchmark: a mode fixes the devices, the policy and the backend of a run.

solo-N        the N-th device alone, on the cores that it has among the others
sync          equal batches through `Ddp.setup` and a user-written loop (single/own_loop.py); one device is enough
cpu-sync      equal batches on all devices, gradients summed over Gloo
cpu-balanced  the same with batches by speed
cpu-cadence   each device steps by itself; params are averaged in rounds that it waits for
cpu-async     the same with rounds in the background
nccl-...      the same four on CUDA devices over NCCL
torch-ddp     PyTorch's DistributedDataParallel, for comparison
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from uneven.config import POLICIES
from uneven.errors import InputError
from uneven.hardware.cores import assign_cores, available_cores
from uneven.hardware.device import parse_devices

_BY_BACKEND = {f"{backend}-{policy}": (policy, backend) for backend in ("cpu", "nccl") for policy in POLICIES}
OWN_LOOP = {"sync": ("sync", "auto")}  # mode -> policy, backend
JOINT = {**_BY_BACKEND, "torch-ddp": ("sync", "auto")}  # mode -> policy, backend
NAMES = ("solo-0", "solo-1", *OWN_LOOP, *JOINT)
PAIR = "cpu,cpu@0.4"  # a mismatched pair that every machine has


@dataclass(frozen=True)
class Mode:
    """A mode on given devices. `cores` pins a solo run to the cores that its device has in a joint run."""

    name: str
    devices: str
    policy: str = "balanced"
    backend: str = "auto"
    is_torch_ddp: bool = False
    is_own_loop: bool = False
    cores: tuple[int, ...] = ()


def run_folder(root: Path, model: str, mode: str, seed: int) -> Path:
    """Where a run's results go, below the folder of a sweep."""
    return root / model / mode / f"seed-{seed}"


def limit_threads(count: int) -> None:
    """Give a solo run the threads that its device has in a joint run; 0 changes nothing. Call before torch is imported.

    The math libraries choose their kernels by the OpenMP threads at import. A rank process is started with its own
    number; a solo run that was started with all cores and limited to one later was 9 % slower (LeNet, Arm), which
    flattered all other modes.
    """
    if count:
        os.environ.update({name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")})


def resolve_mode(name: str, devices: str | None) -> Mode:
    """`devices` as the user gave them, or None for the mode's own."""
    policy, backend = {**OWN_LOOP, **JOINT}.get(name, ("balanced", "auto"))
    if name in OWN_LOOP:
        return Mode(name, devices or PAIR, policy, backend, is_own_loop=True)
    if name in JOINT:
        chosen = devices or PAIR
        if len(parse_devices(chosen)) < 2:
            raise InputError(f"mode {name!r} needs at least two devices, got {chosen!r}: pass --devices {PAIR}")
        return Mode(name, chosen, policy, backend, is_torch_ddp=name == "torch-ddp")
    match = re.fullmatch(r"solo-(\d+)", name)
    if match is None:
        raise InputError(f"unknown mode {name!r}: choose solo-N, {', '.join(NAMES[2:])}; run 'uneven bench list'")
    place = int(match[1])
    if devices is None and place == 0:
        return Mode(name, "auto")
    ranks = parse_devices(devices or PAIR)
    if place >= len(ranks):
        raise InputError(f"mode {name!r} needs {place + 1} devices, got {devices!r}: pass --devices with as many")
    if len(ranks) == 1:
        return Mode(name, str(ranks[0]))
    return Mode(name, str(ranks[place]), cores=assign_cores(ranks, available_cores()).cores[place])
