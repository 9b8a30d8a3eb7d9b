"""One rank's model, optimizer, data feed, training step and clock; it runs no collective.

The worker makes one engine, the synchronizer drives it. How far the run is, and what it knows of its past, is in its
RunState (train/state.py). What it runs before the group forms, to compile and to measure, is in train/prepare.py.

Below the engine are the checks of what the user's functions made: a model that every device can train, an optimizer, a
scheduler. The launcher makes them, too, before ranks are started (launch/checks/trial.py). Each refusal is one line
with what to do instead.
"""

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from uneven.comm.group import Group
from uneven.config import SHARDED, RunConfig, Task
from uneven.data.epoch_order import make_axis, make_order
from uneven.data.feed import Feed, LoadedFeed, Micros, make_feed
from uneven.data.replay import read_saves
from uneven.data.stream import ReaderFeed
from uneven.errors import InputError
from uneven.hardware.device import needs_ranks
from uneven.hardware.throttle import Throttle
from uneven.parallel.activations import Activations
from uneven.parallel.batchnorm import BatchNormSync, has_batchnorm, synchronise
from uneven.parallel.muon_adamw import MuonAdamW
from uneven.parallel.reducer import Reducer
from uneven.parallel.sharded_init import Blueprint, dry_run, move, without_reads
from uneven.parallel.strategy import FullState, Strategy, on_host
from uneven.parallel.survivors import CanSurvive
from uneven.policy.axis import Axis, Part
from uneven.policy.events import Events, find_events
from uneven.policy.scale import lr_scale, ramp
from uneven.policy.stream_axis import StreamAxis, expected_samples
from uneven.results.state import read_structure
from uneven.results.state_tree import split_tree
from uneven.results.tensor_file import can_hold
from uneven.step.captured import CapturedStep
from uneven.step.eager import BeforeUpdate, EagerStep, adapt_before_step
from uneven.step.finite import Fault, Verdict, is_expanded
from uneven.step.loss import OutputStep
from uneven.step.precision import Precision, check_slice
from uneven.step.runahead import DEPTH as RUN_AHEAD
from uneven.step.runahead import RunAhead
from uneven.step.schedule import Schedule, takes_length
from uneven.step.several import OptimizerGroup
from uneven.step.strategy_step import StrategyStep
from uneven.timeline.record import Recorder
from uneven.train.rank_info import RankInfo
from uneven.train.state import RunState


