"""The checks before a run starts: resolve devices and 'auto' settings, refuse what cannot work, print the result once.

Called by every entry point (launch/run.py, api/fit.py, the benchmarks). Invariant: what fails here fails before a
process is started; the folder `out` is made last. Among ranks that `uneven run` or torchrun started, rank 0 alone
prints and writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from uneven.comm.segment import why_impossible
from uneven.comm.torch_group import has_nccl
from uneven.config import RunConfig, Task, check_task, is_stream
from uneven.data.batches import check_batch
from uneven.data.epoch_order import make_axis, make_order
from uneven.data.replay import read_global_batch, read_log
from uneven.data.script_settings import refuse_changed_settings
from uneven.data.source import shard_sizes
from uneven.errors import InputError
from uneven.files import make_out_folder
from uneven.hardware.choices import choose_backend, choose_precision, describe_devices, is_crowded, native_precisions
from uneven.hardware.cores import available_cores, check_count
from uneven.hardware.device import Device, needs_ranks
from uneven.hardware.gpus import Gpu, read_gpus, read_visible
from uneven.hardware.preflight import check_device, refuse_unsupported
from uneven.hardware.system import read_system
from uneven.hardware.torchbuild import read_torch
from uneven.launch.checks.parity import (
    Among,
    DeviceFormat,
    Devices,
    check_data_parity,
    check_facts,
    check_formats,
    check_links,
    exchange_devices,
)
from uneven.launch.checks.resume import ResumePlan, check_data, check_length, go_on_in_folder, plan_resume
from uneven.launch.checks.resume_ranks import plan_together
from uneven.launch.checks.settings import begin_without, check_devices, check_functions, check_streams, keep_step_size
from uneven.launch.checks.trial import try_functions
from uneven.launch.context import ProcessContext
from uneven.launch.control.folder_lock import HeldFolder, hold_folder
from uneven.launch.control.rank_log import begin_run_log
from uneven.launch.results_file import tell_result
from uneven.policy.axis import Axis
from uneven.policy.stream_axis import StreamAxis
from uneven.results.progress import Reporter
from uneven.results.state import TrainedState
from uneven.version import __version__


@dataclass(frozen=True)
class Prepared:
    """The checked settings and devices of a run; `reporter` prints nothing on other ranks than rank 0."""

    config: RunConfig
    devices: tuple[Device, ...]
    reporter: Reporter
    finished: TrainedState | None = None  # the result of a run that was to be resumed, where nothing is left to train
    held: HeldFolder | None = None  # `out`, until the run is over
    made: Mapping[str, Mapping[str, str]] | None = None  # by the user's functions, in a trial


def prepare(task: Task, config: RunConfig, context: ProcessContext, title: str = "train") -> Prepared:
    """Check a task, print its configuration; InputError or MachineError where it cannot be trained here."""
    begin_run_log()
    refuse_unsupported()
    check_task(task)
    if context.ranks.is_newcomer:
        return _prepare_newcomer(task, config, context)
    devices = context.devices(config.devices)
    if (without := context.environment.without) is not None:
        config = begin_without(config, without, devices)
    local = context.of_this_machine(devices)
    roster = context.roster_of(devices)
    is_one_machine = len(local) == len(devices)
    among = None if is_one_machine else Among(roster, context.environment.rank, context.share)
    differing: list[str] = []
    if among is not None and context.environment.door is None:  # else the leader has compared them at its door
        differing = check_facts(config, among)
        check_links(config, among, context.environment)
    config, notes = resolve_auto(config, devices, among, context.is_crowded(devices))
    notes += differing
    check_functions(task, config, len(devices))
    check_streams(task, config, len(devices), is_one_machine=is_one_machine)
    if context.is_alone or len(devices) == 1:
        plan = plan_resume(task, config, len(devices)) if config.resume is not None else ResumePlan(config, [])
    else:
        plan = plan_together(task, config, context, roster)
    config, finished = plan.config, plan.finished
    config = config if without is None else keep_step_size(config, without)
    notes += plan.notes
    if config.global_batch_size == "auto":
        config = _check_global_batch(task, config, len(devices))
    order = make_order(task, config)
    axis = make_axis(order, config, len(devices))
    config = replace(config, epochs=axis.epochs)  # those that max_steps leaves
    if config.resume is not None:
        check_data(config, axis, order)
    elif finished is not None:
        check_length(f"run {finished.folder}", finished.dataset_samples, axis)
    check_batch(task, config, order)
    if among is not None:
        notes += check_data_parity(task, config, among)
    if config.replay is not None:
        config = _check_replay(axis, config, len(devices), roster.machines)
    made = None
    if context.is_alone and needs_ranks(devices):
        refuse_changed_settings("ranks", "pass it to your functions as an argument, or start the script by uneven run")
    # A factory that uses CUDA would initialise it here, outside the slice that its rank is to get.
    if context.is_alone and needs_ranks(devices) and not any(device.percent for device in devices):
        check_count(devices, available_cores())
        made = try_functions(task, config, axis)
    is_lead = context.rank == 0
    held = None
    if config.out is not None and is_lead and finished is None:
        lines, held = hold_folder(config.out, partial(_open_folder, config.out, config))
        notes += lines
    reporter = Reporter(config.progress if is_lead else "off", title)
    if is_lead:
        found = describe_devices(devices, _visible_gpus(local), _advice(config), is_one_machine)
        reporter.say([*describe(axis, config, devices, found), *notes])
    reporter.say(context.notes)
    if finished is not None and is_lead:
        tell_result(finished, None)  # what follows trains nothing, and has no end to tell of
    return Prepared(config, devices, reporter, finished, held, made)


def _open_folder(out: Path, config: RunConfig) -> list[str]:
    """Make the run's folder, or go on in that of the run that is resumed; lines to print."""
    if config.resume is not None and config.resume.resolve().parent == out.resolve():
        return go_on_in_folder(out, config.resume)
    moved = make_out_folder(out, config.overwrite)
    return [] if moved is None else [f"  the files of an earlier run in {out} were moved to {moved}"]


