"""One optimizer step on one rank, run operation by operation: micro-batches in, updated params out.

The arithmetic of the whole project starts here: losses are divided by the slot's sample count and gradients are
SUMMED, so micro-batches and ranks of unequal size need no weights of their own. With several ranks the Reducer sums
gradients over them between backward and update.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.config import TrainStep
from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.parallel.batchnorm import BatchNormSync
from uneven.parallel.reducer import Reducer
from uneven.step.finite import (
    Backup,
    Cause,
    Fault,
    OwnCheck,
    Verdict,
    find_fault,
    largest_of,
    largest_unless_finite,
    losses_of,
    total_count,
)
from uneven.step.loss import LossMeter, read_loss, warn_of_fraction
from uneven.step.precision import Precision
from uneven.step.schedule import required_arguments

Stats = Callable[[], Sequence[float]]  # this rank's numbers for the other ranks
Rows = list[list[float]]  # every rank's
BeforeStep = Callable[[nn.Module, Optimizer], object]  # called with the summed gradients in place


@dataclass(frozen=True)
class BeforeUpdate:
    """What happens to the summed gradients: the user's function sees them, then they are clipped."""

    function: BeforeStep | None = None
    max_grad_value: float | None = None
    max_grad_norm: float | None = None


class EagerStep:
    """Life cycle: called with (batches, slot_samples) once per slot; losses are added up in `meter`.

    A step of several ranks is `forward_backward` and then `update`; for it `reducer` is set when the group has formed.
    A loop of the user's own may run micro-batches ahead of the step, one by one: `accumulate`.
    A step that is not finite leaves no trace: [Note: steps that are not finite] in finite.py.
    Other forms of a step (captured.py, graph.py, several.py, strategy_step.py) are made from this one and take its
    place: whoever trains calls the same methods and does not know which it is.
    """

    is_captured = False  # takes inputs in place of batches, which it opens inside its graph
    answers_late = False  # whether a step was finite is known when the device has done it
    untimed_steps = 1  # of a new size, before their time is measured
    # Of the step that has begun, where it has several updates: how many are behind it, and why one was skipped.
    updates_so_far = 0
    fault_so_far: Fault | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_step: TrainStep,
        precision: Precision,
        before_update: BeforeUpdate | None = None,
        batchnorm_sync: BatchNormSync | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.train_step = train_step
        self.precision = precision
        self.before_update = before_update or BeforeUpdate()
        self.batchnorm_sync = batchnorm_sync or BatchNormSync()
        self.meter = LossMeter(precision.device)
        self._is_on_host = not self.meter.totals.is_cuda
        self._changes_gradients = self.before_update != BeforeUpdate()
        self.reducer: Reducer | None = None
        self.is_further_loss = False  # of a batch that had a loss already: added to that one, not counted again
        self._has_counted = False  # the first count is looked at: later ones are left where they are, on the device
        self._is_zeroed = False  # the gradients, for the step that has begun
        self._accumulated: Tensor | None = None  # the counts of micro-batches ahead of the step
        self._has_begun = False  # between a step's first forward and its update
        self._made_backup: Backup | None = None
        self._trained: TrainedParams | None = None  # where ranks train together
        self._limit: float | None = None

    def start_alone(self, inputs: Sequence[tuple[Any, int]], slot_samples: int) -> Verdict:
        """A step of this rank alone; returns why it was skipped, if it was, where that is known later."""
        fault = self(inputs, slot_samples)
        return lambda: fault

    def is_prepared(self, sizes: Sequence[int], slot_samples: int) -> bool:
        """Whether a step of these micro-batches needs no `prepare`."""
        del sizes, slot_samples
        return True

    def prepare(self, inputs: Sequence[tuple[Any, int]], slot_samples: int) -> None:
        """Do beforehand what the first step of these sizes needs; inside `no_trace(keep_optimizer_tensors=True)`."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Around steps of this rank alone, before the group forms."""
        return nullcontext()

    def __call__(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Fault | None:
        """A step of this rank alone; returns why it was skipped, if it was."""
        counts = self._backward_once(batches, slot_samples)
        # A scaler's gradients are not checked, and once they are unscaled the scaler expects its own step. A function
        # of the user's, or a clip by value, must not see or hide what is not finite.
        is_scaled = self.precision.is_scaled
        before = self.before_update
        is_late = is_scaled or before.function is not None or before.max_grad_value is not None
        norm = None if is_late else self.prepare_update(counts)
        largest = None if is_scaled else self._own_gradients(norm)
        if self._is_on_host:
            own = self._host_check(counts, largest)
        else:
            own = OwnCheck.from_row(self.own_check(counts, largest).tolist())
        fault = self.fault_of([own])
        if fault is not None and norm is not None and fault.cause >= Cause.GRADIENT_NAN and self._is_finite():
            fault = None  # finite gradients whose norm overflows: clipped to 0, as torch does
        if fault is not None:
            self.skip()
            return fault
        if is_late:
            self.prepare_update(counts)
        self.step_optimizer()
        return None

    def begin(self) -> None:
        """Before a slot's first forward. The steps call it; for a loop of the user's own the loop does."""
        self._has_begun = True
        self.backup().save()

    def use_train_step(self, train_step: TrainStep) -> None:
        """Train with this function from now on."""
        self.train_step = train_step

    def fix_params(self) -> None:
        """From now on no other params may be trained: the group has formed, and knows these alone."""
        self._trained = TrainedParams(self.model, self.optimizer)

    def check_params(self) -> None:
        """Before every step. Not in `begin`: a rank that leaves by this very error still tells the others in a sum."""
        if self._trained is not None:
            self._trained.check(self.optimizer)

    def accumulate(self, batch: Batch, samples: int, slot_samples: int) -> None:
        """A micro-batch ahead of its step, without any collective."""
        self._zero_once()
        with self.no_sync():
            self._accumulated = _added(self._accumulated, self.backward_of(batch, samples, slot_samples))

    def cancel(self) -> None:
        """Forget a step that is not taken."""
        self._is_zeroed, self._accumulated = False, None
        if self._has_begun:
            self.skip()

    def skip(self) -> None:
        """Leave a step out that has begun."""
        self._has_begun = False
        self.backup().restore()

    def forward_backward(
        self, batches: Sequence[tuple[Any, int]], slot_samples: int, stats: Stats
    ) -> tuple[Rows, list[OwnCheck]]:
        """Forward and backward, and gradients summed over ranks; `update` ends the step.

        Returns every rank's statistics (this rank's `stats` is called just before the last bucket is sent) and check.
        """
        counts, sums = self._backward_once(batches, slot_samples), self._sums
        if self._is_on_host:
            own = self._host_check(counts, sums.largest_gradient())  # own work: before `stats` takes the time
            return split_checks(sums.finalize(lambda: [*stats(), *own]))
        return split_checks(
            sums.finalize(lambda: [*stats(), *OwnCheck()], lambda: self.sent_check(counts, sums.largest_gradient()))
        )

    def exchange(self, slot_samples: int, stats: Stats) -> Rows:
        """A sum of zeros in place of a step's: the other ranks are waiting in that one. Returns their statistics."""
        self.cancel()
        rows, _ = self.forward_backward([], slot_samples, stats)
        self.cancel()
        return rows

    def update(self, checks: Sequence[OwnCheck]) -> Fault | None:
        """The second half of a step of all ranks: the update, or the reason why all of them skip it."""
        fault = self.fault_of(checks)
        if fault is None:
            self.meter.learn(losses_of(checks))
            total = total_count(checks)
            self.apply(None if total is None else torch.tensor(total, dtype=torch.float64))
        else:
            self.skip()
        return fault

    def sent_check(self, counts: Tensor | None, largest: Tensor | float | None) -> Tensor:
        """This rank's OwnCheck for the others, as a tensor on its device: with what its loss meter holds."""
        return torch.cat([self.own_check(counts, largest), self.meter.halves()])

    def own_check(self, counts: Tensor | None, largest: Tensor | float | None) -> Tensor:
        """What can go wrong in this rank's OwnCheck, as a tensor on its device."""
        totals = self.meter.totals
        none = totals.new_zeros(())
        count = [none, none] if counts is None else [torch.ones_like(none), counts]
        # The meter held finite losses before this step. It travels in fp32, for which their sum may be too large.
        loss = torch.where(totals[0].isfinite(), none, totals[0])
        return torch.stack([*count, loss, largest.to(totals.device) if isinstance(largest, Tensor) else none])

    def _host_check(self, counts: Tensor | None, largest: Tensor | float | None) -> OwnCheck:
        """The same where the host can read the numbers at once: without a dozen operations on single numbers."""
        total, count = self.meter.totals.tolist()
        loss = 0.0 if math.isfinite(total) else total
        rounded = array("f", (total, count))
        return OwnCheck(
            has_count=float(counts is not None),
            counts=float(counts or 0.0),
            loss=loss,
            largest=float(largest or 0.0),
            meter_sum=rounded[0],
            meter_count=rounded[1],
            rest_of_sum=total - rounded[0],
            rest_of_count=count - rounded[1],
        )

    def fault_of(self, checks: Sequence[OwnCheck]) -> Fault | None:
        """What is wrong with a step of these ranks, if anything; the same on every rank."""
        return find_fault(checks, self.limit, checks_gradients=not self.precision.is_scaled)

    @property
    def limit(self) -> float:
        """The largest number that every gradient can hold."""
        if self._limit is None:
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            floats = [param for param in params if param.requires_grad]  # a frozen one may hold integers
            self._limit = min((torch.finfo(param.dtype).max for param in floats), default=torch.inf)
        return self._limit

    def backward(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Tensor | None:
        """Sum gradients over the micro-batches; returns the count they must still be divided by, if any.

        A micro-batch of 0 samples is a dummy batch: it takes part in SyncBatchNorm's collectives and counts nothing.
        """
        counts, self._accumulated = self._accumulated, None
        for batch, samples in batches[:-1]:
            with self.no_sync():
                counts = _added(counts, self.backward_of(batch, samples, slot_samples))
        for batch, samples in batches[-1:]:
            counts = _added(counts, self.backward_of(batch, samples, slot_samples))
        return counts

    def no_sync(self) -> AbstractContextManager[None]:
        """Around a micro-batch's backward: only the last one's gradients are sent to the other ranks."""
        return nullcontext() if self.reducer is None else self.reducer.no_sync()

    def backward_of(self, batch: Batch, samples: int, slot_samples: int) -> Tensor | None:
        """One micro-batch; returns its count if the train step returned one."""
        if self.precision.name == "fp32" and not self.batchnorm_sync.layers:
            result = self.train_step(self.model, batch)
        else:
            with self.precision.region(), self.batchnorm_sync.dummy_batch(samples == 0):
                result = self.train_step(self.model, batch)
        loss, count = self.weigh(result, samples, slot_samples)
        if self.reducer is not None:
            self.reducer.is_dummy = samples == 0
        (self.precision.scaler.scale(loss) if self.precision.is_scaled else loss).backward()
        return count

    def weigh(self, result: Any, samples: int, slot_samples: int) -> tuple[Tensor, Tensor | None]:
        """A train step's result as this micro-batch's part of the slot's loss, and its count if there is one."""
        count: Tensor | None = None
        loss, units = read_loss(result)
        if units is not None:
            # (loss_sum, count), of tokens for instance: the count of all ranks is known only after the sum.
            if samples and not self._has_counted and not (loss.is_cuda and torch.cuda.is_current_stream_capturing()):
                warn_of_fraction(units)
                self._has_counted = True
            loss, units = (loss, units) if samples else (loss * 0, 0)
            count = _on_device(0 if self.is_further_loss else units, loss.device)
            self.meter.add(loss.detach(), count)
        else:
            self.meter.add(loss.detach(), 0 if self.is_further_loss else samples, samples)
            loss = loss if samples == slot_samples else loss * (samples / slot_samples)
        return loss, count

    def close(self) -> None:
        """Remove the reducer's hooks and gradients from the model."""
        if self.reducer is not None:
            self.reducer.close()
            for param in self.model.parameters():
                param.grad = None  # a view of a bucket

    def apply(self, counts: Tensor | None) -> None:
        """The update by gradients that are known to be finite; `counts`, if there are any, is on the host."""
        self.prepare_update(counts)
        self.step_optimizer()

    def prepare_update(self, counts: Tensor | None) -> Tensor | None:
        """Divide the gradients by the count and clip them; returns their norm where it was computed."""
        if not self._is_prepared_by(counts):
            return None  # listing the params of a model takes as long as ten operations on them
        scaler = self.precision.scaler  # it unscales the optimizer's gradients alone
        if self.precision.is_scaled and (outside := [param.grad for param in self._outside if param.grad is not None]):
            torch._foreach_div_(outside, scaler.get_scale())
        return self._prepare(self.optimizer, list(self.model.parameters()), counts)

    def _prepare(self, optimizer: Optimizer, params: list[nn.Parameter], counts: Tensor | None) -> Tensor | None:
        """Divide the gradients by the count, show them to the user's function, clip those of `params`."""
        if self._is_prepared_by(counts):
            self.precision.scaler.unscale_(optimizer)
        grads = [param.grad for param in params if param.grad is not None]
        if counts is not None and grads:
            # Half precision would round a count, or overflow; and a complex one cannot divide what is real.
            is_exact = {grad.dtype for grad in grads} in ({torch.float32}, {torch.float64})
            torch._foreach_div_(grads, counts.to(grads[0].dtype) if is_exact else counts)
        before = self.before_update
        if before.function is not None:
            with torch.no_grad():
                before.function(self.model, optimizer)
        if before.max_grad_value is not None:
            torch.nn.utils.clip_grad_value_(params, before.max_grad_value)
        if before.max_grad_norm is None:
            return None
        return torch.nn.utils.clip_grad_norm_(params, before.max_grad_norm)

    def _is_prepared_by(self, counts: Tensor | None) -> bool:
        """Whether anything happens to the gradients before the update."""
        return counts is not None or self._changes_gradients

    def step_optimizer(self) -> None:
        self.precision.step(self.optimizer)
        self.end_update()  # not before: a group that is lost inside a sharded step leaves it undecided

    def end_update(self) -> None:
        """The step that has begun is applied; called by itself where the update was the replay of a CUDA graph."""
        self._has_begun = False

    @property
    def _sums(self) -> Reducer:
        assert self.reducer is not None, "the reducer is made when the group has formed"
        return self.reducer

    def _backward_once(self, batches: Sequence[tuple[Batch, int]], slot_samples: int) -> Tensor | None:
        """Backward of a slot, all of it or what is left of it; returns its count, if there is one."""
        if not self._has_begun:
            self.begin()
        self._zero_once()
        counts = self.backward(batches, slot_samples)
        self._is_zeroed = False
        return counts

    def _zero_once(self) -> None:
        if not self._is_zeroed:
            self._zero_gradients()
            self._is_zeroed = True

    def _zero_gradients(self) -> None:
        if self.reducer is not None:
            self.reducer.prepare()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            for param in self._outside:
                param.grad = None

    @cached_property
    def _outside(self) -> list[nn.Parameter]:
        """Params with gradients that the optimizer does not hold: they count in the norm that is clipped."""
        held = {param for group in self.optimizer.param_groups for param in group["params"]}
        return [param for param in self.model.parameters() if param.requires_grad and param not in held]

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _own_gradients(self, norm: Tensor | None) -> Tensor | float:
        """A number that is not finite if a gradient is not: their norm, if it is known, serves as well."""
        return largest_unless_finite(self.gradients) if norm is None else norm

    def _is_finite(self) -> bool:
        return bool(largest_of(self.gradients).isfinite())

    def backup(self) -> Backup:
        """Made at the first step, when the model's layers are final."""
        if self._made_backup is None:
            self._made_backup = Backup(self.model, self.meter.totals)
        return self._made_backup


class DerivedStep(EagerStep):
    """Another form of a step: works on what `eager` works on, and takes its place."""

    def __init__(self, eager: EagerStep) -> None:
        super().__init__(
            eager.model,
            eager.optimizer,
            eager.train_step,
            eager.precision,
            eager.before_update,
            eager.batchnorm_sync,
        )
        self.meter = eager.meter


class TrainedParams:
    """The params that a run trains are fixed when its group has formed; what is unfrozen or added later is refused.

    The reducers and averages of all policies list the params once: their buffers have one layout for the whole run. A
    param beside them would be trained by each rank for itself, and the replicas would drift apart without a word.
    Freezing a param later is allowed: it is unused.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
        self._known = set(model.parameters())
        self._count = sum(len(group["params"]) for group in optimizer.param_groups)

    def check(self, optimizer: Optimizer) -> None:
        """InputError where another param would be trained than those that the ranks have in common."""
        for name, param in self._frozen:
            if param.requires_grad:
                raise InputError(
                    f"{name} was unfrozen while the run is on: its gradients are not summed over the ranks; set "
                    "requires_grad before the run begins (with a param group of lr=0 for what is to learn later), or "
                    "train the second stage in a run of its own"
                )
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if count != self._count:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if param not in self._known:
                    raise InputError(
                        f"a param of shape {tuple(param.shape)} was added to the optimizer while the run is on: its "
                        "gradients are not summed over the ranks; add it to model and optimizer before the run begins"
                    )
            self._count = count


def split_checks(rows: Rows) -> tuple[Rows, list[OwnCheck]]:
    """Take the checks off the ends of the ranks' rows."""
    size = len(OwnCheck._fields)
    return [row[:-size] for row in rows], [OwnCheck._make(row[-size:]) for row in rows]


def adapt_before_step(function: Callable[..., object] | None) -> BeforeStep | None:
    """The user's hook, which may take the model alone, or nothing, as one of (model, optimizer)."""
    if function is None:
        return None
    count = min(2, required_arguments(function))
    return lambda model, optimizer: function(*(model, optimizer)[:count])


def _added(counts: Tensor | None, count: Tensor | None) -> Tensor | None:
    return counts if count is None else count if counts is None else counts + count


def _on_device(count: Any, device: torch.device) -> Tensor:
    """As a double. A host number becomes a fill kernel: a copy from host memory could not be captured."""
    if isinstance(count, Tensor) and count.device == device:
        return count.detach().to(torch.float64)
    return torch.full((), float(count), dtype=torch.float64, device=device)
