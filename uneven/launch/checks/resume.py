"""Before a resumed run starts: find its checkpoint, see that it fits this run, and take over what must not change.

Called by launch/checks/preflight.py. Afterwards `config.resume` is the folder of one whole checkpoint, which every rank
reads by itself (train/saved_state.py). The data order, the samples of a slot and the seed stay those of the checkpoint;
devices, their number, policy and strategy may be others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from uneven.config import RunConfig, Task
from uneven.data.epoch_order import EpochOrder, random_states_preserved
from uneven.data.replay import LOG
from uneven.errors import InputError
from uneven.files import check_resumed_folder, folder_error, mark_as_run
from uneven.format import format_count
from uneven.policy.axis import Axis
from uneven.policy.stream_axis import StreamAxis
from uneven.results.checkpoint import Checkpoint, read_checkpoint
from uneven.results.checkpoint_folders import find_checkpoints, first_whole, set_aside
from uneven.results.record import RECORD, crc32_of, read_record
from uneven.results.state import TrainedState, read_structure
from uneven.train.engine import checked_model, checked_optimizer
from uneven.train.saved_state import check_model, check_optimizer, kept_settings

RESULT_FILES = (
    *("state.json", "state.safetensors", "optimizer.safetensors", "log.json"),
    *("timeline.json", "timeline.csv", "trace.json"),
)
# With another value the slots of the axis would hold other samples.
FROZEN = ("seed", "shuffle", "drop_last")


@dataclass(frozen=True)
class ResumePlan:
    """How a run goes on: its settings, lines to print, and the result where there is nothing left to train."""

    config: RunConfig
    notes: list[str]
    finished: TrainedState | None = None


def plan_resume(task: Task, config: RunConfig, ranks: int) -> ResumePlan:
    """Settle `config.resume`; InputError in one line where no checkpoint fits."""
    assert config.resume is not None, "called for resumed runs"
    check = _Fits(task)
    if config.resumes_newest:
        assert config.out is not None, "checked with the settings"
        run, candidates = config.out, find_checkpoints(config.out)
    else:
        run, candidates = _named(config.resume)
    out = config.out or run
    config = replace(config, out=out)
    is_whole_run = config.resumes_newest or config.resume == run  # not one checkpoint of it, to train again from there
    if is_whole_run and out.resolve() == run.resolve() and (finished := _finished(run, config, check)):
        return ResumePlan(replace(config, resume=None), [_why_ended(run, finished)], finished)
    if not candidates and config.resumes_newest:
        why = "yet" if not _result_files(run) else "to train on from (that run finished without save_every=...)"
        return ResumePlan(replace(config, resume=None), [f"  resume: no checkpoint in {run} {why}, a new run begins"])
    if not candidates:
        raise InputError(
            f"resume={str(run)!r}: no checkpoint in it; a run writes them with save_every=... and when stopped"
        )
    checkpoint, notes = _choose(candidates, check, config.resumes_newest)
    own_size = None if config.global_batch_size == "auto" else config.slot_size(ranks)
    config = _freeze(config, checkpoint, ranks)
    trained, gaps = checkpoint.record["ledger"]["trained"], checkpoint.record["ledger"]["gaps"]
    left = f", {sum(stop - first for first, stop in gaps)} steps before it come first" if gaps else ""
    notes.append(f"  resumes from {checkpoint.folder}: {trained:,} steps are trained{left}")
    if (world_size := checkpoint.record["world_size"]) != ranks:
        saved_by = format_count(world_size, "device")
        notes.append(f"  it was saved by {saved_by} and goes on with {ranks}; order and step size stay")
    elif own_size not in (None, size := checkpoint.record["slot_size"]):
        notes.append(
            f"  a step keeps the {size} samples of the checkpoint; with this run's batch_size it had {own_size}"
        )
    notes += check.kept_settings(checkpoint)
    return ResumePlan(replace(config, resume=checkpoint.folder), notes)


def follow_plan(task: Task, config: RunConfig, ranks: int, rank: int, folder: Path) -> RunConfig:
    """The settings of another rank than 0, for a checkpoint that rank 0 has chosen, or a copy of it."""
    checkpoint = read_checkpoint(folder, rank)
    _Fits(task)(checkpoint)
    return replace(_freeze(config, checkpoint, ranks), resume=folder)


def go_on_in_folder(out: Path, checkpoint: Path) -> list[str]:
    """Go on writing to a run's folder; checkpoints after the one that is resumed, and the result of a run that went to
    its end, are moved aside, or they would be taken for this run's. Returns lines to print."""
    try:
        mark_as_run(out)
        found = find_checkpoints(out)
        later = found[: [folder.resolve() for folder in found].index(checkpoint.resolve())]
        result = _result_files(out)
        aside = set_aside(out, [*later, *result])
        if aside is None:
            return []
    except OSError as error:
        raise folder_error(out, error) from error
    what = ["the result"] if result else []
    what += [format_count(len(later), "later checkpoint")] if later else []
    return [f"  {' and '.join(what)} of {out} moved to {aside}"]


