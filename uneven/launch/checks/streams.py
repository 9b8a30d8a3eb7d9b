"""What is checked about a stream before ranks start; called by preflight.py."""

from uneven.config import RunConfig, Task, is_stream
from uneven.data.source import count_samples, shard_sizes
from uneven.errors import InputError
from uneven.step.schedule import takes_length


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
