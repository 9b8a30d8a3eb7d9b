"""How a run steps its scheduler: once a step of the whole run or, by scheduler_interval="epoch", once an epoch.

The Schedule itself (step/schedule.py) knows positions alone. Called by train/engine.py, and before ranks start by
launch/checks/trial.py.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from uneven.config import RunConfig, Task
from uneven.errors import InputError
from uneven.policy.axis import Axis
from uneven.policy.scale import ramp
from uneven.policy.stream_axis import expected_samples
from uneven.step.schedule import Schedule, takes_length

# PyTorch's pages step the first two after every batch, and all others after every epoch; transformers makes LambdaLRs
# for steps.
PER_STEP = (OneCycleLR, CyclicLR, LambdaLR)


def make_schedule(
    make_scheduler: Callable[..., Any] | None, optimizer: Optimizer, config: RunConfig, axis: Axis
) -> Schedule:
    is_by_epoch = config.scheduler_interval == "epoch"
    return Schedule(
        make_scheduler, optimizer, axis.epochs if is_by_epoch else axis.schedule_length, is_by_epoch=is_by_epoch
    )


def schedule_position(config: RunConfig, axis: Axis, slot: int, skipped_slots: int) -> int:
    """How often a scheduler has been stepped before a slot; `slot` lies after everything that was left out."""
    return axis.epochs_before(slot) if config.scheduler_interval == "epoch" else slot - skipped_slots


def grown_scale(scale: float, axis: Axis, samples: int) -> float:
    """The factor on the learning rate after so many samples of all ranks: it is ramped up in the first epoch."""
    total = expected_samples(axis)
    return ramp(scale, samples, min(axis.samples, total), total)


def check_schedule(schedule: Schedule, task: Task, config: RunConfig) -> None:
    """InputError where a schedule follows a metric that nobody evaluates, or what is given for it would be ignored."""
    if config.lr_scale not in (None, 1.0) and not schedule.rates:
        raise InputError(
            f"lr_scale={config.lr_scale!r} with an optimizer that has no learning rate (lr=None) to scale: leave "
            "lr_scale out, or give the optimizer a rate"
        )
    if schedule.needs_metric and config.scheduler_interval is not None:
        raise InputError(
            f"scheduler_interval={config.scheduler_interval!r} with a ReduceLROnPlateau: it is stepped at every "
            "evaluation; leave it out, eval_every says how often that is"
        )
    if schedule.needs_metric and task.evaluation is None and not task.is_own_loop:
        raise InputError(
            "scheduler made a ReduceLROnPlateau, which follows an evaluated metric; pass evaluate=(test_set, "
            "eval_step), too, or a scheduler that depends on progress alone"
        )


def describe_schedule(schedule: Schedule, task: Task, config: RunConfig, axis: Axis) -> list[str]:
    """A line where PyTorch's pages step such a scheduler after every epoch, and the user has not said what is meant."""
    scheduler, make_scheduler = schedule.scheduler, task.make_scheduler
    if scheduler is None or config.scheduler_interval is not None or axis.epochs == 1 or axis.slots_per_epoch == 1:
        return []
    if isinstance(scheduler, PER_STEP) or make_scheduler is None or takes_length(make_scheduler):
        return []
    name = type(scheduler).__name__
    return [f"  {name} is stepped after every step (scheduler_interval='step'); 'epoch' does it after every epoch"]
