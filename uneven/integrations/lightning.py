"""Lightning and Fabric: `Trainer(strategy=UnevenStrategy())`; ranks train samples by their speed.

The Trainer keeps its loop, its DDP, optimizer, callbacks, validation and checkpoints. The strategy replaces which
samples of the training loader a rank reads and what their loss weighs, and measures. docs/integrations/lightning.md
explains it.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from uneven.core import Order, StepSampler, StepShares, watch_ddp
from uneven.errors import InputError
from uneven.integrations.choice import KEPT, Policy, chosen_shares
from uneven.launch.frameworks import begin_use, join_ranks
from uneven.parallel.batchnorm import has_batchnorm

join_ranks()

STATE = "uneven"  # in a checkpoint of the Trainer


def _packages() -> tuple[Any, Any]:
    """Those of `lightning`, or the two that `pytorch_lightning` consists of, where the script has imported that."""
    is_old = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    names = ("pytorch_lightning", "lightning_fabric") if is_old else ("lightning.pytorch", "lightning.fabric")
    trainer, fabric = map(import_module, names)
    return trainer, fabric


_trainer, _fabric = _packages()
_TrainerDDP: Any = _trainer.strategies.DDPStrategy
_FabricDDP: Any = _fabric.strategies.DDPStrategy


class SharedLoader:
    """The training loader with this rank's samples of each step, and how far its loop is in the present one.

    A step has `pieces` batches on every rank. Life cycle of a piece: `begin` before its forward, `factor` for its loss,
    `end` after its backward; after the last one and the optimizer's step `note`.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        shares: Policy | Sequence[float],
        *,
        pieces: int,
        least: int,
        world_size: int,
        epoch_of: Callable[[], int] | None = None,
    ) -> None:
        """A collective. `epoch_of`: the epoch that begins when the loader is iterated, where the loop knows it."""
        order, batch_size = _order_of(loader)
        self.pieces = pieces
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self.shares = StepShares(
            batch_size * world_size * pieces, shares=shares, least=least * pieces, lookahead=-(-ahead // pieces)
        )
        self.sampler = EpochSampler(
            order, self.shares, pieces=pieces, drop_last=bool(loader.drop_last), epoch_of=epoch_of
        )
        kept = {name: getattr(loader, name) for name in KEPT}
        self.loader: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=self.sampler, **kept)
        self._piece = 0
        self._ended_s = 0.0  # the piece before
        self._is_on = False  # between `begin` and `end`

    def replace(self, loader: "DataLoader[Any]") -> None:
        """Read from another loader from the next epoch on; its steps are as large as before."""
        order, batch_size = _order_of(loader)
        before = self.sampler
        if batch_size * self.shares.world_size * self.pieces != self.shares.samples:
            raise InputError(
                f"the training loader was made anew with batch_size={batch_size}, and its steps had "
                f"{self.shares.samples} samples of all ranks: keep the batch size"
            )
        self.sampler = EpochSampler(
            order, self.shares, pieces=self.pieces, drop_last=bool(loader.drop_last), epoch_of=before.epoch_of
        )
        kept = {name: getattr(loader, name) for name in KEPT}
        self.loader = DataLoader(loader.dataset, batch_sampler=self.sampler, **kept)

    def begin(self) -> None:
        """This rank's work on a piece begins; reading it was work, too, waiting for other ranks between two was not."""
        if self._is_on:
            return
        if self._piece == 0:
            self.shares.start()
        else:
            until_s = time.perf_counter() if self.loader.num_workers else self.sampler.asked_s
            self.shares.leave_out(max(0.0, until_s - self._ended_s))
        self._is_on = True

    def factor(self) -> float:
        """Of the mean loss over the piece, which the loop divides by the number of pieces."""
        key = (self.shares.step, self._piece)
        if not self._is_on or key not in self.sampler.own:
            raise InputError(
                f"backward of step {key[0]}, batch {key[1]}: no such batch was read for it; train on the batches of "
                "the training loader, with one backward for each and one step of the optimizer after "
                f"{self.pieces} of them"
            )
        return self.shares.factor(key[0], self.sampler.own[key]) * self.pieces

    def end(self, device: torch.device) -> None:
        self._piece += 1
        self._is_on = False
        if self._piece < self.pieces:
            self._ended_s = _now(device)

    def note(self) -> None:
        """The optimizer has stepped."""
        if self._piece != self.pieces:
            raise InputError(
                f"the optimizer stepped after {self._piece} batches, and a step has {self.pieces}: let a limit of "
                "batches be a multiple of the accumulation"
            )
        self._piece = 0
        self.shares.note(self.shares.step)

    @contextmanager
    def left_out(self, device: torch.device) -> Iterator[None]:
        """Around collectives: waiting for other ranks is no work of this one."""
        if not self._is_on:
            yield
            return
        began_s = _now(device)
        try:
            yield
        finally:
            self.shares.leave_out(_now(device) - began_s)


