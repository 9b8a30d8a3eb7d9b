"""Shares by speed in a training loop that is not ours: under torchrun, accelerate, Lightning, with torch's own DDP.

The loop keeps its process group, model, optimizer and loss. `StepShares` says how many samples of each step every rank
trains and measures how long they take it, `StepSampler` reads this rank's samples, and the loss is multiplied by
`factor`. The params are then those of one process that trains whole batches of `samples`. A whole script for torchrun:

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from uneven.core import StepSampler, StepShares, watch_ddp

    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(100, 6, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 3)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    shares = StepShares(samples=16)  # of a step, of all ranks together
    sampler = StepSampler(DistributedSampler(data, num_replicas=1, rank=0), shares)  # one order for all ranks
    watch_ddp(ddp, shares)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_sampler=sampler):
            step = shares.step
            shares.start()
            loss = torch.nn.functional.cross_entropy(ddp(x), y) * shares.factor(step, sampler.own[step, 0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            shares.note(step)

Every rank makes the same calls in the same order. It is built on the policies that `fit` trains with.
docs/core.md explains it.
"""

import inspect
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

from uneven.comm.ddp_hook import CommHook, call_before_last_sum
from uneven.comm.gather import gather_json, own_row
from uneven.comm.torch_group import AnyGroup, as_group, as_host_group
from uneven.comm.work import Work
from uneven.errors import InputError
from uneven.hardware.throttle import Throttle
from uneven.policy.axis import Slot, part_of
from uneven.policy.calibrating import Calibrating
from uneven.policy.exact import ExactPolicy, Fixed, Move
from uneven.train.synchronizer import check_agreement


