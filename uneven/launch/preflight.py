"""Before anything starts: resolve the devices, refuse what cannot work, print the configuration once.

The same for every entry point. Among ranks that somebody else started, the first one alone prints and writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from uneven.comm.group import has_nccl
from uneven.config import RunConfig, Task, check_task
from uneven.data.replay import read_log
from uneven.errors import InputError
from uneven.files import make_out_folder
from uneven.hardware.backend import choose_backend, is_crowded
from uneven.hardware.device import Device, parse_devices
from uneven.hardware.gpus import Gpu, read_gpus
from uneven.hardware.inventory import read_visible, usable_devices
from uneven.hardware.match import describe_devices
from uneven.hardware.mps import check_slices
from uneven.hardware.precision import choose_precision
from uneven.hardware.preflight import check_device, refuse_unsupported
from uneven.hardware.system import read_system
from uneven.hardware.torchbuild import read_torch
from uneven.launch.context import ProcessContext
from uneven.policy.axis import Axis
from uneven.results.progress import Reporter
from uneven.version import __version__


@dataclass(frozen=True)
class Prepared:
    """What is to be trained where, checked; `reporter` is silent on all ranks but the first."""

    config: RunConfig
    devices: tuple[Device, ...]
    reporter: Reporter


def prepare(task: Task, config: RunConfig, context: ProcessContext | None, title: str = "train") -> Prepared:
    """InputError or MachineError where this cannot be trained; else the configuration is printed."""
    refuse_unsupported()
    check_task(task)
    if context is not None:
        devices = context.devices(config.devices)
    elif config.devices == "auto":
        devices = tuple(usable_devices())
    else:
        devices = parse_devices(config.devices)
    config, road = settle(config, devices, context)
    if config.replay is not None:
        config = _check_replay(task, config, len(devices))
    is_lead = context is None or context.rank == 0
    if config.out is not None and is_lead:
        make_out_folder(config.out)
    reporter = Reporter(config.progress if is_lead else "off", title)
    if is_lead:
        local = devices if context is None else context.of_this_machine(devices)
        found = describe_devices(devices, _visible_gpus(devices), _advice(config), len(local) == len(devices))
        reporter.say([*describe(task, config, devices, found), *road])
    if context is not None and context.note:
        reporter.say([f"  {context.note}"])
    return Prepared(config, devices, reporter)


def settle(
    config: RunConfig, devices: tuple[Device, ...], context: ProcessContext | None = None
) -> tuple[RunConfig, list[str]]:
    """The settings with what 'auto' means on these devices, and what is to be said of it; raises where it cannot be."""
    for device in devices:
        check_device(device)
    config = _resolve_precision(config, devices)
    _check_together(config, devices)
    return _resolve_backend(config, devices, context)


def describe(task: Task, config: RunConfig, devices: tuple[Device, ...], found: str) -> Sequence[str]:
    """The resolved configuration as it is printed at the start; `found` is the sentence about the devices."""
    steps = -(-len(task.dataset) // config.slot_size(len(devices)))
    batch = f"{config.batch_size}" + (f" x {config.accumulate} accumulated" if config.accumulate > 1 else "")
    precision = config.precision
    if precision == "fp32" and any(device.kind == "cuda" for device in devices):
        precision += " (matrix products in TF32)"
    lines = [
        f"uneven {__version__}: {len(task.dataset):,} samples, {config.epochs} epochs of {steps:,} steps",
        f"  {found}",
        f"  batch {batch}   precision {precision}   compile {config.compile}   seed {config.seed}",
    ]
    if len(devices) > 1:
        policy = config.policy if config.replay is None else f"as in {config.replay}"
        whose = "on each device" if config.is_local else "over all devices"
        strategy = "" if config.strategy is None else f"   strategy {config.strategy}"
        lines.append(f"  policy {policy}{strategy}   {config.slot_size(len(devices))} samples a step {whose}")
    if any(device.speed < 1 for device in devices):
        lines.append("  a device with @ is simulated: it sleeps after each step, so its speed is not exact")
    return lines


def _advice(config: RunConfig) -> str:
    """What becomes of devices that do not match."""
    if config.is_model_parallel:
        return "all of them train the same samples, each its part of every layer"
    if config.has_fixed_shares:
        return "shares as in the log" if config.replay is not None else "shares as given"
    if config.policy == "sync":
        return "policy sync waits for the slowest in every step; 'balanced' would not wait"
    ways = {
        "balanced": "gives samples by speed",
        "cadence": "gives batches by speed",
        "async": "lets each take batches at its own speed",
    }
    return f"speeds are measured as it trains; policy {config.policy} {ways[config.policy]}"


def _check_replay(task: Task, config: RunConfig, ranks: int) -> RunConfig:
    """Refuse a log that does not fit before anything starts; the ranks read it once more by themselves."""
    assert config.replay is not None, "asked only for a replay"
    if config.out is not None and config.out.resolve() == config.replay.resolve():
        raise InputError(f"out={str(config.out)!r} is the run to be replayed and would be moved aside; choose another")
    axis = Axis(len(task.dataset), config.slot_size(ranks), config.epochs)
    read_log(config.replay, axis, ranks, config.to_json(), config.is_local)
    return replace(config, replay=config.replay.resolve())


def _resolve_precision(config: RunConfig, devices: tuple[Device, ...]) -> RunConfig:
    if config.precision != "auto":
        return config
    gpus = {gpu.index: gpu for gpu in _visible_gpus(devices)}
    system = read_system()
    found = {choose_precision(device, system, gpus.get(device.index or 0))[0] for device in devices}
    # One model has one format on all devices; where they would choose differently, the one that all have.
    return replace(config, precision=found.pop() if len(found) == 1 else "fp32")


def _visible_gpus(devices: tuple[Device, ...]) -> tuple[Gpu, ...]:
    """The GPUs of this machine, by CUDA's numbers; none where no device is one."""
    has_cuda = any(device.kind == "cuda" for device in devices)
    return read_visible(read_torch(), read_gpus()).gpus if has_cuda else ()


