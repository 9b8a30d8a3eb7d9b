"""Strategies of parallel/ in the place of torch's DDP inside of a Trainer: zero1, zero2, fsdp.

Made by transformers.py. The Trainer steps the strategy's optimizer; its Accelerator leaves the model unwrapped and asks
the strategy to clip; sums over ranks are taken where DDP takes means. Checkpoints have whole params and the state of
the plain optimizer, as without a strategy, so any Trainer reads them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from uneven.comm.torch_group import as_group
from uneven.core import StepShares
from uneven.integrations.accelerate import SharingAccelerator, become
from uneven.integrations.trainer import Sharing, SharingTrainer
from uneven.parallel import FSDP, Strategy, Zero1, Zero2

STRATEGIES: dict[str, Callable[..., Strategy]] = {"zero1": Zero1, "zero2": Zero2, "fsdp": FSDP}


def shard(trainer: Trainer, shares: StepShares, name: str, memory_shares: Sequence[float] | None) -> None:
    """From the next `train()` on; `memory_shares` divides what the strategy shards, one number per rank."""
    holder = Sharded(name, memory_shares)
    become(trainer.accelerator, ShardingAccelerator, _shares=shares, _loader=None, _sharded=holder)
    become(trainer, ShardingTrainer, _sharing=Sharing(shares), _sharded=holder)
    trainer.add_callback(ZeroGradCallback())


class Sharded:
    """The strategy of a trainer, which is made with its optimizer, and how long it has waited for other ranks."""

    def __init__(self, name: str, memory_shares: Sequence[float] | None) -> None:
        self.name = name
        self._memory_shares = memory_shares
        self._group = as_group(None)
        self._waited_s = 0.0
        self._made: Strategy | None = None

    @property
    def strategy(self) -> Strategy:
        assert self._made is not None, "a strategy is made with the optimizer"
        return self._made

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def make(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A collective; returns the optimizer to step with."""
        self._made = STRATEGIES[self.name](model, optimizer, self._group, shares=self._memory_shares)
        return self._made.optimizer

    def take_waited_s(self) -> float:
        """Seconds in which this rank has waited for collectives since the last call."""
        before, self._waited_s = self._waited_s, self._group.traffic.wait_s
        return self._waited_s - before

    def whole_state(self) -> dict[str, torch.Tensor]:
        """The model's state dict as without a strategy. A collective."""
        module = self.strategy.module
        whole = self.strategy.full_params()
        by_param = {param: whole[name] for name, param in module.named_parameters()}
        return {key: by_param.get(tensor, tensor) for key, tensor in module.state_dict(keep_vars=True).items()}


class ShardingAccelerator(SharingAccelerator):
    """An Accelerator that wraps no model: the strategy sums."""

    _sharded: Sharded

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """With autocast, but in no DDP. The Trainer has moved it to its device before the strategy took its params."""
        del device_placement, evaluation_mode
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The Trainer's losses are made for a mean over ranks."""
        super().backward(loss / self.num_processes, **kwargs)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        del model
        return self._sharded.strategy.no_sync()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> torch.Tensor:
        """By the norm over the whole model; all of the Trainer's are of its own model."""
        del parameters, norm_type
        return self._sharded.strategy.clip(max_norm)


class ShardingTrainer(SharingTrainer):
    """What `shard` makes of a trainer."""

    _sharded: Sharded
    _whole: dict[str, torch.Tensor] | None = None  # while a model is saved

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().create_optimizer(*args, **kwargs)
        if self._sharded.is_made:  # another `train()`
            return plain
        self.optimizer = self._sharded.make(self.model, plain)
        return self.optimizer

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._sharing.piece == 0:
            self._sharded.take_waited_s()
        loss = super().training_step(model, *args, **kwargs)
        if self._sharing.piece is None:
            self._sharing.shares.leave_out(self._sharded.take_waited_s())
            self._sharing.shares.stop()
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """On all ranks: rank 0 alone writes what they have together."""
        sharded = self._sharded
        if sharded.is_made:
            self._whole = sharded.whole_state()
            if _internal_call and not self.args.save_only_model:  # of a checkpoint, whose optimizer is saved next
                sharded.strategy.optimizer.consolidate_state_dict(0)  # type: ignore[attr-defined]
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)


class ZeroGradCallback(TrainerCallback):  # type: ignore[misc]
    """A Trainer zeroes the model's gradients, and a strategy holds shards of them beside it."""

    def on_step_end(self, *_: Any, **found: Any) -> None:
        found["optimizer"].zero_grad()
