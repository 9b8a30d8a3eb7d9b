"""Settings that are right by themselves and cannot work with these devices, functions or data: refused with the fix.

Called by launch/checks/preflight.py, before any rank is started.
"""

from dataclasses import replace

from uneven.config import SHARDED, RunConfig, Task, is_stream
from uneven.data.source import count_samples, shard_sizes
from uneven.errors import InputError, RefusedError
from uneven.format import format_count
from uneven.hardware.device import Device
from uneven.hardware.mps import check_slices
from uneven.launch.environment import BegunWithout
from uneven.step.schedule import takes_length
from uneven.train.settle import config_of


def begin_without(config: RunConfig, without: BegunWithout, devices: tuple[Device, ...]) -> RunConfig:
    """The settings for the devices that are left where others were lost before the first step; an error where they do
    not go with those."""
    if config.on_fault == "end" or config.replay is not None:
        fixed = "on_fault='end'" if config.on_fault == "end" else "it is a replay"
        raise RefusedError(f"{without.why}, and this run needs all of them: {fixed}")
    config = replace(config_of(config, without.left), devices=",".join(map(str, devices)))
    check_devices(config, devices)
    return config


def keep_step_size(config: RunConfig, without: BegunWithout) -> RunConfig:
    """The same samples in an exact step as with all devices; a checkpoint has its own."""
    if config.is_local or config.global_batch_size is not None or config.resume is not None:
        return config
    return replace(config, global_batch_size=config.slot_size(without.of))


def check_devices(config: RunConfig, devices: tuple[Device, ...]) -> None:
    """InputError for settings that do not fit these devices."""
    names = ",".join(str(device) for device in devices)
    check_slices(devices)
    config.caps(len(devices))  # raises where memory_cap has another number of entries
    if config.min_ranks > len(devices):
        raise InputError(f"min_ranks={config.min_ranks} is above the number of devices, {len(devices)}: {names}")
    others = ",".join(str(device) for device in devices if device.kind != "cuda")
    if config.compile == "graph" and others:
        raise InputError(
            f"compile='graph' captures a CUDA graph, which {others} cannot run; use compile='off' or 'default'"
        )
    for name in ("shares", "memory_shares"):
        values = getattr(config, name)
        if values is not None and len(values) != len(devices):
            counts = f"{len(values)} entries for {format_count(len(devices), 'device')}"
            raise InputError(f"{name}={values!r} has {counts}: {names}; pass one for each, or leave it out")
    if len(devices) > 1:
        _check_ranks(config)
    elif config.strategy in SHARDED:
        raise InputError(
            f"strategy={config.strategy!r} divides a model among devices, and {names} is one: name several, as in "
            "devices='cpu,cpu', or leave strategy out"
        )


def _check_ranks(config: RunConfig) -> None:
    """Of several ranks."""
    if config.redundancy and sum(share > 0 for share in config.memory_shares or (1, 1)) < 2:
        raise InputError(
            f"redundancy={config.redundancy} with memory_shares={config.memory_shares!r}: a copy needs a second device "
            "with a share above 0; give one, or leave redundancy out"
        )
    if config.shares is not None and config.policy in ("sync", "async"):
        why = {
            "sync": "sync shares equally; leave it out, or use policy='balanced'",
            "async": "devices claim batches as they come; use policy='cadence'",
        }
        raise InputError(f"shares={config.shares!r} with policy={config.policy!r}: {why[config.policy]}")
    if config.sync_batchnorm and config.is_local:
        raise InputError(
            f"sync_batchnorm=True with policy={config.policy!r}: devices step at different times and average buffers "
            "in each round; leave it out, or use policy='balanced'"
        )


