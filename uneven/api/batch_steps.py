"""The batch in the user's hands, and what becomes of it: its losses, and the optimizer steps they lead to.

The arithmetic behind `ddp.step` and `ddp.backward`; api/loop.py owns one, hands batches out through it, and turns what
it raises into an error on every rank. A slot is stepped once, with its last micro-batch; with several optimizers as
often as the user says, and it ends when the next batch is asked for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.api.loop_inputs import ZERO1, describe_loss
from uneven.data.feed import Micros
from uneven.data.tensors import Batch
from uneven.errors import InputError
from uneven.parallel.elementwise import changes_nothing
from uneven.policy.axis import Part
from uneven.step.several import OptimizerGroup, RankLeftError, SeveralSteps
from uneven.train.gradient_sync import GradientSync, StepStats
from uneven.train.synchronizer import RankStatus, Synchronizer, check_status
from uneven.train.worker import Worker


@dataclass
class _Due:
    """A micro-batch of this rank's part of a slot."""

    part: Part
    micros: Micros
    place: int
    has_loss: bool = False  # a loss of it was accumulated
    is_updated: bool = False  # an optimizer was stepped by it; only with several optimizers

    @property
    def is_last(self) -> bool:
        return self.place == len(self.micros) - 1

    @property
    def samples(self) -> int:
        return self.micros[self.place][1]


class BatchSteps:
    """Life cycle: `connect` once; then `hand_out` for each micro-batch, any of `step` and `backward`, `end_slot`.

    `step`, `end_slot` and `train` return whether the run stops here; InputError is a wrong use by the user.
    """

    def __init__(self) -> None:
        self.no_sync_depth = 0  # of blocks that the user is inside
        self.began_ns = 0  # when the batch was handed out; what the user's own code took is added
        self.samples = 1  # of the last batch handed out
        self.is_last = False  # whether that is the last of its step
        self._due: _Due | None = None
        self._is_dropped = False  # the batch in the user's hands is not trained: further steps by it do nothing
        self.is_void = False  # likewise, since ranks were lost: the samples of its step come again
        self._is_undone_later = False  # until the script comes back with the void batch
        self._parts: int | None = None  # that this rank had trained when it was handed out
        self._loss: Any = None

    def connect(self, worker: Worker) -> Callable[[], None]:
        """Before the group forms: with several optimizers another step takes the place of the engine's.

        Until the function that is returned is called, at the end of the run, only `step` may step an optimizer.
        """
        self._worker = worker
        engine = worker.engine
        if isinstance(engine.optimizer, OptimizerGroup):
            engine.use_step(SeveralSteps(engine.step, engine.optimizer))
        return refuse_script_steps(worker)

    def take_loss(self, model: nn.Module, batch: Any) -> Any:
        """The worker's train step: the user has run forward already."""
        del model, batch
        loss, self._loss = self._loss, None
        return loss

    def hand_out(self, part: Part, micros: Micros, place: int) -> Batch:
        self._due = _Due(part, micros, place)
        self._is_dropped = False
        self.is_void = False
        self._parts = len(self._worker.engine.state.log)
        self.samples, self.is_last = self._due.samples, self._due.is_last
        self.began_ns = self._worker.recorder.enter("compute")
        return micros[place][0]

    @property
    def _syncs(self) -> bool:
        """Whether `step` on the present batch steps the optimizer."""
        return self._due is not None and self._due.is_last and not self.no_sync_depth

    @property
    def is_trained(self) -> bool:
        """Whether the next batch may follow."""
        due = self._due
        if due is None:
            return True
        if due.is_last:
            return due.is_updated
        return due.has_loss

    def step(self, loss: Any, optimizer: Any) -> bool:
        with name_second_backward():
            return self._step(loss, optimizer)

    def _step(self, loss: Any, optimizer: Any) -> bool:
        if self._is_dropped:
            return False
        due = self._present("step")
        name = self._name_of(optimizer)
        if loss is None and not due.has_loss:
            raise InputError("ddp.step() was called without a loss: pass it, or call ddp.backward(loss) before")
        if not self._syncs or name is not None:
            if loss is not None:
                self._accumulate(due, loss, name)
            return self._update_one(due, name) if self._syncs and name is not None else False
        _check_loss(loss, "step", may_be_none=True)
        self._due = None
        self._loss = loss
        engine = self._worker.engine
        engine.step.is_further_loss = due.has_loss
        if loss is not None:
            self._slow_down()
        is_stopped = self.train(due.part, [] if loss is None else [due.micros[due.place]])
        engine.step.is_further_loss = False
        return is_stopped

    def backward(self, loss: Any, optimizer: Any) -> None:
        if self._is_dropped:
            return
        due = self._present("backward")
        with name_second_backward():
            self._accumulate(due, loss, self._name_of(optimizer))

    def end_slot(self) -> bool:
        """Where several optimizers have stepped by the slot's last micro-batch, the slot is trained now."""
        due = self._due
        if due is None or not due.is_last or not due.is_updated:
            return False
        self._due = None
        return self.train(due.part, due.micros[-1:])

    def drop(self) -> None:
        """Forget the batch, and what was accumulated for its step."""
        self._due, self._is_dropped = None, True
        self._worker.engine.step.cancel()

    def take_back(self) -> bool:
        """Ranks were lost and the rest has settled: whether the batch in the user's hands has become void."""
        self.is_void = self._parts == len(self._worker.engine.state.log)
        self._parts = self._due = self._loss = None
        self._is_dropped = True
        step = self._worker.engine.step
        step.is_further_loss = False
        step.cancel()
        return self.is_void

    def begin_void(self) -> None:
        """All have settled, and have reached what was interrupted. A void batch comes again: what the script still does
        with this one, such as a forward for another optimizer, must not count twice in buffers.
        """
        if self.is_void:
            self._is_undone_later = True
            self._worker.engine.step.begin()

    def end_void(self) -> None:
        """The script asks for the next batch."""
        if self._is_undone_later:
            self._is_undone_later = False
            self._worker.engine.step.cancel()

    def train(self, part: Part, micros: Micros) -> bool:
        return self._worker.train_part(self._synchronizer, part, micros)

    @property
    def _synchronizer(self) -> Synchronizer:
        assert self._worker.synchronizer is not None, "batches are handed out after round 0"
        return self._worker.synchronizer

    def _present(self, what: str) -> _Due:
        if self._due is None:
            raise InputError(
                f"ddp.{what}() was called without a batch: call it once for every batch of ddp.batches(epoch)"
            )
        return self._due

    def _name_of(self, optimizer: Any) -> str | None:
        """Which of several optimizers is meant; None where there is only one."""
        made = self._worker.engine.optimizer
        if isinstance(made, OptimizerGroup):
            if optimizer is None:
                raise InputError(
                    f"several optimizers: say which one, as in ddp.step(loss, optimizer={next(iter(made.members))!r})"
                )
            return made.name_of(optimizer)
        if optimizer is not None and optimizer is not made and self._worker.config.strategy not in ZERO1:
            raise InputError("optimizer=... is not this loop's: it has one optimizer, ddp.optimizer; leave it out")
        return None

    def _accumulate(self, due: _Due, loss: Any, name: str | None) -> None:
        _check_loss(loss, "step" if name is None else "backward")
        step, slot_samples = self._worker.engine.step, due.part.slot.samples
        step.is_further_loss = due.has_loss
        if name is None:
            self._loss = loss
            step.accumulate(due.micros[due.place][0], due.samples, slot_samples)
        else:
            assert isinstance(step, SeveralSteps), "set in connect"
            step.is_further_loss = due.has_loss and not isinstance(loss, tuple)  # each optimizer has its own count
            step.backward_for(name, loss, due.samples, slot_samples)
        step.is_further_loss = False
        due.has_loss = True
        self._slow_down()

    def _update_one(self, due: _Due, name: str | None) -> bool:
        """Step one of several optimizers."""
        step = self._worker.engine.step
        assert isinstance(step, SeveralSteps), "set in connect"
        assert name is not None, "one of several has a name"
        due.is_updated = False  # whoever leaves by an error in here does not end the slot
        try:
            step.update_for(name)
            due.is_updated = True
        except RankLeftError as left:
            synchronizer = self._synchronizer
            assert isinstance(synchronizer, GradientSync), "only there ranks update together"
            check_status([RankStatus(int(StepStats._make(row).status)) for row in left.rows], due.part.slot.index)
            self.drop()
            synchronizer.follow_skip()
            return self._worker.follow(synchronizer)
        return False

    def _slow_down(self) -> None:
        """On one device the step's clock starts with the batch; with several ranks at their last collective."""
        if self._worker.rank_info.world_size == 1:
            self._worker.engine.simulate_slowdown(self.began_ns)
            self.began_ns = self._worker.recorder.clock()