def _prepare_newcomer(task: Task, config: RunConfig, context: ProcessContext) -> Prepared:
    """Of a rank that joins a run in progress: the settings are the run's; model and data are compared later."""
    devices = context.devices(config.devices)
    check_device(devices[context.environment.rank])
    config = context.settings_of_run(config)
    check_batch(task, config, make_order(task, config))
    return Prepared(config, devices, Reporter("off"))


def resolve_auto(
    config: RunConfig, devices: tuple[Device, ...], among: Among | None = None, crowded: bool | None = None
) -> tuple[RunConfig, list[str]]:
    """The settings with 'auto' resolved for these devices, and lines that explain the choices.

    `among` where the devices are on several machines: every rank looks at its own, and all of them take the same.
    `crowded`: ranks share a GPU; without it devices of the same name are the same one.
    InputError or MachineError where settings and devices do not fit together.
    """
    for device in devices if among is None else among.local:
        check_device(device)
    known = _look_at(devices, among, is_crowded(devices) if crowded is None else crowded)
    config, precision_notes = _resolve_precision(config, known)
    check_devices(config, devices)
    config, backend_notes = _resolve_backend(config, devices, known, () if among is None else among.roster.machines)
    return config, [*precision_notes, *backend_notes]


def _look_at(devices: tuple[Device, ...], among: Among | None, crowded: bool) -> Devices:
    """What each device computes; on several machines each rank looks at its own and tells the others."""
    own = devices if among is None else (devices[among.rank],)
    gpus = {gpu.index: gpu for gpu in _visible_gpus(own)}
    system = read_system()
    formats = []
    for device in own:
        gpu = gpus.get(device.index or 0)
        auto, why = choose_precision(device, system, gpu)
        formats.append(DeviceFormat(str(device), auto, why, native=native_precisions(device, system, gpu)))
    if among is None:
        return Devices(formats, crowded, has_nccl())
    return exchange_devices(formats[0], crowded, has_nccl(), among)


