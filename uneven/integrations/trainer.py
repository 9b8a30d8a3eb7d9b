"""The methods that `attach` puts before those of a Trainer's own class, and the callback beside them.

Made by transformers.py; trainer_strategy.py adds what a sharded model needs. A rank reads its samples of a step, their
loss weighs what their number says, and the step is noted before the optimizer's.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from uneven.core import StepSampler, StepShares, follows_count, watch_ddp
from uneven.errors import InputError
from uneven.integrations.accelerate import order_of
from uneven.integrations.choice import KEPT


class Sharing:
    """What an attached trainer knows of its steps. One per trainer; a `train()` gives it a sampler."""

    def __init__(self, shares: StepShares) -> None:
        self.shares = shares
        self.uses_count: bool | None = None  # whether the loss is divided by num_items_in_batch; None: not known yet
        self.piece: int | None = None  # the batch of the step that is trained; None: evaluation
        self._watched: torch.nn.Module | None = None
        self._trained = 0  # samples of all ranks, since the last line of the log
        self._logged_s = time.perf_counter()

    def watch(self, model: torch.nn.Module) -> None:
        """Before a step; a DDP is watched once."""
        if model is not self._watched and isinstance(model, DistributedDataParallel):
            self._watched = model
            watch_ddp(model, self.shares)

    def begin(self, saved: dict[str, Any] | None, step: int) -> None:
        """Of a `train()`; `saved`: with a checkpoint of an attached trainer. The next step is `step`."""
        state = self.shares.state_dict()
        if saved is not None and saved["samples"] == self.shares.samples:
            state = saved
        self.shares.load_state_dict({**state, "step": step})
        self._trained, self._logged_s = 0, time.perf_counter()

    def note(self) -> None:
        """Gradients are summed over ranks: the step is over for the shares."""
        shares = self.shares
        self._trained += sum(shares.of(shares.step))
        shares.note(shares.step)

    def figures(self) -> dict[str, float]:
        """For a line of the log: how the next step is divided, and samples/s of all ranks since the last line."""
        now_s, division = time.perf_counter(), self.shares.of(self.shares.step)
        per_second = self._trained / (now_s - self._logged_s)
        self._trained, self._logged_s = 0, now_s
        figures = {f"share_rank_{rank}": round(own / sum(division), 4) for rank, own in enumerate(division)}
        return {"samples_per_second": round(per_second, 3), **figures}


class TrainerSampler(StepSampler):
    """With what the callback asks for, which finds only the loader."""

    def __init__(self, order: Any, sharing: Sharing, *, pieces: int, drop_last: bool) -> None:
        super().__init__(order, sharing.shares, pieces=pieces, drop_last=drop_last)
        self.sharing = sharing

    @property
    def batch_sampler(self) -> "TrainerSampler":
        """A Trainer calls `set_epoch` of the sampler inside of the loader's."""
        return self