class StepShares:
    """How many samples of each optimizer step every rank trains; the same on all ranks.

    Life cycle of a step: `of`, which a StepSampler asks; `start`; forward and backward; `stop`, as soon as this rank's
    gradients are complete, which `watch_ddp` calls; `note`. Its collectives have a group of their own, over Gloo, and
    one rank alone needs none. Whatever ranks could disagree about is compared in `note`, before it moves shares.
    """

    def __init__(
        self,
        samples: int,
        *,
        group: AnyGroup = None,
        shares: Literal["balanced", "sync"] | Sequence[float] = "balanced",
        caps: Sequence[int] | None = None,
        least: int = 1,
        lookahead: int = 0,
    ) -> None:
        """A collective of the ranks of `group`, a torch process group; None is the default one.

        `samples`: of a step, of all ranks together.
        `shares`: "balanced" follows the measured speed, "sync" divides evenly; numbers, one per rank, are a ratio.
        `caps`: the most samples of a step that each rank can take, where "balanced" divides them.
        `least`: a rank has no samples in a step or so many: 2 for BatchNorm, the number of pieces where steps have
        several. `lookahead`: steps whose batches are read before the present one is noted, as by `num_workers`.
        """
        outer = as_group(group)
        self.rank, self.world_size = outer.rank, outer.world_size
        started = os.environ.get("WORLD_SIZE", "1")
        if group is None and self.world_size == 1 and started not in ("", "1"):
            raise InputError(
                f"StepShares: {started} processes were started (WORLD_SIZE) and there is no process group; call "
                "torch.distributed.init_process_group(...) before"
            )
        self.samples = samples
        self.least, self.lookahead = least, lookahead
        self.step = 0  # the present one, which is not noted yet
        self.stop_requested = False  # by some rank; from the same `note` on, on all of them
        self.busy_ms: tuple[float, ...] = ()  # every rank's own work in the last step
        self.device: torch.device | None = None  # whose work the clock waits for; see `watch_ddp`
        self._shares = shares if isinstance(shares, str) else tuple(float(share) for share in shares)
        self._caps = None if caps is None else tuple(caps)
        self._check_settings()
        self._group = as_host_group(outer)
        self._check_alike()
        self._policy = self._make_policy(0)
        self._sizes: dict[int, int] = {}  # samples of the steps that were asked for
        self._asked_s: float | None = None  # when the present step was first asked for; None: ahead, by a loader
        self._order = 0
        self._is_resumed = False  # nothing was trained since `load_state_dict`
        self._is_stopping = False
        self._clock = _StepClock()
        self._throttle = Throttle(1.0)
        self._sent: Work | None = None

    def of(self, step: int, samples: int | None = None) -> tuple[int, ...]:
        """Every rank's samples of a step, in rank order. `samples`: of the step, where it is a short one."""
        samples = self._sizes.get(step, self.samples) if samples is None else samples
        if samples < 1:
            raise InputError(f"samples={samples} of step {step}: a step has at least 1")
        if step < self.step:
            return self._policy.shares(step, samples)  # trained before: a resumed loader passes over it
        if step > self.step + self.lookahead and not isinstance(self._policy, Fixed):
            raise InputError(
                f"the samples of step {step} are read before step {self.step} is noted, and lookahead="
                f"{self.lookahead} allows {self.lookahead} steps; a DataLoader reads num_workers * prefetch_factor "
                "batches ahead: StepShares(lookahead=) must be so many steps"
            )
        if step == self.step and step not in self._sizes:
            self._asked_s = time.perf_counter()
        self._sizes[step] = samples
        return self._policy.shares(step, samples)

    def factor(self, step: int, own: int, reduce: Literal["mean", "sum"] = "mean") -> float:
        """What the mean loss over `own` samples of this rank is multiplied by, between `of` and `note`.

        `reduce`: whether gradients are averaged over ranks, as by DDP, or summed.
        """
        if step not in self._sizes:
            raise InputError(
                f"factor of step {step}: ask of({step}) before, as a StepSampler does, and factor before note({step})"
            )
        return own * (self.world_size if reduce == "mean" else 1) / self._sizes[step]

    def begin(self, step: int, order: int = 0, end: int = 0) -> None:
        """Go on at this step: an epoch begins, which lasts until step `end`. A StepSampler calls it.

        `order`: a checksum of the order of samples, compared between ranks. Frameworks resume by reading an epoch from
        its beginning, and pass over the batches that were trained before: then the loaded step stays the present one.
        """
        if self._sent is not None or self._clock.is_running:
            raise InputError(f"step {step} begins while step {self.step} is under way: call note({self.step}) before")
        if self._is_resumed and step < self.step < end:
            step = self.step
        if step != self.step and isinstance(self._policy, Calibrating) and self._policy.costs is None:
            self._policy = self._make_policy(step)  # what was measured before the gap is no whole measurement
        self._sizes.clear()
        self.step, self._order = step, order
        self._asked_s = None

    @property
    def is_under_way(self) -> bool:
        """Between `start` and `stop`."""
        return self._clock.is_running

    def start(self, before_s: float | None = None) -> None:
        """This rank's own work in the step begins; `before_s` of it lie behind, such as reading the batch.

        By default all since the first `of` of this step: since a StepSampler was asked for its batch. Where ranks wait
        for each other in between, or with workers that read, say how long it took.
        """
        if before_s is None:
            before_s = 0.0 if self._asked_s is None else time.perf_counter() - self._asked_s
        self._clock.start(self.device, before_s)

    def leave_out(self, seconds: float) -> None:
        """So long since `start` this rank did not work: it waited for other ranks."""
        self._clock.leave_out(seconds)

    def stop(self) -> None:
        """This rank's gradients are complete: tell the others how long it worked. Does not wait for them.

        Without a `start` nothing happens: a backward pass that is no part of a step.
        """
        if self._sent is not None:
            raise InputError(
                f"the gradients of step {self.step} are complete a second time: all its backward passes but the last "
                "belong inside ddp.no_sync(), and note(step) follows the last one"
            )
        if not self._clock.is_running:
            return
        self._throttle.pause(self._clock.seconds())
        row = [1e3 * self._clock.stop(), float(self._fingerprint()), float(self._order), float(self._is_stopping)]
        self._sent = self._group.all_reduce(own_row(self._group, row))

    def note(self, step: int) -> Move | None:
        """The step is over: wait for every rank's time, and let it move the shares of later steps.

        Returns the change, if any. RankError or InputError on every rank where they disagree.
        """
        if self._clock.is_running and self.world_size == 1:
            self.stop()
        if step != self.step:
            raise InputError(f"note({step}): step {self.step} is under way; `begin` goes to another one")
        if self._sent is None:
            missing = "stop(), or watch_ddp(ddp, shares) before the loop" if self._clock.is_running else "start()"
            raise InputError(f"note({step}): the step was not measured; call {missing}")
        rows: list[list[float]] = self._sent.wait().tolist()
        self._sent = None
        self.busy_ms, fingerprints, orders, stops = zip(*rows, strict=True)
        self._check_orders(orders)
        check_agreement([int(one) for one in fingerprints], f"about step {step}: its number, samples or shares")
        self.stop_requested = any(stops)
        self.step, self._asked_s = step + 1, None
        self._is_resumed = False
        return self._policy.note(step, self._sizes.pop(step), self.busy_ms)

    def request_stop(self) -> None:
        """Ask all ranks to stop: `stop_requested` is true on each of them after the same step."""
        self._is_stopping = True

    def slow_down(self, speed: float) -> None:
        """Work at this fraction of the speed, as the device `cpu@0.4` does: to try unlike devices on like ones."""
        self._throttle = Throttle(speed)

    def state_dict(self) -> dict[str, Any]:
        """The next step and what was measured, as plain JSON; the same on every rank, taken between two steps."""
        sizes = {"step": self.step, "samples": self.samples, "ranks": self.world_size}
        return {**sizes, "kind": type(self._policy).__name__, "policy": self._policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at its step, by its costs; those are measured anew where ranks or policy are others."""
        if state["samples"] != self.samples:
            raise InputError(
                f"StepShares(samples={self.samples}): the state counts steps of {state['samples']} samples; take these"
            )
        self.begin(state["step"])
        self._is_resumed = True
        if (state["ranks"], state["kind"]) == (self.world_size, type(self._policy).__name__):
            self._policy.load_state_dict(state["policy"])

    def close(self) -> None:
        """Leave the group that `note` waits in; the user's own stays."""
        self._group.close()

    def _make_policy(self, step: int) -> ExactPolicy:
        if self._shares == "sync" or self.world_size == 1:
            return Fixed((1.0,) * self.world_size, self.least)
        if not isinstance(self._shares, str):
            return Fixed(self._shares, self.least)
        first = step + 1  # the step before it compiles and allocates
        return Calibrating(self.world_size, self.samples, first, self.least, self.lookahead, self._caps, keeps_all=True)

    def _fingerprint(self) -> int:
        of_step = (self.step, self.of(self.step), self._policy.fingerprint())
        return zlib.crc32(repr(of_step).encode())

    def _check_settings(self) -> None:
        for name, value, smallest in (
            ("samples", self.samples, 1),
            ("least", self.least, 1),
            ("lookahead", self.lookahead, 0),
        ):
            if not isinstance(value, int) or value < smallest:
                raise InputError(f"StepShares({name}={value!r}) must be a whole number of at least {smallest}")
        if isinstance(self._shares, str):
            if self._shares not in ("balanced", "sync"):
                raise InputError(f"shares={self._shares!r} must be 'balanced', 'sync' or one number per rank")
        elif len(self._shares) != self.world_size:
            raise InputError(f"shares={self._shares} has {len(self._shares)} numbers for {self.world_size} ranks")
        elif not (min(self._shares) >= 0.0 and 0.0 < sum(self._shares) < float("inf")):
            raise InputError(f"shares={self._shares} must be numbers of at least 0, one of them above it")
        if self._caps is None:
            return
        if self._shares != "balanced":
            raise InputError(f"caps={self._caps} bounds the shares of 'balanced'; leave it out with shares=...")
        if len(self._caps) != self.world_size or min(self._caps) < 0 or sum(self._caps) < self.samples:
            raise InputError(
                f"caps={self._caps} must be one number for each of {self.world_size} ranks, and together hold the "
                f"{self.samples} samples of a step"
            )

    def _check_alike(self) -> None:
        shares = self._shares if isinstance(self._shares, str) else list(self._shares)
        own = {"samples": self.samples, "shares": shares, "caps": self._caps, "least": self.least}
        settings = gather_json(self._group, {**own, "lookahead": self.lookahead})
        for rank, theirs in enumerate(settings):
            for name, value in theirs.items():
                if value != settings[0][name]:
                    raise InputError(
                        f"rank {rank} has StepShares({name}={value!r}), rank 0 has {settings[0][name]!r}: give all "
                        "ranks the same"
                    )

    def _check_orders(self, orders: Sequence[float]) -> None:
        for rank, order in enumerate(orders):
            if order != orders[0]:
                raise InputError(
                    f"rank {rank} has another order of samples than rank 0, so some would be trained twice: seed it "
                    "alike on all ranks, as DistributedSampler(data, num_replicas=1, rank=0, seed=0) or "
                    "RandomSampler(data, generator=torch.Generator().manual_seed(0)) are"
                )


class _StepClock:
    """The time of a rank's own work in a step: on the host, or on a CUDA device until it has done what was enqueued.

    A device's time begins when it reaches the step, not when the host does, which may be ahead of it.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._began_s = 0.0
        self._left_out_s = 0.0
        self._begun: torch.cuda.Event | None = None

    def start(self, device: torch.device | None, before_s: float) -> None:
        if device is None and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._begun = self._event()
        self._began_s, self._left_out_s = time.perf_counter(), -before_s
        self.is_running = True

    def leave_out(self, seconds: float) -> None:
        self._left_out_s += seconds

    def seconds(self) -> float:
        """Since `start`, as far as this rank worked; waits for the device."""
        end = self._event()
        if self._begun is None or end is None:
            return time.perf_counter() - self._began_s - self._left_out_s
        end.synchronize()
        return float(self._begun.elapsed_time(end)) / 1e3 - self._left_out_s

    def stop(self) -> float:
        self.is_running = False
        return self.seconds()

    def _event(self) -> torch.cuda.Event | None:
        """In the present stream of this thread: a hook in backward runs in another one than the loop."""
        if self._device is None or self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class Order(Sized, Iterable[int], Protocol):
    """A sampler, or a list."""


class StepSampler(BatchSampler):
    """The batch sampler of a DataLoader: this rank's samples of every step, as `shares` divides them.

    A step has `pieces` batches on every rank: all but its last one go into `ddp.no_sync()`. Where a rank has no samples
    for one, the batch is a filler, the first samples of the step, for DDP needs a backward pass on every rank:
    `own[step, piece]` is 0 then, so `factor` is, too. Step numbers go on over epochs, `steps` in each.
    """

    def __init__(self, order: Order, shares: StepShares, *, pieces: int = 1, drop_last: bool = False) -> None:
        """`order`: all samples of an epoch, in the same order on every rank. `drop_last`: the short step at its end."""
        super().__init__(order, shares.samples, drop_last)
        self.sampler: Any = order  # accelerate puts another one in its place when it loads a state
        if pieces < 1:
            raise InputError(f"pieces={pieces} must be at least 1: the batches of a step on each rank")
        self.shares, self.pieces = shares, pieces
        self.epoch = 0
        self.skip = 0  # steps to leave out at the beginning of the next epoch: those that were trained before
        self.own: dict[tuple[int, int], int] = {}  # (step, piece) -> samples that count, until the step is over
        if self.steps < 1:
            raise InputError(f"drop_last leaves no step: {len(self.sampler)} samples an epoch, {shares.samples} a step")

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        whole, rest = divmod(len(self.sampler), self.shares.samples)
        return whole + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        return self.steps * self.pieces

    def set_epoch(self, epoch: int) -> None:
        """Before each epoch on every rank, as of a DistributedSampler; goes on to `order`, where that has it."""
        self.epoch = epoch
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        skip, self.skip = self.skip, 0
        first = self.epoch * self.steps
        self.own.clear()
        self.shares.begin(first + skip, zlib.crc32(repr(order).encode()), end=first + self.steps)
        for place in range(skip, self.steps):
            at = place * self.shares.samples
            slot = Slot(first + place, self.epoch, at, min(self.shares.samples, len(order) - at))
            yield from self._pieces_of(slot, order)

    def _pieces_of(self, slot: Slot, order: Sequence[int]) -> Iterator[list[int]]:
        shares = self.shares.of(slot.index, slot.samples)
        part = part_of(slot, shares, self.shares.rank, slot.samples)
        for step, piece in [key for key in self.own if key[0] < self.shares.step]:
            del self.own[step, piece]
        cuts = [part.first + part.samples * piece // self.pieces for piece in range(self.pieces + 1)]
        filler = max(1, self.shares.least // self.pieces)  # BatchNorm refuses a batch of one
        for piece, (begin, end) in enumerate(pairwise(cuts)):
            self.own[slot.index, piece] = end - begin
            yield list(order[begin:end] or order[slot.first : slot.first + min(filler, slot.samples)])


def watch_ddp(
    ddp: DistributedDataParallel, shares: StepShares, hook: CommHook | None = None, state: Any = None
) -> None:
    """Stop the clock of `shares` when `ddp` is about to sum its last bucket, before this rank waits for others.

    A DDP takes one comm hook: pass your own with its `state` here instead of to `register_comm_hook`.
    """
    shares.device = next(ddp.parameters()).device
    call_before_last_sum(ddp, shares.stop, hook, state)


COUNTS = (1000, 2000)


def loss_uses_count(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the loss of a Hugging Face model is a sum divided by `num_items_in_batch`, for this batch with labels.

    Many models take the argument and return a mean all the same. Such a loss is multiplied by `factor`; the other one
    is right as it is, with the count of all ranks. Ask with one batch on every rank, before training: two forward
    passes in eval mode.
    """
    params = inspect.signature(model.forward).parameters.values()
    if not any(param.name == "num_items_in_batch" or param.kind is param.VAR_KEYWORD for param in params):
        return False
    follows = follows_count(model, lambda count: _loss_of(model(**batch, num_items_in_batch=count)))
    if follows is None:
        raise InputError("the loss of this batch is 0 or not finite: ask with one that has labels to learn from")
    return follows


def follows_count(model: nn.Module, loss_of: Callable[[torch.Tensor], float]) -> bool | None:
    """Whether a loss is divided by the count that it is given, computed twice by this model in eval mode.

    None where it cannot be told: the loss is 0 or not finite.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            few, many = (loss_of(torch.tensor(count)) for count in COUNTS)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not 0.0 < abs(few) < float("inf"):
        return None
    return abs(few / many - COUNTS[1] / COUNTS[0]) < 1e-2 if many else False


def _loss_of(output: Any) -> float:
    """Of a ModelOutput, a dict or a tuple that begins with it."""
    return float(output["loss"] if isinstance(output, Mapping) else output[0])