def describe(axis: Axis, config: RunConfig, devices: tuple[Device, ...], found: str) -> Sequence[str]:
    """The resolved configuration as it is printed at the start; `found` is the sentence about the devices."""
    batch = f"{config.batch_size}" + (f" x {config.accumulate} accumulated" if config.accumulate > 1 else "")
    if len(devices) == 1 and config.slot_size(1) != config.batch_size * config.accumulate:
        batch = f"{config.slot_size(1)}"  # given as global_batch_size, or kept from a checkpoint
    precision: str = config.precision
    if precision == "fp32" and any(device.kind == "cuda" for device in devices):
        precision += " (matrix products in TF32)"
    epochs = f"{axis.epochs} epoch{'s' * (axis.epochs != 1)}"
    steps = f"{axis.slots_per_epoch:,} step{'s' * (axis.slots_per_epoch != 1)}"
    length = f"{axis.samples:,} samples, {epochs} of {steps}"
    if isinstance(axis, StreamAxis):
        length = "a stream without length" + (f", {epochs}" if config.max_steps is None else "")
    length += "" if config.max_steps is None else f"; it ends after {axis.total:,} steps"
    lines = [
        f"uneven {__version__}: {length}",
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
    """How the run treats devices of different speed, in one phrase."""
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


def _check_global_batch(task: Task, config: RunConfig, ranks: int) -> RunConfig:
    """The settings as a replay's log has them; InputError where the limit or the data leaves nothing to choose."""
    least, most = config.slot_size(ranks), config.max_global_batch_size
    if config.replay is not None:
        size, accumulate = read_global_batch(config.replay)
        return replace(config, global_batch_size=size, accumulate=accumulate, max_global_batch_size=None)
    if most is not None and most < least:
        raise InputError(
            f"max_global_batch_size={most} is below {least}, the samples of a plain step (batch_size x accumulate x "
            "devices); raise it, or make batch_size smaller"
        )
    if is_stream(task.dataset) and shard_sizes(task.dataset) is None:
        raise InputError(
            f"global_batch_size='auto' with dataset {type(task.dataset).__name__}: a stream that is read in order "
            "cannot be measured beforehand; pass a number"
        )
    return config


def _check_replay(axis: Axis, config: RunConfig, ranks: int, machines: Sequence[int]) -> RunConfig:
    """InputError where the log does not fit this run; the ranks read it again by themselves."""
    assert config.replay is not None, "called for a replay only"
    if config.out is not None and config.out.resolve() == config.replay.resolve():
        raise InputError(f"out={str(config.out)!r} is the run to be replayed and would be moved aside; choose another")
    read_log(config.replay, axis, ranks, config.to_json(), config.is_local, machines)
    return replace(config, replay=config.replay.resolve())


def _resolve_precision(config: RunConfig, known: Devices) -> tuple[RunConfig, list[str]]:
    """The number format all devices train in, and a line with the reason where there was a choice or a drawback."""
    formats = known.formats
    if any(one.host for one in formats):
        check_formats(config.precision, formats, config.skipped_checks)
    emulated = [one for one in formats if one.device.startswith("cpu") and "bf16" not in one.native]
    if config.precision == "bf16" and emulated:
        where = f"the CPU of {emulated[0].host}" if emulated[0].host else "this CPU"
        return config, [
            f"  precision bf16: {where} has no bf16 instructions, so bf16 is emulated there: slower than fp32"
        ]
    if config.precision != "auto":
        return config, []
    choices = {one.auto for one in formats}
    if len(choices) == 1:
        (chosen,) = choices
        reason = "; ".join(dict.fromkeys(one.why for one in formats))
    else:
        # One model has one format on all devices; where they would choose differently, the one that all have.
        chosen = "fp32"
        each = dict.fromkeys(f"{one.label} would take {one.auto} ({one.why})" for one in formats)
        reason = f"the devices differ: {', '.join(each)}"
    return replace(config, precision=chosen), [f"  precision auto -> {chosen}: {reason}"]


def _visible_gpus(devices: tuple[Device, ...]) -> tuple[Gpu, ...]:
    """The GPUs of this machine in CUDA's order; none where no device is a GPU."""
    has_cuda = any(device.kind == "cuda" for device in devices)
    return read_visible(read_torch(), read_gpus()).gpus if has_cuda else ()


def _resolve_backend(
    config: RunConfig, devices: tuple[Device, ...], known: Devices, machines: Sequence[int]
) -> tuple[RunConfig, list[str]]:
    """The backend that 'auto' means here, and a line with the reason where there was a choice."""
    if len(devices) == 1:
        return config, []
    is_one_machine = len(set(machines)) <= 1
    why_not_shared = why_impossible() if is_one_machine else ""  # on each of several it shows when the group forms
    backend, why = choose_backend(config.backend, devices, known.has_nccl, known.is_crowded, why_not_shared, machines)
    has_choice = why_not_shared or not is_one_machine or any(device.kind == "cuda" for device in devices)
    return replace(config, backend=backend), [f"  backend {backend}: {why}"] if has_choice else []