class SharingTrainer(Trainer):  # type: ignore[misc]
    """What `attach` makes of a trainer: these methods come before those of its own class."""

    _sharing: Sharing

    def get_train_dataloader(self) -> "DataLoader[Any]":
        """The trainer's own data set, collator and workers, with this rank's samples of each step."""
        plain = super().get_train_dataloader()
        order, _, drop_last = order_of(plain)
        pieces = self.args.gradient_accumulation_steps
        sampler = TrainerSampler(order, self._sharing, pieces=pieces, drop_last=drop_last)
        return DataLoader(plain.dataset, batch_sampler=sampler, **{name: getattr(plain, name) for name in KEPT})

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of a step. Its clock begins after the count of labels, where ranks wait for each other."""
        sharing, shares = self._sharing, self._sharing.shares
        began_s = time.perf_counter()
        batches = list(islice(epoch_iterator, num_batches))
        read_s = time.perf_counter() - began_s
        own = self._own_samples(len(batches))
        if sharing.uses_count is None:
            _, count = super().get_batch_samples(iter(batches), num_batches, device)
            self._learn(batches, count)
        if sharing.uses_count is False:
            count = None
        else:
            batches = [batch if samples else without_labels(batch) for batch, samples in zip(batches, own, strict=True)]
            batches, count = super().get_batch_samples(iter(batches), num_batches, device)
        sharing.piece = 0
        shares.start(read_s)
        return batches, count

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        sharing = self._sharing
        sharing.watch(model)
        place = sharing.piece
        loss: torch.Tensor = super().training_step(model, *args, **kwargs)
        sharing.piece = None if place is None or place + 1 == self.current_gradient_accumulation_steps else place + 1
        return loss

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A loss with a count is a sum over the samples of all ranks, divided by it: right as it is."""
        place = self._sharing.piece
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if place is None or num_items_in_batch is not None:
            return found
        shares = self._sharing.shares
        factor = shares.factor(shares.step, self._own_samples(place + 1)[place])
        is_scaled = self.loss_is_scaled_for_ga
        if not (self.compute_loss_func is not None if is_scaled is None else is_scaled):
            factor *= self.current_gradient_accumulation_steps  # by which training_step divides
        return (found[0] * factor, *found[1:]) if return_outputs else found * factor

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.is_in_train:
            logs.update(self._sharing.figures())
        super().log(logs, start_time)

    def _own_samples(self, pieces: int) -> list[int]:
        """Of each batch of the present step; 0 where it is a filler."""
        sampler, step = self.callback_handler.train_dataloader.batch_sampler, self._sharing.shares.step
        return [sampler.own[step, piece] for piece in range(pieces)]

    def _learn(self, batches: Sequence[Any], count: Any) -> None:
        """Whether the loss uses the count: many models take it and return a mean all the same. A collective."""
        if count is None:
            self._sharing.uses_count = False
            return
        follows = self._follows_count(batches[0])  # a loss may gather, so each rank asks for one batch
        told = -1.0 if follows is None else float(follows)
        found = self.accelerator.gather(torch.tensor([told], device=self.args.device)).tolist()
        if set(found) == {-1.0}:
            return  # no rank has labels in this step
        self._sharing.uses_count = 0.0 not in found
        if not self._sharing.uses_count:
            # Else the Trainer multiplies such a loss by ranks and by accumulation, in evaluations, too.
            self.model_accepts_loss_kwargs = False
        elif not self.args.average_tokens_across_devices and self.args.world_size > 1:
            raise InputError(
                "attach: average_tokens_across_devices=False makes a mean of each rank's own mean over tokens; leave "
                "it out, then the mean is over the tokens of all ranks"
            )

    def _follows_count(self, batch: Any) -> bool | None:
        metrics = getattr(self, "_metrics", {})  # of TRL's trainers: what they log next
        before = {mode: {name: list(one) for name, one in found.items()} for mode, found in metrics.items()}

        def loss_of(count: torch.Tensor) -> float:
            inputs = self._prepare_inputs(dict(batch))
            count = count.to(self.args.device)
            return float(super(SharingTrainer, self).compute_loss(self.model, inputs, num_items_in_batch=count))

        try:
            return follows_count(self.model, loss_of)
        finally:
            for mode, found in before.items():
                metrics[mode].clear()
                metrics[mode].update(found)


class SharesCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Between a Trainer's loop and the shares; their state is in the checkpoint's trainer_state.json.

    A Trainer that restores callbacks makes it anew, so it takes what it needs from the loader.
    """

    def __init__(self) -> None:
        self._sharing: Sharing | None = None

    def on_train_begin(self, args: Any, state: Any, *_: Any, **found: Any) -> None:
        sampler = found["train_dataloader"].batch_sampler
        self._sharing = sampler.sharing
        step = state.global_step
        if args.ignore_data_skip:
            step -= step % sampler.steps  # it begins the epoch again
        saved = state.stateful_callbacks.get(type(self).__name__)
        self._sharing.begin(None if not saved else saved["attributes"].get("saved"), step)
        state.stateful_callbacks.setdefault(type(self).__name__, {})  # none in a checkpoint of a plain Trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self._sharing is not None:
            self._sharing.note()

    def state(self) -> dict[str, Any]:
        saved = None if self._sharing is None else self._sharing.shares.state_dict()
        return {"args": {}, "attributes": {} if saved is None else {"saved": saved}}


def without_labels(batch: Any) -> Any:
    """A filler for a loss that is divided by the count of labels: none of its own counts."""
    labels = {name: torch.full_like(batch[name], -100) for name in ("labels", "shift_labels") if name in batch}
    return {**batch, **labels}
