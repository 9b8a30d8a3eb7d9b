"""Checks of what the user's functions made: a model that every device can train, an optimizer, a scheduler.

Called by every rank's engine and, before ranks are started, by the launcher (launch/checks/trial.py). Each refusal is
one line with what to do instead.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from uneven.config import RunConfig, Task
from uneven.errors import InputError
from uneven.parallel.activations import Activations
from uneven.policy.axis import Axis
from uneven.policy.scale import ramp
from uneven.policy.stream_axis import expected_samples
from uneven.results.state_tree import split_tree
from uneven.results.tensor_file import TYPES
from uneven.step.finite import is_expanded
from uneven.step.schedule import Schedule, takes_length

# Wrappers that share out samples or params themselves, by class name: importing torch.distributed is comm's alone.
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def checked_model(model: Any) -> nn.Module:
    """The model; InputError where it cannot be trained, or not under the names its state would have."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model() made a {type(model).__name__}; it must return an nn.Module")
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "model was wrapped by torch.compile, and its state would have the prefix '_orig_mod.': pass the plain "
            "model with compile='default'"
        )
    for place, module in model.named_modules():
        kind = type(module)
        if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
            where = f"model.{place}" if place else "model"
            raise InputError(
                f"{where} is wrapped in {kind.__name__}, which shares out samples or params by itself: pass the plain "
                "model (its .module); uneven shares them out"
            )
    named = list(model.named_parameters())
    if lazy := [place for place, param in named if is_lazy(param)]:
        raise InputError(
            f"model has lazy layers without shapes ({_first(lazy)}): run one batch through it in the function that "
            "makes it, as in: net = Net(); net(x[:1]); return net"
        )
    if empty := [place for place, tensor in (*named, *model.named_buffers()) if tensor.is_meta]:
        raise InputError(
            f"model has tensors on the meta device, without values ({_first(empty)}): make it on the CPU, or call "
            "to_empty(device='cpu') and initialise it in the function that makes it"
        )
    if sharded := [place for place, param in named if type(param.data).__name__ == "DTensor"]:
        raise InputError(f"model has params sharded by PyTorch ({_first(sharded)}): pass the plain model")
    if not any(param.requires_grad for _, param in named):
        reason = "requires_grad is False for all of them: set it to True for those to train" if named else "it has none"
        raise InputError(f"{name} has no param to train: {reason}")
    return model


def check_extra_state(model: nn.Module) -> None:
    """InputError where the model's state_dict has what no result can keep: nothing is pickled."""
    tensors = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    for name, entry in model.state_dict().items():
        if name not in tensors:
            split_tree(entry, f"{name} of the model's state_dict")


def check_types(model: nn.Module) -> None:
    """InputError where a file, by which the result leaves a rank or the run, cannot hold a tensor of the model."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype not in TYPES:
            raise InputError(
                f"{name} is of {tensor.dtype}, which a safetensors file cannot hold: make it of another type "
                "(complex64), or train on one device without out"
            )


def check_dense(optimizer: Any, config: RunConfig) -> None:
    """InputError for an optimizer of sparse gradients alone where sums over the devices make them dense."""
    if isinstance(optimizer, torch.optim.SparseAdam) and not config.is_local:
        raise InputError(
            f"SparseAdam takes sparse gradients alone, and policy={config.policy!r} sums dense ones over the devices: "
            "use Adam or SGD, policy='cadence' or 'async', or one device"
        )


def checked_optimizer(optimizer: Any, model: nn.Module) -> Optimizer:
    """The optimizer; InputError where it is none, holds other params than the model's, or calls the step itself."""
    kind = type(optimizer).__name__
    if not all(hasattr(optimizer, name) for name in ("param_groups", "step", "zero_grad")):
        raise InputError(
            f"optimizer(params) made a {kind}; it must return a torch Optimizer, as in "
            "optimizer=lambda params: torch.optim.Adam(params, lr=1e-3)"
        )
    if isinstance(optimizer, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = next((name for name, part in vars(optimizer).items() if isinstance(part, Optimizer)), None)
        advice = "call super().__init__ in its class" if inner is None else f"pass the one that it wraps, its .{inner}"
        raise InputError(
            f"optimizer {kind} has none of torch's step hooks, which a run needs, since it never calls "
            f"Optimizer.__init__: {advice}"
        )
    if _needs_closure(optimizer):
        raise InputError(
            f"optimizer {kind} runs the train step several times per update (its step needs a closure), which no "
            "policy can share out: use SGD, Adam or another optimizer whose step needs none"
        )
    own = set(model.parameters())
    held = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = sum(param not in own for param in held)
    if foreign:
        raise InputError(
            f"optimizer {kind} holds {foreign} params that are not the model's, so the model would not be trained by "
            "it: make it from the params it is given, as in optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    if not any(param.requires_grad for param in held):
        raise InputError(f"optimizer {kind} holds no param that is trained: give it those with requires_grad=True")
    result: Optimizer = optimizer
    return result


def _needs_closure(optimizer: Any) -> bool:
    try:
        parameters: Iterable[inspect.Parameter] = inspect.signature(type(optimizer).step).parameters.values()
    except (TypeError, ValueError, AttributeError):
        return False
    return any(entry.name == "closure" and entry.default is entry.empty for entry in parameters)


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def build_model(task: Task, config: RunConfig, device: torch.device, world_size: int) -> nn.Module:
    """The task's model on the device, with its activations as the settings want them.

    Made on the CPU and then moved: the same seed gives the same params on every kind of device.
    """
    model = checked_model(task.make_model()).to(device)
    check_extra_state(model)
    if config.out is not None:
        check_types(model)
    _give_own_memory(model)
    if not model.training:  # else a part of it that is in eval mode, as a frozen BatchNorm, is so on purpose
        model.train()
    is_sharded_later = config.is_model_parallel and world_size > 1  # activations are for the layers made then
    if config.activations in ("recompute", "offload") and not is_sharded_later:
        Activations(model, config.activations)
    return model


def _give_own_memory(model: nn.Module) -> None:
    """Every element of a buffer: into an expanded one, which stands several times for one number, nothing is copied."""
    owned: dict[Tensor, Tensor] = {}  # a buffer that several modules hold stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_expanded(buffer):
                module._buffers[name] = owned.setdefault(buffer, buffer.clone(memory_format=torch.contiguous_format))


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
