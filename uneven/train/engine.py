"""One rank by itself: its model, optimizer, data, step and clock. It knows the other ranks only by their number.

A worker makes one rig. Whatever is measured or compiled before the group forms happens here and leaves no trace.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.optim import Optimizer

from uneven.config import RunConfig, Task
from uneven.data.feed import Feed, Micros, make_feed
from uneven.hardware.device import needs_ranks
from uneven.hardware.system import read_memory
from uneven.hardware.throttle import Throttle
from uneven.parallel.activations import Activations
from uneven.parallel.batchnorm import BatchNormSync, has_batchnorm, synchronise
from uneven.parallel.strategy import FullState
from uneven.policy.axis import Axis, Part
from uneven.policy.finish import Cost
from uneven.policy.recorded import Round
from uneven.policy.scale import lr_scale, ramp
from uneven.results.state import read_structure
from uneven.step.caps import probe_cap, room_bytes
from uneven.step.capture import can_capture
from uneven.step.captured import CapturedBackward
from uneven.step.costs import measure_cost
from uneven.step.eager import EagerStep
from uneven.step.graph import GraphStep
from uneven.step.meter import LossMeter
from uneven.step.precision import Precision
from uneven.step.runahead import RunAhead
from uneven.step.schedule import Schedule
from uneven.step.warmup import no_trace
from uneven.timeline.record import Recorder
from uneven.train.rank_info import RankInfo


class Engine:
    """Life cycle: made on the thread that trains; `warm_up` and `measure` before the first slot, if at all."""

    def __init__(self, task: Task, config: RunConfig, rank_info: RankInfo, recorder: Recorder) -> None:
        self.task, self.config, self.rank_info, self.recorder = task, config, rank_info, recorder
        self.axis = Axis(len(task.dataset), config.slot_size(rank_info.world_size), config.epochs)
        self.on = torch.device(rank_info.device.torch_name)
        torch.manual_seed(config.seed)
        # Made on the CPU and then moved, so that a seed gives the same model on every device.
        self.model = task.make_model().to(self.on)
        self.model.train()
        if config.activations in ("recompute", "offload") and not (
            config.is_model_parallel and rank_info.world_size > 1  # applied to the sharded layers, when these are made
        ):
            Activations(self.model, config.activations)
        self.structure = read_structure(self.model)  # as it was made: synchronised layers have other names
        # Alone, BatchNorm sees all samples anyway.
        self.batchnorm_sync = (
            synchronise(self.model) if config.sync_batchnorm and rank_info.world_size > 1 else BatchNormSync()
        )
        self.optimizer = task.make_optimizer(self.model.parameters())
        self.schedule = Schedule(task.make_scheduler, self.optimizer, self.axis.schedule_length)
        self.meter = LossMeter(self.on)
        self.eager = EagerStep(
            self.model,
            self.optimizer,
            task.train_step,
            Precision(config.precision, self.on),
            self.meter,
            config.max_grad_norm,
            self.batchnorm_sync,
        )
        # With compile="graph" the one or the other: the whole step, or what comes before the sum over ranks.
        self.graph: GraphStep | None = None
        self.captured: CapturedBackward | None = None
        self.feed: Feed = make_feed(
            task.dataset,
            self.on,
            config.seed,
            config.batch_size,
            config.num_workers,
            is_rank=needs_ranks(rank_info.devices),
        )
        self.run_ahead = RunAhead(self.on)
        self.throttle = Throttle(rank_info.device.speed)
        # Whether steps can be run beforehand: not in a loop of the user's own, nor where no device holds a whole model.
        self.is_rehearsed = rank_info.world_size == 1 or config.is_replicated
        self.takes_whole_parts = False  # as one batch: a loop of the user's own
        self.full_state: Callable[[], FullState] | None = None  # where the state is in pieces
        self.log: list[tuple[int, int, int]] = []  # (slot, first, samples) of every part trained, in order
        self.rounds: list[Round] = []  # of a local policy, the first is round 0
        self.caps = config.caps(rank_info.world_size)  # samples that each rank may hold at once
        self._sizes: set[tuple[int, ...]] = set()  # of micro-batches, seen in steps of several ranks
        self.has_cuda = False  # some rank of the group, this one or another
        self.trained = 0  # the slot after the last one trained
        self.samples = 0

    def batch(self, samples: int, rank: int | None = None) -> int:
        """The micro-batches' size when a rank, this one unless named, trains so many samples in one step."""
        wanted = max(self.config.batch_size, -(-samples // self.config.accumulate))
        cap = self.caps[self.rank_info.rank if rank is None else rank]
        if min(wanted, samples) <= cap or self.takes_whole_parts:
            return wanted
        return -(-samples // -(-samples // int(cap)))  # as few as possible, and as equal

    def adopt(self, optimizer: Optimizer, full_state: Callable[[], FullState], step: EagerStep | None = None) -> None:
        """From now on this optimizer trains the model, a strategy's, which is made when the group forms."""
        self.optimizer = optimizer
        self.schedule = Schedule(self.task.make_scheduler, optimizer, self.axis.schedule_length)
        self.full_state = full_state
        self.eager = self.eager if step is None else step
        self.eager.optimizer = optimizer

    def open(self, micros: Micros) -> Micros:
        """The micro-batches as batches; what is captured opens them by itself."""
        if self.graph is not None or self.captured is not None:
            return micros
        return [(self.feed.open(inputs), samples) for inputs, samples in micros]

    @property
    def memory_bytes(self) -> float:
        """This rank's part of its device's memory; that of CPU ranks is the machine's."""
        names = [device.torch_name for device in self.rank_info.devices]
        sharing = names.count(self.rank_info.device.torch_name)
        if self.on.type == "cuda":
            return torch.cuda.get_device_properties(self.on).total_memory / sharing
        return (read_memory()[0] or 1.0) / sharing

    def wanted_scale(self, default: float | str, speeds: Sequence[float]) -> float:
        """What the learning rates should be multiplied by when ranks of these speeds train together."""
        given = self.config.lr_scale
        return lr_scale(default if given is None else given, speeds)

    def move_rates(self, slot: int, scale: float) -> None:
        """The learning rates of a slot: the schedule at its global samples, times the scale after its warm-up."""
        axis = self.axis
        grown = ramp(scale, axis.samples_before(slot), axis.samples, axis.samples * axis.epochs)
        self.schedule.move_to(axis.schedule_position(slot), grown)

    def step_alone(self, part: Part, micros: Micros, began_ns: int) -> None:
        """One optimizer step of this rank, whatever the others do."""
        step = self.graph or (self.eager if self.captured is None else self.captured.rehearse)
        step(micros, part.samples)
        self.slow_down(began_ns)

    def sum_gradients(
        self, micros: Micros, slot_samples: int, stats: Callable[[], Sequence[float]]
    ) -> tuple[list[list[float]], Tensor | None]:
        """The first half of a step of all ranks, from micro-batches as `open` gives them; see EagerStep."""
        if self.captured is None:
            return self.eager.sum_gradients(micros, slot_samples, stats)
        return self.eager.sum_gradients(micros, slot_samples, stats, self.captured)

    def after_step(self, began_ns: int) -> None:
        """Keep the host close to its device after a step enqueued since then; a step of all ranks does so itself."""
        is_simulated = self.rank_info.device.speed < 1  # it sleeps: the host's word for its work is the true one
        self.run_ahead.after_step(None if is_simulated else began_ns)

    def is_odd(self, part: Part) -> bool:
        """Whether the step just done says nothing about this rank's speed: asked once after each.

        A CUDA device chooses its kernels when a size is new, and captures take their time.
        """
        if self.captured is not None:
            return not self.captured.is_replayed
        sizes = tuple(part.sizes)
        is_new = self.on.type == "cuda" and sizes not in self._sizes
        self._sizes.add(sizes)
        return is_new

    def slow_down(self, began_ns: int) -> None:
        """A simulated device takes longer for what began then."""
        if self.rank_info.device.speed < 1:
            self.run_ahead.catch_up()
            self.throttle.pause((self.recorder.clock() - began_ns) / 1e9)

    def note(self, part: Part) -> None:
        """This part is trained."""
        self.log.append((part.slot.index, part.first, part.samples))
        self.trained = part.slot.index + 1
        self.samples += part.samples

    def warm_up(self) -> None:
        """Compile, capture and let CUDA choose its kernels before the training clock starts.

        Both sizes of slot are run, the full one and an epoch's shorter last one. An eager CPU has nothing to
        warm up.
        """
        if self.config.compile == "off" and self.on.type == "cpu":
            return
        self.recorder.enter("compile")
        self._find_cap()
        if self.config.compile == "default":
            self.model.compile()
        ends = (self.axis.slot(0), self.axis.slot(self.axis.slots_per_epoch - 1))
        parts = {slot.samples: self._rehearsal(slot.samples) for slot in ends}
        with no_trace(self.eager, self.on):
            for part, micros in self.feed.stream(parts.values()):
                self.eager([(self.feed.open(inputs), samples) for inputs, samples in micros], part.samples)
        if self.config.compile == "graph" and can_capture(self.on):
            self._capture(parts[self.axis.slot(0).samples])
        self.run_ahead.drain()
        self.recorder.enter("setup")

    def measure(self) -> Cost:
        """This rank's own speed and what it can hold, before the group forms, so that round 0 can share out."""
        self.recorder.enter("compile")
        slot = self.axis.slot(0)

        @lru_cache(maxsize=None if self.config.num_workers else 0)
        def read(samples: int) -> tuple[Part, Micros]:
            # Loader processes read ahead; starting them anew for every step would be taken for the step's cost.
            return next(self.feed.stream([Part(slot, 0, samples, self.batch(samples))]))

        def run_step(samples: int) -> None:
            began_ns = self.recorder.clock()
            part, micros = read(samples)
            self.step_alone(part, self.open(micros), began_ns)
            self.run_ahead.drain()

        # Of captured steps the first of a size runs eagerly and the second is the capture.
        untimed = 1 if self.captured is None else 2
        captures = nullcontext() if self.captured is None else self.captured.rehearsal()
        with no_trace(self.eager, self.on), captures:
            cost = measure_cost(run_step, self._expected(slot.samples), self._least, untimed=untimed)
        self.recorder.enter("setup")
        return replace(cost, cap=self.caps[self.rank_info.rank])

    @property
    def _least(self) -> int:
        """The smallest batch that can be trained."""
        return 2 if has_batchnorm(self.model) else 1

    def _find_cap(self) -> None:
        """What this rank's memory holds at once, where shares move and nobody has said: before anything larger runs."""
        config, slot = self.config, self.axis.slot(0)
        is_moving = config.policy == "balanced" and self.rank_info.world_size > 1 and not config.has_fixed_shares
        if self.on.type != "cuda" or not is_moving or config.memory_cap is not None:
            return

        def run_at_once(samples: int) -> None:
            _, micros = next(self.feed.stream([Part(slot, 0, samples, samples)]))
            self.eager([(self.feed.open(inputs), many) for inputs, many in micros], samples)

        names = [device.torch_name for device in self.rank_info.devices]
        room = room_bytes(self.on, names.count(self.rank_info.device.torch_name))
        if config.compile == "graph":
            room /= 2  # graphs keep their memory while a size that is new runs eagerly beside them
        with no_trace(self.eager, self.on):
            cap = probe_cap(run_at_once, self.on, room, self._least, slot.samples)
        rank = self.rank_info.rank
        self.caps = (*self.caps[:rank], float(max(cap, self._least)), *self.caps[rank + 1 :])

    def _capture(self, part: Part) -> None:
        """The whole step as a graph; or, where gradients are summed over ranks, forward and backward.

        Those graphs need the group's reducer, which is not there yet: here they only show that they can be made.
        """
        if self.rank_info.world_size == 1 or self.config.is_local:
            ((part, micros),) = self.feed.stream([part])
            self.graph = GraphStep(self.eager, self.feed.open, self.on)
            self.graph.capture(micros, part.samples)
            return
        self.captured = CapturedBackward(self.eager, self.feed.open)
        with no_trace(self.eager, self.on), self.captured.rehearsal():
            for _, micros in self.feed.stream([part, part]):  # the first runs eagerly
                self.captured.rehearse(micros, part.samples)

    def _expected(self, slot_samples: int) -> int:
        """What this rank may expect of a slot before anything is known."""
        return slot_samples if self.config.is_local else -(-slot_samples // self.rank_info.world_size)

    def _rehearsal(self, samples: int) -> Part:
        """A part of the first slot as large as one of such a slot would be, trained only to warm up."""
        each = self._expected(samples)
        return Part(self.axis.slot(0), 0, each, self.batch(each))