class EpochSampler(StepSampler):
    """Which knows its epoch, and the steps of it that are behind, by the steps that were trained.

    Lightning tells the epoch to the order alone, and reads an epoch from its beginning when it resumes inside it.
    """

    def __init__(
        self, order: Order, shares: StepShares, *, pieces: int, drop_last: bool, epoch_of: Callable[[], int] | None
    ) -> None:
        super().__init__(order, shares, pieces=pieces, drop_last=drop_last)
        self.epoch_of = epoch_of or self._next_epoch
        self.asked_s = 0.0  # when the latest batch was asked for
        self._begun = 0

    def _next_epoch(self) -> int:
        return self._begun

    def __iter__(self) -> Iterator[list[int]]:
        self.set_epoch(max(self.epoch_of(), self.shares.step // self.steps))
        self._begun = self.epoch + 1
        self.skip = max(0, self.shares.step - self.epoch * self.steps)
        self.asked_s = time.perf_counter()
        for batch in super().__iter__():
            yield batch
            self.asked_s = time.perf_counter()


class _SharesSteps:
    """What the strategies of the Trainer and of Fabric have in common; it comes before Lightning's own class."""

    root_device: torch.device
    world_size: int

    def __init__(self, policy: Policy = "balanced", shares: Sequence[float] | None = None, **options: Any) -> None:
        """`policy`: "balanced" follows the measured speed, "sync" divides evenly. `shares`, one number per rank, is a
        fixed ratio. `options` are those of Lightning's DDPStrategy."""
        super().__init__(**options)
        self._policy, self._ratio = policy, shares
        chosen_shares(policy, shares)  # refused before any process is started
        self._shared: SharedLoader | None = None

    @property
    def shares(self) -> StepShares:
        """What divides the steps, once there is a training loader: `slow_down(0.4)` on a rank makes it a slow one."""
        return self._loader().shares

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """In training one order of all samples, which the shares divide."""
        if self._is_training:
            return {"num_replicas": 1, "rank": 0}
        return super().distributed_sampler_kwargs  # type: ignore[misc,no-any-return]

    @property
    def _is_training(self) -> bool:
        """Whether the loader that Lightning asks about is the one to train with."""
        raise NotImplementedError

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        with self._left_out():
            return super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        with self._left_out():
            return super().broadcast(*args, **kwargs)  # type: ignore[misc]

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        with self._left_out():
            return super().all_gather(*args, **kwargs)  # type: ignore[misc]

    def _share(
        self, loader: Any, model: torch.nn.Module, pieces: int, epoch_of: Callable[[], int] | None = None
    ) -> SharedLoader:
        """The loader to train with, by what `uneven run` was told in place of the script's own; a collective."""
        told = begin_use(self.world_size, ("policy", "shares"))
        chosen = chosen_shares(told.settings.get("policy", self._policy), told.settings.get("shares", self._ratio))
        least = 2 if has_batchnorm(model) else 1
        self._shared = SharedLoader(
            loader, chosen, pieces=pieces, least=least, world_size=self.world_size, epoch_of=epoch_of
        )
        self._shared.shares.slow_down(told.speed)
        return self._shared

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        if self._shared is None:
            yield
            return
        with self._shared.left_out(self.root_device):
            yield

    def _loader(self) -> SharedLoader:
        if self._shared is None:
            raise InputError("strategy 'uneven' has no training loader yet: it divides the steps of one")
        return self._shared


class UnevenStrategy(_SharesSteps, _TrainerDDP):  # type: ignore[misc]
    """`Trainer(strategy=UnevenStrategy())`, or by its name "uneven": DDP, whose ranks train samples by their speed.

    Life cycle: the Trainer asks for the training loader in each `fit`, which makes the shares; `teardown` closes them.
    Validation is divided as Lightning divides it.
    """

    strategy_name = "uneven"

    def __init__(self, policy: Policy = "balanced", shares: Sequence[float] | None = None, **options: Any) -> None:
        super().__init__(policy, shares, **options)
        self._state: Mapping[str, Any] | None = None  # of the shares: from a checkpoint, or when the last fit ended
        self._is_resuming = False  # that state is still to be loaded
        self._watched: Any = None

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            self._refuse(trainer)
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self._is_training:
            return super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        if self._shared is not None:
            self._shared.replace(dataloader)
            return self._shared.loader
        pieces = trainer.accumulate_grad_batches
        shared = self._share(dataloader, self.lightning_module, pieces, lambda: int(trainer.current_epoch))
        if self._is_resuming and self._state is not None:
            self.shares.load_state_dict(self._state)
        self._is_resuming = False
        self._watch()
        return shared.loader

    def on_train_start(self) -> None:
        if self.lightning_module.trainer.train_dataloader is not self._loader().loader:
            raise InputError("the Trainer has several training loaders, and a step is divided of one: give it one")
        super().on_train_start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._loader().begin()
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loader = self._loader()
        loss: torch.Tensor = super().backward(closure_loss * loader.factor(), optimizer, *args, **kwargs)
        loader.end(self.root_device)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._loader().note()
        return output

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Of `self.log(..., sync_dist=True)`, too."""
        with self._left_out():
            return super().reduce(*args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """With one entry more, which a Trainer without this strategy passes over."""
        state = self._state if self._shared is None else self.shares.state_dict()
        if state is not None:
            checkpoint[STATE] = dict(state)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._state = checkpoint.get(STATE)
        self._is_resuming = self._state is not None
        if self._is_resuming:
            # It goes on where it was, though the loader has no state of its own, which no other strategy could load.
            warnings.filterwarnings("ignore", ".*your dataloader is not resumable")
        return checkpoint

    def teardown(self) -> None:
        if self._shared is not None:
            self._state = self.shares.state_dict()
            self.shares.close()
            self._shared = None
        super().teardown()

    def _register_ddp_hooks(self) -> None:
        """A DDP takes one hook: the user's is called by the one of `watch_ddp`."""
        self._watch()

    def _watch(self) -> None:
        """When there are both a DDP and shares, whichever comes first."""
        if self._shared is None or self.model is self._watched or not isinstance(self.model, DistributedDataParallel):
            return
        hook = self._ddp_comm_hook
        if hook is not None and self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        watch_ddp(self.model, self.shares, hook, self._ddp_comm_state)
        self._watched = self.model

    @property
    def _is_training(self) -> bool:
        """Whether the loader that the Trainer asks about is the one to train with."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.training

    def _refuse(self, trainer: Any) -> None:
        if not trainer.lightning_module.automatic_optimization:
            raise InputError(
                "automatic_optimization=False: whose loss is weighed by how many samples is not known in a loop with "
                "manual_backward; use automatic optimization, or Fabric, or Ddp.setup"
            )
        schedulers = [one for one in trainer.callbacks if type(one).__name__ == "GradientAccumulationScheduler"]
        if any(len(one.scheduling) > 1 for one in schedulers):
            raise InputError(
                "GradientAccumulationScheduler changes the samples of a step, which the shares divide: use "
                "Trainer(accumulate_grad_batches=...) with one number"
            )
        if self._model_averaging_period is not None:
            raise InputError("model_averaging_period: params are averaged by policy='cadence' of fit; leave it out")


class UnevenFabricStrategy(_SharesSteps, _FabricDDP):  # type: ignore[misc]
    """`Fabric(strategy=UnevenFabricStrategy())`, or by its name; its `train_loader` makes the loader to train with.

    A step begins with the forward of a model in training mode, and is over with the step of the optimizer.
    """

    def __init__(self, policy: Policy = "balanced", shares: Sequence[float] | None = None, **options: Any) -> None:
        super().__init__(policy, shares, **options)
        self._model: DistributedDataParallel | None = None
        self._accumulate: int | None = None  # while the training loader is set up

    def train_loader(self, fabric: Any, loader: "DataLoader[Any]", *, accumulate: int = 1) -> Any:
        """In place of `fabric.setup_dataloaders(loader)`, after `fabric.setup(model, optimizer)`.

        `accumulate`: batches of a step on every rank; all but the last one go into `fabric.no_backward_sync`.
        """
        if self._shared is not None:
            raise InputError("train_loader: the strategy has a training loader already; it divides the steps of one")
        if self._model is None:
            raise InputError("train_loader: call fabric.setup(model, optimizer) before")
        self._accumulate = accumulate
        ours = fabric.setup_dataloaders(loader)
        self._accumulate = None
        return ours

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._accumulate is None or self._model is None:
            return super().process_dataloader(dataloader)
        shared = self._share(dataloader, self._model, self._accumulate)
        watch_ddp(self._model, shared.shares)
        self._model.register_forward_pre_hook(self._before_forward)
        return shared.loader

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        ddp: DistributedDataParallel = super().setup_module(module)
        self._model = ddp
        return ddp

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        loader = self._loader()
        super().backward(tensor * loader.factor(), module, *args, **kwargs)
        loader.end(self.root_device)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._loader().note()
        return output

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        with self._left_out():
            return super().all_reduce(*args, **kwargs)

    @property
    def _is_training(self) -> bool:
        return self._accumulate is not None

    def _before_forward(self, model: torch.nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._loader().begin()


def _order_of(loader: Any) -> tuple[Any, int]:
    """The sampler of all samples, and the batch size of one rank."""
    if not isinstance(loader, DataLoader):
        raise InputError(f"the training loader is a {type(loader).__name__}: shares need a torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "the training data is an IterableDataset, whose samples cannot be given to ranks by number: use a data "
            "set with __getitem__ and __len__"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise InputError(
            f"the training loader's batches come from a {type(loader.batch_sampler).__name__}: shares need a "
            "DataLoader(batch_size=...) with a sampler of single samples"
        )
    return loader.sampler, loader.batch_size


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


_trainer.strategies.StrategyRegistry.register(
    "uneven", UnevenStrategy, description="DDP, whose ranks train samples by their speed"
)
_fabric.strategies.STRATEGY_REGISTRY.register(
    "uneven", UnevenFabricStrategy, description="DDP, whose ranks train samples by their speed"
)