def _result_files(out: Path) -> list[Path]:
    """The result in a run's folder, where that run has ended; `state.json`, without which it is none, first."""
    try:
        has_ended = _has_ended(read_record(out))
    except InputError:
        return []
    return [path for path in map(out.joinpath, RESULT_FILES) if has_ended and path.exists()]


def check_data(config: RunConfig, axis: Axis, order: EpochOrder) -> None:
    """InputError where the data set is another one than the checkpoint's, or nothing is left of a shorter run."""
    assert config.resume is not None
    record = read_record(config.resume)
    if isinstance(axis, StreamAxis):
        axis.learn_all(record["epoch_sizes"])
    check_length(f"checkpoint {config.resume}", record["dataset_samples"], axis)
    if record["order"] != (own := f"{order.fingerprint(record['config']['epochs']):08x}"):
        raise InputError(
            f"checkpoint {config.resume}: the sampler drew another order of samples there ({record['order']}, this one "
            f"{own}); seed its generator as in that run, or draw from torch, numpy or random, which are seeded"
        )
    if record["ledger"]["trained"] > axis.total:
        raise InputError(
            f"checkpoint {config.resume}: {record['ledger']['trained']:,} steps are trained, and this run has only "
            f"{axis.total:,}; pass more epochs or max_steps"
        )


def content_lines(config: RunConfig) -> list[str]:
    """What a rank goes on from or repeats, by its content: other machines may hold a copy of it elsewhere."""
    files = {"checkpoint": (config.resume, RECORD), "log to replay": (config.replay, LOG)}
    return [
        f"{what} = crc32 {crc32_of(folder / name):08x}" for what, (folder, name) in files.items() if folder is not None
    ]


def check_length(what: str, samples: int, axis: Axis) -> None:
    """InputError where the data set is not as long as it was; of a stream without length nobody knows."""
    if samples != axis.epoch_samples and not isinstance(axis, StreamAxis):
        raise InputError(
            f"{what}: its data set had {samples:,} samples an epoch, this one has {axis.epoch_samples:,}; train on the "
            "same data set"
        )


def _named(path: Path) -> tuple[Path, list[Path]]:
    """(run folder, checkpoints) of a path that the user named; the first is meant, and none where a run has none."""
    check_resumed_folder(path)
    found = find_checkpoints(path)
    return (path.parent if found == [path] else path), found


def _choose(
    candidates: list[Path], check: Callable[[Checkpoint], None], passes_over: bool
) -> tuple[Checkpoint, list[str]]:
    """The first of the candidates that is whole and of this model, and lines about those passed over.

    Without `passes_over` it is the first or none: who names a run by its folder decides about a damaged checkpoint.
    """

    def read(folder: Path) -> Checkpoint:
        checkpoint = read_checkpoint(folder)
        check(checkpoint)
        return checkpoint

    if not passes_over:
        try:
            return read(candidates[0]), []
        except InputError as error:
            other, _ = first_whole(candidates[1:], read)
            hint = "" if other is None else f"; {other.folder} is whole, and can be named instead"
            raise InputError(f"{error}{hint}") from error
    found, faults = first_whole(candidates, read)
    notes = [f"  passed over: {fault}" for fault in faults]
    if found is None:
        raise InputError(f"resume='auto': none of {len(candidates)} checkpoints can be used: {notes[0].strip()}")
    return found, notes


