"""A framework in the script of `uneven run` finds its ranks as under torchrun: HF Trainer, accelerate, Lightning.

They read torchrun's variables, form torch's default group and choose a device by themselves. In a rank process of ours
the group is formed from the launcher's store, over what all devices of the run can use, and the variables are set for
this process. Called by integrations/: `join_ranks` when one is imported, before the framework looks around, and
`begin_use` when a loop is attached. Under torchrun, and in a process alone, there is nothing to do.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from uneven.comm.torch_group import TorchGroup
from uneven.errors import InputError
from uneven.hardware.device import Device
from uneven.launch.context import ProcessContext, present_context

OBEYED = ("devices", "grace")  # by `uneven run` itself
_groups: list[TorchGroup] = []  # torch's default group, which lasts as long as this process


def join_ranks() -> None:
    """A collective of the ranks that `uneven run` has started; the first call counts."""
    context = present_context()
    if context is None or _groups or (device := _own_device(context)) is None:
        return
    _choose_device(device)
    environment = context.environment
    if not environment.is_launched or environment.world_size == 1:
        return
    os.environ.update(
        {
            "RANK": str(environment.rank),
            "WORLD_SIZE": str(environment.world_size),
            "LOCAL_RANK": str(environment.local_rank),
            "LOCAL_WORLD_SIZE": str(environment.local_world_size),
            "MASTER_ADDR": environment.host,
            "MASTER_PORT": str(environment.port),
            "TORCHELASTIC_RUN_ID": "uneven",  # Lightning asks whether torchrun has started it
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens none of its own
        }
    )
    devices = context.devices("auto")
    has_nccl = all(one.kind == "cuda" for one in devices) and not context.is_crowded(devices)
    nccl = torch.device(device.torch_name) if has_nccl else None
    store = environment.connect("frameworks")
    _groups.append(TorchGroup(store, environment.rank, environment.world_size, nccl))


@dataclass(frozen=True)
class Told:
    """What `uneven run` tells a loop: the speed of this rank's device (`@0.4`), and settings in place of its own."""

    speed: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)


def begin_use(world_size: int, takes: Collection[str]) -> Told:
    """A loop of so many ranks is shared: the script has used uneven. `takes`: names of settings that it can obey.

    InputError for others, and where the framework has not found the ranks.
    """
    context = present_context()
    if context is None:
        return Told()
    context.was_used = True
    given = {name: value for name, value in context.settings.items() if name not in OBEYED}
    if ignored := [name for name in given if name not in takes]:
        raise InputError(
            f"{', '.join(ignored)}: the loop is a framework's, which has settings of its own; leave it out. Allowed "
            f"are {', '.join((*OBEYED, *takes))}"
        )
    if context.environment.is_launched and world_size != context.environment.world_size:
        raise InputError(
            f"{context.environment.world_size} ranks were started, and the framework has found {world_size}: import "
            "uneven.integrations at the top of the script, before TrainingArguments, Accelerator or a Trainer is made"
        )
    device = _own_device(context)
    return Told(1.0 if device is None else device.speed, given)


def _own_device(context: ProcessContext) -> Device | None:
    """The one that was named for this process; None where it was not, or where another launcher has started it."""
    if context.environment.is_external:
        return None
    if context.is_alone and "devices" not in context.settings:
        return None
    devices = context.devices(context.settings.get("devices", "auto"))
    return devices[context.environment.rank] if context.environment.rank < len(devices) else None


def _choose_device(device: Device) -> None:
    """As accelerate is told; by itself it would take the GPU of this process's number."""
    if device.kind == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        # accelerate divides the cores anew otherwise.
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        return
    torch.cuda.set_device(device.index or 0)
    os.environ["ACCELERATE_TORCH_DEVICE"] = device.torch_name
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # its DDP takes the params' device, not that number