class Engine:
    """Life cycle: made on the thread that trains; its warm-up before the first slot where possible, then its steps.

    In a loop of the user's own that calls forward, so there is no step to run beforehand, batches are needed before the
    step, and a rank's part of a slot is always one batch.
    """

    def __init__(self, task: Task, config: RunConfig, rank_info: RankInfo, recorder: Recorder) -> None:
        if not task.is_own_loop:
            task = replace(task, train_step=OutputStep(task.train_step))
        self.task = task
        self.config = config
        self.rank_info = rank_info
        self.recorder = recorder
        self.is_own_loop = task.is_own_loop
        self.order = make_order(task, config)
        self.device = torch.device(rank_info.device.torch_name)
        seed_random(config.seed, is_own_loop=task.is_own_loop)
        self.blueprint = _blueprint(task, config, rank_info)
        if self.blueprint is not None:
            self.task = task = replace(task, make_optimizer=without_reads(task.make_optimizer))
        self.model = build_model(task, config, self.device, rank_info.world_size, self.blueprint)
        check_slice(rank_info.device, config.precision, self.model)
        self.structure = read_structure(self.model)  # before BatchNorm layers are replaced: their names change
        # On one device BatchNorm sees all samples of the batch anyway.
        self.batchnorm_sync = (
            synchronise(self.model) if config.sync_batchnorm and rank_info.world_size > 1 else BatchNormSync()
        )
        self.optimizer = checked_optimizer(task.make_optimizer(self.model.parameters()), self.model)
        self.optimizer_made = describe_made(self.optimizer)  # before a strategy puts its own in its place
        self.state = RunState(recorder)
        self.settle_axis(config)
        self.step = EagerStep(
            self.model,
            self.optimizer,
            task.train_step,
            Precision(config.precision, self.device),
            BeforeUpdate(adapt_before_step(task.before_step), config.max_grad_value, config.max_grad_norm),
            self.batchnorm_sync,
        )
        self.meter = self.step.meter
        self.feed: Feed = make_feed(
            *(task.dataset, self.device, config.seed, config.batch_size, config.num_workers),
            is_rank=needs_ranks(rank_info.devices),
            loading=task.loading,
            order=self.order,
        )
        self.run_ahead = RunAhead(self.device)
        self.throttle = Throttle(rank_info.device.speed)
        self.reader = self.feed if isinstance(self.feed, ReaderFeed) else None
        if task.is_own_loop:
            self.feed = LoadedFeed(self.feed)
        # Steps can run beforehand only if the step is ours to call, one device holds the whole model, and samples that
        # were read for it can be read again.
        self.can_warm_up = (
            not task.is_own_loop and (rank_info.world_size == 1 or config.is_replicated) and not self.reader
        )
        # The next three are set where params or optimizer state are sharded.
        self.full_state: Callable[[], FullState] | None = None
        self.load_full_state: Callable[[FullState], None] | None = None
        self.strategy: Strategy | None = None
        # After the loss of a rank, until it is sharded anew: [Note: whole state in hand] in settle.py.
        self.whole_state: FullState | None = None
        self.rolled_back = 0  # the number of the checkpoint that `whole_state` was read from, if it was
        self.caps = config.caps(rank_info.world_size)  # samples that each rank may hold at once
        self._grown_from = sys.maxsize  # from this slot on learning rates have their whole scale
        self._seen_sizes: set[tuple[int, ...]] = set()  # micro-batch sizes that this device has run before

    @property
    def axis(self) -> Axis:
        return self.state.axis

    @property
    def events(self) -> Events:
        return self.state.events

    def micro_batch_size(self, samples: int, rank: int | None = None) -> int:
        """The largest micro-batch when a rank (default: this one) trains so many samples in one step."""
        wanted = max(self.config.batch_size, -(-samples // self.config.accumulate))
        cap = self.caps[self.rank_info.rank if rank is None else rank]
        if min(wanted, samples) <= cap or self.is_own_loop:
            return wanted
        return -(-samples // -(-samples // int(cap)))  # as few micro-batches as possible, equally large

    def take_blueprint(self) -> Blueprint | None:
        """How to make the model's params, where they have no memory yet; once."""
        blueprint, self.blueprint = self.blueprint, None
        return blueprint

    def use_strategy(self, strategy: Strategy, step: EagerStep | None = None) -> None:
        """Train with a strategy's optimizer, and step where it has one; called when the group has formed."""
        self.optimizer = optimizer = strategy.optimizer
        self.schedule = make_schedule(self.task.make_scheduler, optimizer, self.config, self.axis)
        self.strategy = strategy
        self.full_state = strategy.full_state
        self.load_full_state = strategy.load_full_state
        self.step = self.step if step is None else step
        self.step.optimizer = optimizer

    def leave_strategy(self, step: EagerStep) -> None:
        """Train with a plain optimizer and this step; the model is whole. The schedule goes on where it was."""
        self.optimizer = checked_optimizer(self.task.make_optimizer(self.model.parameters()), self.model)
        schedule = self.schedule.state_dict(first_needed=0)
        self.schedule = make_schedule(self.task.make_scheduler, self.optimizer, self.config, self.axis)
        self.schedule.load_state_dict(schedule)
        self.step = step
        self.step.optimizer, self.step.reducer = self.optimizer, None
        self.full_state = self.load_full_state = None

    def settle_axis(self, config: RunConfig) -> None:
        """Make the axis, its events and the LR schedule; once more when an "auto" global_batch_size is settled."""
        self.config, axis = config, make_axis(self.order, config, self.rank_info.world_size)
        self.state.follow(axis, find_events(axis, config, self.task.evaluation, self.is_own_loop))
        for slot in () if config.replay is None else read_saves(config.replay):
            self.events.request_save(slot)
        # A scheduler is made once, since making it changes the optimizer's rates, and it may ask for the steps.
        make_scheduler = None if config.global_batch_size == "auto" else self.task.make_scheduler
        self.schedule = make_schedule(make_scheduler, self.optimizer, config, self.axis)
        check_schedule(self.schedule, self.task, config)

    @property
    def updates(self) -> int:
        """How many updates this rank has applied to its shards since they were divided; 0 where nothing is sharded."""
        return self.strategy.updates if isinstance(self.strategy, CanSurvive) else 0

    def keep_whole(self, state: FullState, rolled_back: int | None = None) -> None:
        """This is the whole state: for the run's result, where nothing is left to train; else until it is divided.

        `rolled_back`: the number of the checkpoint that it was read from, if it was.
        """
        self.whole_state = state
        self.full_state = lambda: state
        self.rolled_back = self.rolled_back if rolled_back is None else rolled_back

    def leave_shards(self) -> None:
        """Before a strategy is made for those who are left: the model is whole again, with plain optimizer and step."""
        state, strategy = self.whole_state, self.strategy
        if state is None or not isinstance(strategy, CanSurvive):
            return
        strategy.leave(state)
        self.leave_strategy(self.step.plain if isinstance(self.step, StrategyStep) else self.step)
        if self.rank_info.world_size == 1:
            self.optimizer.load_state_dict(on_host(state.optimizer))  # PyTorch takes tensors that fit without a copy
            self.strategy = self.whole_state = None
            self.rolled_back = 0

    def divide_whole_state(self, schedule: Mapping[str, Any]) -> None:
        """When the strategy of a new group is made: divide the state, if there is one, by the memory of who is left."""
        state = self.whole_state
        if state is None:
            return
        assert self.load_full_state is not None, "a strategy that shards can load"
        self.load_full_state(state)
        self.schedule.load_state_dict(schedule)
        self.rolled_back = 0  # all have gone back, or this group would not train

        def forget(*_: object) -> None:
            self.whole_state = None

        self.optimizer.register_step_pre_hook(forget)

    def seed_as_newcomer(self) -> None:
        """Not the masks that this rank, or rank 0, would have drawn at the beginning of the run."""
        torch.manual_seed(self.config.seed + 7919 * self.rank_info.rank + 104729 * self.state.trained)

    def leave_group(self) -> None:
        """The group is lost, and its reducer with it."""
        self.step.reducer = None

    def use_reducer(self, reducer: Reducer) -> None:
        """Sum gradients over the ranks with this reducer."""
        self.step.reducer = reducer

    def use_step(self, step: EagerStep) -> None:
        """Train with this step in place of our own."""
        self.step = step

    def connect_batchnorm(self, group: Group) -> None:
        """Let the synchronised BatchNorm layers, if there are any, reduce their statistics over this group."""
        self.batchnorm_sync.connect(group, self.recorder.enter)

    def connect_reader(self, group: Group) -> None:
        """Where one reader feeds all ranks, start it or connect to it; on all ranks, when a group has formed.

        Not where others join when all is trained: nobody would close it.
        """
        if self.reader is not None and self.state.trained < self.axis.total:
            is_shared = self.config.is_model_parallel and group.world_size > 1
            self.reader.connect(group, self.axis, self.state.known_ledger, is_shared=is_shared)

    def open(self, micros: Micros) -> Micros:
        """Inputs -> batches on the device. A captured step does this itself, inside the graph."""
        if self.step.is_captured:
            return micros
        return [(self.feed.open(inputs), samples) for inputs, samples in micros]

    def lr_scale(self, default: float | str, speeds: Sequence[float]) -> float:
        """The factor on the learning rate when ranks of these speeds train together."""
        given = self.config.lr_scale
        return lr_scale(default if given is None else given, speeds)

    def begin_slot(self, slot: int, scale: float) -> None:
        """Set the slot's learning rates: the schedule at its position, times the scale (ramped up at first)."""
        self.step.check_params()
        if scale == 1.0 and self.schedule.is_constant:
            return
        grown = scale
        if slot < self._grown_from:
            grown = grown_scale(scale, self.axis, self.state.samples_before(slot))
            if grown == scale and not isinstance(self.axis, StreamAxis):  # of which the end is not known
                self._grown_from = slot
        self.schedule.move_to(self.schedule_position(slot), grown)

    def schedule_position(self, slot: int) -> int:
        """The LR schedule's position in a slot that lies after everything that was left out."""
        return schedule_position(self.config, self.axis, slot, self.state.skipped_slots)

    def local_step(self, part: Part, micros: Micros, began_ns: int) -> Verdict:
        """One optimizer step of this rank by itself, without any collective; returns whether it was finite."""
        verdict = self.step.start_alone(micros, part.samples)
        self.simulate_slowdown(began_ns)
        rank = self.rank_info.rank

        def own_verdict() -> Fault | None:
            fault = verdict()
            return None if fault is None else fault._replace(rank=rank)  # the step knows one rank, which is 0 to it

        return own_verdict

    def after_step(self, began_ns: int) -> None:
        """Keep the host at most a few steps ahead of the device; GradientSync waits for the device in every step."""
        is_simulated = self.rank_info.device.speed < 1  # a simulated device sleeps: only the host's clock sees that
        self.run_ahead.after_step(None if is_simulated else began_ns)

    def was_first_of_its_size(self, part: Part) -> bool:
        """Whether the step just done is no measure of this rank's speed; call once after each step.

        A CUDA device chooses kernels when a size is new, and capturing a graph takes much longer than replaying it.
        """
        if isinstance(self.step, CapturedStep):
            return not self.step.is_replayed
        if self.device.type != "cuda":
            return False
        sizes = tuple(part.sizes)
        is_new = sizes not in self._seen_sizes
        self._seen_sizes.add(sizes)
        return is_new

    def simulate_slowdown(self, began_ns: int) -> None:
        """On a simulated device (cpu@0.4) sleep in proportion to the work since `began_ns`."""
        if self.rank_info.device.speed < 1:
            self.run_ahead.catch_up()
            self.throttle.pause((self.recorder.clock() - began_ns) / 1e9)

    @property
    def is_replaced_by_strategy(self) -> bool:
        """Whether a strategy makes the optimizer anew when the group has formed."""
        is_sharded = self.config.strategy in SHARDED or isinstance(self.optimizer, MuonAdamW)
        return is_sharded and self.rank_info.world_size > 1

    @property
    def late_verdicts(self) -> int:
        """The steps of which it may not be known yet whether they were finite: `ahead` of RunState.commit."""
        return RUN_AHEAD if self.step.answers_late else 0

    def follow_ranks(self, config: RunConfig) -> None:
        """Other ranks train with this one from now on; the axis stays. `config` has the settings of those ranks."""
        self.config, self.caps = config, config.caps(self.rank_info.world_size)

    def limit_caps(self, caps: Sequence[float]) -> None:
        """Lower each rank's cap to what that rank found it can hold."""
        self.caps = tuple(min(pair) for pair in zip(self.caps, caps, strict=True))

    @property
    def least(self) -> int:
        """The smallest batch that can be trained."""
        return 2 if has_batchnorm(self.model) else 1


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
        if not can_hold(tensor.dtype):
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


def _blueprint(task: Task, config: RunConfig, rank_info: RankInfo) -> Blueprint | None:
    """Where params are to be made shard by shard, when the group has formed: not where they come from elsewhere then,
    and not where a forward of this rank alone is to measure activations."""
    is_loaded = rank_info.is_newcomer or config.resume is not None
    if config.strategy != "fsdp" or rank_info.world_size == 1 or is_loaded or config.activations == "auto":
        return None
    return dry_run(task.make_model)


def build_model(
    task: Task, config: RunConfig, device: torch.device, world_size: int, blueprint: Blueprint | None = None
) -> nn.Module:
    """The task's model on the device, with its activations as the settings want them.

    Made on the CPU and then moved: the same seed gives the same params on every kind of device.
    """
    made = checked_model(task.make_model() if blueprint is None else blueprint.model)
    model = made.to(device) if blueprint is None else move(made, device)
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


# Settings of a param group that say how this device computes, not what.
DEVICE_KEYS = ("foreach", "fused", "capturable", "differentiable")


def kind_of(optimizer: Optimizer) -> str:
    """The class of an optimizer as the user made it; of several, that of each."""
    members = optimizer.members.values() if isinstance(optimizer, OptimizerGroup) else [optimizer]
    return ", ".join(type(member).__name__ for member in members)


def describe_made(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer as the user has made it: its class, and the settings of its groups but for learning rates, which
    are a schedule's. To be asked before anything is trained: training may change what a group holds."""
    passed = ("params", "lr", "initial_lr", *DEVICE_KEYS)
    groups = [{key: value for key, value in group.items() if key not in passed} for group in optimizer.param_groups]
    settings = [{key: _plain(value) for key, value in group.items() if _is_plain(value)} for group in groups]
    return {"class": kind_of(optimizer), "settings": settings}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def seed_random(seed: int, *, is_own_loop: bool) -> None:
    """Seed torch, and for `fit` Python and numpy, too: a train step may draw from them. A user's loop seeds its own."""
    torch.manual_seed(seed)
    if not is_own_loop:
        random.seed(seed)
        np.random.seed(seed % 2**32)