def check_functions(task: Task, config: RunConfig, ranks: int) -> None:
    """InputError for settings that need another function, or cannot have one that is there."""
    if task.before_step is not None and config.compile == "graph":
        raise InputError("before_step with compile='graph': a captured step calls no function; use 'off' or 'default'")
    if task.before_step is not None and ranks > 1 and not config.is_replicated:
        raise InputError(f"before_step with strategy={config.strategy!r}: gradients are in shards; use 'zero1'")
    for name in ("eval_every", "monitor", "keep_best"):
        value = getattr(config, name)
        if value is not None and task.evaluation is None:
            raise InputError(
                f"{name}={value!r} without an evaluation: pass evaluate=(test_set, eval_step) to fit, or leave it out; "
                "in a loop of your own you evaluate yourself"
            )
    if config.scheduler_interval is not None and task.make_scheduler is None:
        raise InputError(
            f"scheduler_interval={config.scheduler_interval!r} without a scheduler: pass scheduler=..., or leave it out"
        )
    if config.monitor is not None and task.make_scheduler is None and config.keep_best is None:
        raise InputError(
            f"monitor={config.monitor!r} is for a ReduceLROnPlateau and for keep_best=...; pass one, or leave it out"
        )


def check_streams(task: Task, config: RunConfig, ranks: int, *, is_one_machine: bool) -> None:
    """InputError where the data set is a stream that cannot be read with these settings."""
    if task.evaluation is not None and is_stream(task.evaluation.dataset) and not shard_sizes(task.evaluation.dataset):
        name = type(task.evaluation.dataset).__name__
        raise InputError(
            f"evaluate: {name} can only be read in order, and every device evaluates its part of the test set; pass a "
            "map-style data set, as list(test_set), or a source with open(shard, start) and shard_sizes"
        )
    dataset = task.dataset
    if not is_stream(dataset):
        return
    sampler = "sampler" if task.loading.sampler is not None else "batch_sampler"
    if getattr(task.loading, sampler) is not None:
        raise InputError(
            f"{sampler}= with dataset {type(dataset).__name__}: samples of a stream have no numbers to draw; leave it "
            "out"
        )
    sizes, samples = shard_sizes(dataset), count_samples(dataset)
    if samples == 0:
        raise InputError("dataset is empty: there is nothing to train on")
    if sizes is None:
        _check_reader(type(dataset).__name__, config, ranks, is_one_machine)
    if samples is None:
        _check_endless(task, config)


def _check_reader(name: str, config: RunConfig, ranks: int, is_one_machine: bool) -> None:
    """One process reads the stream for all ranks, and samples that were read cannot be put back."""
    if config.num_workers > 1:
        raise InputError(
            f"num_workers={config.num_workers}: {name} can only be read in order, so one reader feeds all devices; "
            "use num_workers=1 for a process of its own, or a source with open(shard, start) and shard_sizes"
        )
    if not is_one_machine:
        raise InputError(
            f"dataset {name} can only be read in order, by one reader on one machine; for several machines pass a "
            "source with open(shard, start) and shard_sizes"
        )
    unread = "needs a batch before training, and a stream that was read in order cannot put it back"
    reasons = {
        "compile": (config.compile == "graph", f"a captured step {unread}; use 'default' or 'off'"),
        "activations": (config.activations == "auto", f"measuring activations {unread}; use 'recompute' or 'keep'"),
        "sync_batchnorm": (config.sync_batchnorm and ranks > 1, f"it {unread}; leave it out"),
    }
    for setting, (is_given, reason) in reasons.items():
        if is_given:
            raise InputError(f"{setting}={getattr(config, setting)!r} with dataset {name}: {reason}")


def _check_endless(task: Task, config: RunConfig) -> None:
    name = type(task.dataset).__name__
    is_by_epoch = config.scheduler_interval == "epoch"
    is_known = (config.max_steps is None) == is_by_epoch  # its number of steps, or of epochs
    if task.make_scheduler is not None and takes_length(task.make_scheduler) and not is_known:
        raise InputError(
            f"scheduler takes the number of {'epochs' if is_by_epoch else 'steps'}, and dataset {name} has no length: "
            f"{'leave max_steps out' if is_by_epoch else 'pass max_steps=...'}, give it a __len__, or pass "
            "scheduler=lambda optimizer: ..."
        )
    if config.drop_last:
        raise InputError(
            f"drop_last=True: dataset {name} has no length, so its last step is not known beforehand; "
            "leave drop_last out, or give the data set a __len__"
        )
    if config.replay is not None:
        raise InputError(
            f"replay={str(config.replay)!r}: dataset {name} has no length, so it is not known whether the log fits; "
            "give it a __len__"
        )