class _Fits:
    """Compares checkpoints with model and optimizer, which are made only where there is a checkpoint to compare."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._made: tuple[nn.Module, Optimizer] | None = None

    def __call__(self, checkpoint: Checkpoint) -> None:
        """InputError in one line where it is of another model or optimizer."""
        model, optimizer = self._make()
        check_model(checkpoint, model.state_dict(), read_structure(model))
        if checkpoint.ranks:  # a result has none
            check_optimizer(checkpoint.ranks[0].record["optimizer"], optimizer, f"checkpoint {checkpoint.folder}")

    def kept_settings(self, checkpoint: Checkpoint) -> list[str]:
        """Lines about settings of the optimizer that were given otherwise and have no effect."""
        return kept_settings(checkpoint.ranks[0].record["optimizer"], self._make()[1])

    def _make(self) -> tuple[nn.Module, Optimizer]:
        if self._made is None:
            with random_states_preserved():
                model = checked_model(self._task.make_model())
                self._made = model, checked_optimizer(self._task.make_optimizer(model.parameters()), model)
        return self._made


def _freeze(config: RunConfig, checkpoint: Checkpoint, ranks: int) -> RunConfig:
    """The settings with the checkpoint's samples per step; InputError where one of them was given otherwise."""
    record, saved = checkpoint.record, checkpoint.record["config"]
    for name in FROZEN:
        _compare(checkpoint, name, saved[name], getattr(config, name))
    slot_size = record["slot_size"]
    if config.is_local:
        own = config.slot_size(ranks)
        if own != slot_size:
            raise InputError(
                f"checkpoint {checkpoint.folder}: a step there has {slot_size} samples, with this run's batch_size "
                f"{own}; pass batch_size={slot_size}"
            )
        return config
    if config.global_batch_size == "auto":
        accumulate = saved["accumulate"]
        return replace(config, global_batch_size=slot_size, accumulate=accumulate, max_global_batch_size=None)
    if config.global_batch_size is not None:
        _compare(checkpoint, "global_batch_size", slot_size, config.global_batch_size)
    return config if config.slot_size(ranks) == slot_size else replace(config, global_batch_size=slot_size)


def _compare(checkpoint: Checkpoint, name: str, saved: Any, own: Any) -> None:
    if saved != own:
        beside = " and no sampler, which orders by itself" if name == "shuffle" and saved else ""
        what = f"it has {name}={saved!r}, this run {own!r}"
        raise InputError(f"checkpoint {checkpoint.folder}: {what}; pass {name}={saved!r}{beside}")


def _finished(run: Path, config: RunConfig, check: Callable[[Checkpoint], None]) -> TrainedState | None:
    """The result of a run that has trained all that is asked for, or that a callback has ended; InputError where it is
    of another model."""
    try:
        record, state = read_record(run), TrainedState.load(run)
    except InputError:
        return None  # none yet, or damaged: a checkpoint is trained on
    saved, own = record.get("config", {}), config.to_json()
    epochs, limit = saved.get("epochs", 0), own["max_steps"]
    same = all(saved.get(name) == own[name] for name in ("max_steps", *FROZEN))
    if state.stopped is not None and limit is not None:  # the record has the epochs that max_steps leaves
        same = same and epochs <= own["epochs"]
    else:  # a run that max_steps has not ended was ended by its epochs
        same = same and (epochs == own["epochs"] or (limit is not None and state.slot >= limit))
    if not (same and _has_ended(record)):
        return None
    check(Checkpoint(run, record, {**state.params, **state.buffers}, []))
    return state


def _has_ended(record: Mapping[str, Any]) -> bool:
    """Whether a result is that of a run that nobody interrupted: it went to its end, or a callback ended it."""
    return bool(record.get("finished")) or record.get("stopped") is not None


def _why_ended(run: Path, state: TrainedState) -> str:
    if state.finished:
        return f"  {run} is finished: nothing to train"
    more = "epochs" if state.config.get("max_steps") is None else "max_steps"
    return (
        f"  {run} was ended after {state.slot:,} steps by a callback ({state.stopped}): nothing to train; it goes on "
        f"with more {more}, or from a checkpoint that resume=... names"
    )