def _resolve_backend(
    config: RunConfig, devices: tuple[Device, ...], context: ProcessContext | None
) -> tuple[RunConfig, list[str]]:
    """The backend that is meant, and a line that says why where there was a choice."""
    if len(devices) == 1:
        return config, []
    crowded = is_crowded(devices if context is None else context.of_this_machine(devices))
    backend, why = choose_backend(config.backend, devices, has_nccl(), crowded)
    has_choice = any(device.kind == "cuda" for device in devices)
    return replace(config, backend=backend), [f"  backend {backend}: {why}"] if has_choice else []


def _check_together(config: RunConfig, devices: tuple[Device, ...]) -> None:
    """Refuse settings that are right by themselves but not with each other or these devices."""
    names = ",".join(str(device) for device in devices)
    check_slices(devices)
    config.caps(len(devices))  # raises where there are not as many
    others = ",".join(str(device) for device in devices if device.kind != "cuda")
    if config.compile == "graph" and others:
        raise InputError(
            f"compile='graph' captures a CUDA graph, which {others} has not; use compile='off' or 'default'"
        )
    if len(devices) == 1:
        return
    for name in ("shares", "memory_shares"):
        given = getattr(config, name)
        if given is not None and len(given) != len(devices):
            raise InputError(f"{name}={given!r} has {len(given)} entries for {len(devices)} devices: {names}")
    if config.shares is not None and config.policy == "sync":
        raise InputError("shares=... with policy='sync' contradict each other: sync shares equally; use 'balanced'")
    if config.shares is not None and config.policy == "async":
        raise InputError("shares=... with policy='async': there devices claim batches as they come; use 'cadence'")
    if config.sync_batchnorm and config.is_local:
        raise InputError(
            f"sync_batchnorm=True with policy={config.policy!r}: devices step at their own times and cannot meet in "
            "every layer; their statistics are averaged in each round. Leave it out, or use policy='balanced'"
        )