def _check_loss(loss: Any, what: str, *, may_be_none: bool = False) -> None:
    if may_be_none and loss is None:
        return
    tensor = loss[0] if isinstance(loss, tuple) and len(loss) == 2 else loss
    if not isinstance(tensor, Tensor) or tensor.numel() != 1 or not tensor.requires_grad:
        raise InputError(
            f"ddp.{what}() was given {describe_loss(loss)}; pass the batch's mean loss as one scalar tensor with its "
            "graph (before backward, without detach), or (loss_sum, count)"
        )


def refuse_script_steps(worker: Worker) -> Callable[[], None]:
    """An `optimizer.step()` of a converted script would apply every gradient twice, the same on all ranks, so that
    nothing else could notice it. Refused until the function that is returned is called.
    """
    engine = worker.engine

    @changes_nothing
    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if engine.step.precision.is_stepping:
            return
        if any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
            raise InputError(
                "optimizer.step() was called by the script: ddp.step(loss) runs backward, sums the gradients over the "
                "devices and steps the optimizer, so take that call out of the loop"
            )

    made = engine.optimizer
    members = made.members.values() if isinstance(made, OptimizerGroup) else [made]
    handles = [optimizer.register_step_pre_hook(check) for optimizer in members]

    def allow() -> None:
        for handle in handles:
            handle.remove()

    return allow


@contextmanager
def name_second_backward() -> Iterator[None]:
    """Around a backward of ours: where the script has run `loss.backward()`, torch's message does not help."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise InputError(
            "backward has run through this loss's graph already: ddp.step(loss) and ddp.backward(loss) run backward "
            "themselves, so take loss.backward() out of the loop; losses that share a graph are added up first"
        ) from error
