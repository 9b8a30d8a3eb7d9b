"""accelerate: `loader = attach(accelerator, model, loader)` after `prepare`, and ranks train samples by speed.

The loop stays as it is: `accumulate`, `backward`, `clip_grad_norm_`, `gather_for_metrics`, `save_state` and
`skip_first_batches`. The loader has this rank's samples of each step, `backward` weighs the mean loss of a batch by
their number, and measures. Import it before the Accelerator is made. docs/integrations/accelerate.md explains it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import recursively_apply
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from uneven.core import StepSampler, StepShares, watch_ddp
from uneven.errors import InputError
from uneven.integrations.choice import KEPT, Policy, chosen_shares
from uneven.launch.frameworks import Told, begin_use, join_ranks

join_ranks()

REFUSED = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
}


def attach(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: "DataLoader[Any]",
    *,
    policy: Policy = "balanced",
    shares: Sequence[float] | None = None,
) -> DataLoaderShard:
    """The loader to train with, in place of the one that `accelerator.prepare` has returned; the latter is given up.

    `model`: the one that its batches train, prepared, too.
    A step has the samples that it had: batch size times ranks times `gradient_accumulation_steps`. `policy`:
    "balanced" follows the measured speed, "sync" divides evenly; `shares`, one number per rank, is a fixed ratio.
    InputError where something else moves samples between ranks.
    """
    if isinstance(accelerator, SharingAccelerator):
        raise InputError("attach: this Accelerator shares the samples of a loader already; call it once")
    refuse_other_plugins(accelerator)
    if accelerator.num_processes > 1 and not isinstance(model, DistributedDataParallel):
        raise InputError(
            f"attach: the model is a {type(model).__name__}, not the DistributedDataParallel that accelerator.prepare "
            "makes of it; prepare it before, and give attach what prepare returns"
        )
    pieces = accelerator.gradient_accumulation_steps
    order, batch_size, drop_last = order_of(loader)
    ahead = loader.num_workers * (loader.prefetch_factor or 0) + 1  # accelerate looks for the end of the epoch
    step_shares = make_shares(
        batch_size * pieces * accelerator.num_processes,
        told=begin_use(accelerator.num_processes, ("policy", "shares")),
        policy=policy,
        shares=shares,
        pieces=pieces,
        ahead=ahead,
    )
    sampler = EpochSampler(order, step_shares, pieces=pieces, drop_last=drop_last)
    ours = SharingLoader(
        loader.dataset,
        device=getattr(loader, "device", None),
        rng_types=getattr(loader, "rng_types", None),
        synchronized_generator=getattr(loader, "synchronized_generator", None),
        batch_sampler=sampler,
        _drop_last=True,  # of a gathered batch nothing is to be cut off: no sample is there twice
        _non_blocking=getattr(loader, "_non_blocking", False),
        **{name: getattr(loader, name) for name in KEPT},
    )
    become(accelerator, SharingAccelerator, _shares=step_shares, _loader=None)
    accelerator.share_loader(model, loader, ours)
    return ours


class SharingLoader(DataLoaderShard):  # type: ignore[misc]
    """This rank's batches. What it takes to read them is this rank's work."""

    def __iter__(self) -> Iterator[Any]:
        self.read_s = 0.0
        batches = super().__iter__()
        next_batch = next(batches, None)  # ranks may wait for each other at the beginning of an epoch
        while next_batch is not None:
            yield next_batch
            began_s = time.perf_counter()
            next_batch = next(batches, None)
            self.read_s += time.perf_counter() - began_s

    def take_read_s(self) -> float:
        """Seconds since it was asked last."""
        read_s, self.read_s = getattr(self, "read_s", 0.0), 0.0
        return read_s


class EpochSampler(StepSampler):
    """Which knows its epoch by the steps that were trained.

    A loader of accelerate counts the epochs that it has begun, so after a resume it has lost count.
    """

    def __iter__(self) -> Iterator[list[int]]:
        self.set_epoch(max(self.epoch, self.shares.step // self.steps))
        return super().__iter__()


class SharingAccelerator(Accelerator):  # type: ignore[misc]
    """What `attach` makes of an Accelerator: it leaves waiting out of a rank's own work, and weighs losses.

    Made by `become`. Life cycle: `share_loader` where the loop is the user's; a Trainer weighs by itself. A step begins
    with the forward of a model in training mode, and is over with its last `backward`.
    """

    _shares: StepShares
    _loader: SharingLoader | None
    _dataloaders: list[Any]

    def share_loader(self, model: torch.nn.Module, before: "DataLoader[Any]", loader: SharingLoader) -> None:
        """`loader` in place of one that was prepared; from now on `backward` is about its batches."""
        self._loader = loader
        self._piece = 0
        self._dataloaders = [loader if one is before else one for one in self._dataloaders]
        if isinstance(model, DistributedDataParallel):
            watch_ddp(model, self._shares)
        model.register_forward_pre_hook(self._before_forward)
        self.register_for_checkpointing(self._shares)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Of a mean over the samples of a batch; the last one of a step waits for the times of all ranks."""
        if self._loader is None:
            super().backward(loss, **kwargs)
            return
        shares, sampler = self._shares, self._loader.batch_sampler
        own = sampler.own.get((shares.step, self._piece))
        if own is None:
            raise InputError(
                f"backward of step {shares.step}, batch {self._piece}: no such batch was read; train on the batches "
                "of the loader that attach has returned, with one backward for each"
            )
        super().backward(loss * (shares.factor(shares.step, own) * sampler.pieces), **kwargs)
        self._piece = (self._piece + 1) % sampler.pieces
        if self._piece == 0:
            shares.note(shares.step)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Between two steps: the gradients of a begun one are in no checkpoint, and a loader goes on by whole steps."""
        if self._loader is not None and self._piece != 0:
            raise InputError(
                f"save_state after batch {self._piece} of {self._loader.batch_sampler.pieces} of a step: save when "
                "accelerator.sync_gradients is true, after the optimizer's step"
            )
        return super().save_state(*args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Inside a step of different numbers of rows, and without the time that it waits for other ranks."""
        if not self._shares.is_under_way:
            return super().gather(tensor)
        with self._left_out():
            return recursively_apply(self._gather_rows, tensor, error_on_other_type=True)

    def _gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dim() == 0:
            return super().gather(rows)  # type: ignore[no-any-return]
        counts = super().gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = super().gather(padded).split(max(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        began_s = self._now()
        try:
            yield
        finally:
            self._shares.leave_out(self._now() - began_s)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _before_forward(self, model: torch.nn.Module, _: Any) -> None:
        if model.training and not self._shares.is_under_way and self._piece == 0 and self._loader is not None:
            self._shares.start(self._loader.take_read_s())


def become(thing: Any, mixin: type, **attributes: Any) -> None:
    """Give an object the methods of `mixin` before its own: what a subclass of its class would have."""
    own = type(thing)
    vars(thing).update(attributes)
    object.__setattr__(thing, "__class__", type(own.__name__, (mixin, own), {"__module__": own.__module__}))


def make_shares(
    samples: int, *, told: Told, policy: str, shares: Sequence[float] | None, pieces: int, ahead: int
) -> StepShares:
    """Of a loop with `pieces` batches a step on each rank, whose loader reads `ahead` batches before they are due.

    `policy` and `shares` are the script's own.
    """
    policy, shares = told.settings.get("policy", policy), told.settings.get("shares", shares)
    chosen = chosen_shares(policy, shares)
    made = StepShares(samples, shares=chosen, least=pieces, lookahead=-(-ahead // pieces))
    made.slow_down(told.speed)
    return made


def refuse_other_plugins(accelerator: Accelerator) -> None:
    """InputError for what divides a model or the samples of a step by itself."""
    if (name := REFUSED.get(accelerator.distributed_type)) is not None:
        raise InputError(
            f"attach: the Accelerator uses {name}, which divides the model by itself; leave its plugin out, then DDP "
            "sums the gradients"
        )
    if accelerator.split_batches:
        raise InputError("attach: split_batches=True divides each batch evenly; leave it out, shares divide it")
    if accelerator.dispatch_batches:
        raise InputError(
            "attach: dispatch_batches=True reads all batches on rank 0; leave it out, each rank reads its own"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise InputError("attach: parallelism_config divides the model over ranks; leave it out, or use strategy=")
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise InputError("attach: sync_each_batch=True sums gradients several times a step; leave it out")


def order_of(loader: "DataLoader[Any]") -> tuple[Any, int, bool]:
    """The sampler of all samples, batch size and drop_last of a loader, also of one that accelerate has prepared."""
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "attach: an IterableDataset has no samples that could be given to ranks by number; use a data set with "
            "__getitem__ and __len__"
        )
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if not hasattr(batches, "sampler"):
        raise InputError(
            f"attach: the loader's batch sampler {type(batches).__name__} makes whole batches by itself; shares need a "
            "sampler of single samples"
        )
    return batches.sampler, batches.batch_size, batches.drop_last
