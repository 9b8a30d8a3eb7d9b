"""Hugging Face's Trainer, and those of TRL: `attach(trainer)` before `trainer.train()`; ranks train samples by speed.

The Trainer keeps its loop, its DDP, its optimizer, checkpoints, evaluation and callbacks. `attach` replaces which
samples a rank reads and what their loss weighs; with a strategy also who holds what. Import it before
TrainingArguments are made. docs/integrations/transformers.md explains it.
"""

from collections.abc import Sequence
from typing import Literal

from torch.utils.data import IterableDataset
from transformers import Trainer

from uneven.core import StepShares
from uneven.errors import InputError
from uneven.integrations.accelerate import SharingAccelerator, become, make_shares, refuse_other_plugins
from uneven.integrations.choice import Policy
from uneven.integrations.trainer import SharesCallback, Sharing, SharingTrainer
from uneven.integrations.trainer_strategy import STRATEGIES, shard
from uneven.launch.frameworks import begin_use

MOVES_SAMPLES = ("batch_rebalance", "group_by_length")


def attach(
    trainer: Trainer,
    policy: Policy = "balanced",
    *,
    shares: Sequence[float] | None = None,
    strategy: Literal["zero1", "zero2", "fsdp"] | None = None,
    memory_shares: Sequence[float] | None = None,
) -> StepShares:
    """Let the ranks of this trainer train samples by their speed, from the next `train()` on.

    A step has the samples that it had: those per device times ranks times `gradient_accumulation_steps`. `policy`:
    "balanced" follows the measured speed, "sync" divides evenly; `shares`, one number per rank, is a fixed ratio.
    `strategy`: uneven's in place of torch's DDP; `memory_shares` divides what it shards, evenly where there are none.
    Returns what divides the steps: `slow_down(0.4)` on one rank of torchrun is a slow device to try it with.
    InputError where something else moves samples between ranks.
    """
    if isinstance(trainer, SharingTrainer):
        raise InputError("attach: this trainer shares its samples already; call it once")
    _refuse(trainer)
    args = trainer.args
    told = begin_use(args.world_size, ("policy", "shares", "strategy", "memory_shares"))
    strategy = told.settings.get("strategy", strategy)
    memory_shares = told.settings.get("memory_shares", memory_shares)
    _refuse_strategy(trainer, strategy, memory_shares)
    pieces = args.gradient_accumulation_steps
    made = make_shares(
        args.train_batch_size * pieces * args.world_size,
        told=told,
        policy=policy,
        shares=shares,
        pieces=pieces,
        ahead=args.dataloader_num_workers * (args.dataloader_prefetch_factor or 2),
    )
    if strategy is None:
        become(trainer.accelerator, SharingAccelerator, _shares=made, _loader=None)
        become(trainer, SharingTrainer, _sharing=Sharing(made))
    else:
        shard(trainer, made, strategy, memory_shares)
    trainer.add_callback(SharesCallback())
    return made


def _refuse(trainer: Trainer) -> None:
    args = trainer.args
    refuse_other_plugins(trainer.accelerator)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        name = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP"
        raise InputError(f"attach: {name} divides the model by itself; leave it out of the TrainingArguments")
    if isinstance(trainer.train_dataset, IterableDataset):
        raise InputError(
            "attach: train_dataset is an IterableDataset, which has no samples that could be given to ranks by number; "
            "use a data set with __getitem__ and __len__"
        )
    if args.train_sampling_strategy in MOVES_SAMPLES:
        raise InputError(
            f"attach: train_sampling_strategy={args.train_sampling_strategy!r} moves samples between ranks by their "
            "length; use 'random' or 'sequential'"
        )
    if args.auto_find_batch_size:
        raise InputError("attach: auto_find_batch_size changes the samples of a step; set per_device_train_batch_size")
    if args.n_gpu > 1:
        raise InputError(
            f"attach: this one process has {args.n_gpu} GPUs, which a Trainer uses by DataParallel; start one process "
            "per GPU, by uneven run or torchrun"
        )
    if not trainer.accelerator.use_seedable_sampler:
        raise InputError("attach: use_seedable_sampler=False gives each rank an order of its own; leave it out")


def _refuse_strategy(trainer: Trainer, strategy: str | None, memory_shares: Sequence[float] | None) -> None:
    if strategy is None:
        if memory_shares is not None:
            raise InputError(f"memory_shares={tuple(memory_shares)} divides what a strategy shards; add strategy=")
        return
    if strategy not in STRATEGIES:
        raise InputError(f"strategy={strategy!r} must be one of {', '.join(STRATEGIES)}, or None for torch's DDP")
    if trainer.args.fp16:
        raise InputError(
            f"strategy={strategy!r} with fp16=True: gradients are sharded before they are unscaled; use bf16"
        )
    if strategy == "fsdp" and trainer.args.load_best_model_at_end:
        raise InputError(
            "strategy='fsdp' with load_best_model_at_end=True: a plain model is read at the end, and there are shards; "
            "read the best checkpoint with from_pretrained, or use strategy='zero2'"
        )
