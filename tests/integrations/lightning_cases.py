"""Trainings by Lightning on two ranks, and the same by a plain loop: a script in the shape of its image classifier."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from uneven.comm.group import Group
from uneven.core import StepShares
from uneven.errors import InputError
from uneven.integrations.lightning import UnevenFabricStrategy, UnevenStrategy

COUNT, VALIDATED = 100, 30  # samples
BATCH = 8  # of a rank; a step of two ranks has 16, and the last one of an epoch 4
SPEEDS = (2.9, 1.0)  # as the scripted times have them; no two divisions end at the same time
CLIP = 0.5
FOLDER = Path(sys.argv[5]).parent if len(sys.argv) == 8 else Path()  # of tests/rank_process.py
LR = 0.01


@dataclass(frozen=True)
class Case:
    epochs: int = 2
    accumulate: int = 1
    workers: int = 0
    drop_last: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "measured": Case(epochs=4),
    "measured, accumulated": Case(epochs=4, accumulate=2),
    "measured, read ahead by workers": Case(epochs=4, workers=1),
    "fixed": Case(settings={"shares": (11, 5)}),
    "fixed, accumulated": Case(accumulate=2, settings={"shares": (11, 5)}),
    "even": Case(settings={"policy": "sync"}),
    "a rank without samples": Case(settings={"shares": (1, 0)}),
    "a rank without samples, accumulated": Case(accumulate=2, settings={"shares": (0, 1)}),
    "the short step dropped": Case(drop_last=True, settings={"shares": (11, 5)}),
}


class Images(L.LightningDataModule):
    def __init__(self, batch_size: int = BATCH, workers: int = 0, drop_last: bool = False) -> None:
        super().__init__()
        self.batch_size, self.workers, self.drop_last = batch_size, workers, drop_last

    def setup(self, stage: str | None = None) -> None:
        self.train_set, self.val_set = data(COUNT, 0), data(VALIDATED, 1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.train_set, self.batch_size, shuffle=True, num_workers=self.workers, drop_last=self.drop_last
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, self.batch_size)


class ImageClassifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.model(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Divisions(Callback):
    """How the steps were divided."""

    def __init__(self) -> None:
        self.found: list[tuple[int, ...]] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        shares = trainer.strategy.shares
        if not self.found or len(self.found) <= shares.step:
            self.found.append(shares.of(shares.step))


def data(count: int, seed: int) -> TensorDataset:
    made = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=made).double(), torch.arange(count) % 3)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()


def train_dense(epochs: int, drop_last: bool = False) -> dict[str, Tensor]:
    """A plain loop with whole batches, in the order that Lightning's DDP draws."""
    model, train_set = net(), data(COUNT, 0)
    order: DistributedSampler[Any] = DistributedSampler(train_set, num_replicas=1, rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    for epoch in range(epochs):
        order.set_epoch(epoch)
        for x, y in DataLoader(train_set, 2 * BATCH, sampler=order, drop_last=drop_last):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
    return params_of(model)


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def trainer(case: Case, *callbacks: Callback, strategy: Any = None, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=UnevenStrategy(**case.settings) if strategy is None else strategy,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        precision="64-true",
        callbacks=list(callbacks),
        **{
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
            "gradient_clip_val": CLIP,
            **options,
        },
    )


def images(case: Case) -> Images:
    return Images(BATCH // case.accumulate, case.workers, case.drop_last)


def all_cases(group: Group) -> dict[str, Any]:
    as_under_torchrun(group)
    found: dict[str, Any] = {}
    with scripted_times():
        for name, case in CASES.items():
            found[name] = whole(case)
        found["resumed"] = resumed()
        found["resumed, the steps asked for before"] = asked_and_resumed()
        found["by fabric"] = by_fabric()
        found["by fabric, resumed"] = by_fabric_resumed()
    found["fitted twice"] = fitted_twice()
    found["with BatchNorm"] = with_batchnorm()
    found["stopped early"] = stopped_early()
    check_wrong_uses()
    return found


def as_under_torchrun(group: Group) -> None:
    """So that Lightning finds the ranks; torch's default group is there already."""
    rank, size = str(group.rank), str(group.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, TORCHELASTIC_RUN_ID="test")
    os.environ.update(TORCHELASTIC_RESTART_COUNT="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


@contextmanager
def scripted_times() -> Iterator[None]:
    """A sample takes so long that of what the step really takes nothing is felt beside it."""
    start = StepShares.start

    def scripted(shares: StepShares, before_s: float | None = None) -> None:
        start(shares, 1e3 * shares.of(shares.step)[shares.rank] / SPEEDS[shares.rank])

    with patch.object(StepShares, "start", scripted):
        yield


def whole(case: Case) -> Any:
    model, divisions = ImageClassifier(), Divisions()
    trainer(case, divisions).fit(model, images(case))
    return params_of(model.model), divisions.found


def resumed() -> Any:
    """From a checkpoint inside an epoch, which every rank reads."""
    case = CASES["measured"]
    saved = ModelCheckpoint(FOLDER / "inside", filename="{step}", every_n_train_steps=16, save_top_k=-1)
    first = Divisions()
    trainer(Case(epochs=3), first, saved).fit(ImageClassifier(), images(case))
    model, second = ImageClassifier(), Divisions()
    second.found = first.found[:16]
    trainer(case, second).fit(model, images(case), ckpt_path=FOLDER / "inside" / "step=16.ckpt")
    return params_of(model.model), second.found


class Normalized(ImageClassifier):
    """With BatchNorm, which refuses a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def with_batchnorm() -> list[tuple[int, ...]]:
    divisions = Divisions()
    trainer(Case(epochs=1, settings={"shares": (31, 1)}), divisions).fit(Normalized(), images(Case()))
    return divisions.found


def asked_and_resumed() -> Any:
    """The number of steps is asked for before Lightning knows its epoch, while a worker reads ahead already."""
    case = CASES["measured, read ahead by workers"]
    saved = ModelCheckpoint(FOLDER / "asked", filename="{step}", every_n_train_steps=16, save_top_k=-1)
    first, second, model = Divisions(), Divisions(), Asking()
    trainer(Case(epochs=3, workers=1), first, saved).fit(Asking(), images(case))
    second.found = first.found[:16]
    trainer(case, second, reload_dataloaders_every_n_epochs=1).fit(
        model, images(case), ckpt_path=FOLDER / "asked" / "step=16.ckpt"
    )
    return params_of(model.model), second.found


class Asking(ImageClassifier):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches in (21, 28)
        return super().configure_optimizers()


def fitted_twice() -> Any:
    model, divisions = ImageClassifier(), Divisions()
    one = trainer(Case(epochs=2, settings={"shares": (11, 5)}), divisions)
    one.fit(model, images(Case()))
    first = params_of(model.model)
    one.fit_loop.max_epochs = 3
    one.fit(model, images(Case()))
    assert one.strategy._state["step"] == 21
    return first, divisions.found


def by_fabric(case: Case = CASES["measured, accumulated"], stop_at: int | None = None, state: Any = None) -> Any:
    """With the whole loop written out, resumed from `state` where there is one; params, divisions and the state."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=UnevenFabricStrategy(**case.settings))
    fabric.launch()
    strategy = fabric.strategy
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    model, optimizer = fabric.setup(model, optimizer)
    plain = DataLoader(data(COUNT, 0), BATCH // case.accumulate, shuffle=True, num_workers=case.workers)
    loader = strategy.train_loader(fabric, plain, accumulate=case.accumulate)
    held = fabric.setup_dataloaders(DataLoader(data(VALIDATED, 1), BATCH))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "shares": strategy.shares}
    if state is not None:
        fabric.load(state, parts)
    divisions = []
    for _ in range(strategy.shares.step // 7, case.epochs):
        model.train()
        for place, (x, y) in enumerate(loader):
            step, is_last = strategy.shares.step, (place + 1) % case.accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(F.cross_entropy(model(x), y) / case.accumulate)
            if not is_last:
                continue
            divisions.append(strategy.shares.of(step))
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step + 1 == stop_at:
                fabric.save(FOLDER / "fabric.ckpt", parts)
                return divisions
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(x), y) for x, y in held]
        assert torch.stack(losses).isfinite().all()
    return params_of(model.module), divisions


def by_fabric_resumed() -> Any:
    case = CASES["measured, accumulated"]
    first = by_fabric(case, stop_at=16)
    params, second = by_fabric(case, state=FOLDER / "fabric.ckpt")
    return params, first + second


def stopped_early() -> Any:
    """By a metric of validation, on all ranks after the same epoch; with the best checkpoint."""
    best = ModelCheckpoint(FOLDER / "early", monitor="val_loss", filename="{epoch}")
    stop = EarlyStopping(monitor="val_loss", patience=1, min_delta=10.0)
    model = ImageClassifier()
    one = trainer(Case(epochs=9), stop, best)
    one.fit(model, images(Case()))
    plain = trainer(Case(epochs=3), strategy="ddp")
    plain.fit(ImageClassifier(), images(Case()), ckpt_path=FOLDER / "early" / "epoch=0.ckpt")  # passes over the shares
    names = sorted(path.name for path in (FOLDER / "early").iterdir())
    return one.current_epoch, float(one.callback_metrics["val_loss"]), names, plain.current_epoch


def check_wrong_uses() -> None:
    """On every rank, so that none of them waits for another."""

    def refused(words: str, module: Any, loader: Any, **options: Any) -> None:
        with pytest.raises(InputError, match=words):
            trainer(Case(), strategy="uneven", **options).fit(module, loader)

    class ByHand(ImageClassifier):
        automatic_optimization = False

    train_set = data(COUNT, 0)
    plain = ImageClassifier()
    refused("automatic_optimization", ByHand(), DataLoader(train_set, BATCH), gradient_clip_val=None)
    refused("IterableDataset", plain, DataLoader(Endless(), BATCH))
    refused("range", plain, range(3))
    refused("several", plain, {name: DataLoader(train_set, BATCH) for name in "ab"})
    refused(
        "BatchSampler|batch_size", plain, DataLoader(train_set, batch_sampler=[[0], [1]]), use_distributed_sampler=False
    )
    changing = GradientAccumulationScheduler({0: 1, 4: 2})
    with pytest.raises(InputError, match="GradientAccumulationScheduler"):
        trainer(Case(), changing).fit(plain, images(Case()))
    limited = trainer(Case(accumulate=2), strategy="uneven", limit_train_batches=3)
    with pytest.raises(InputError, match="multiple"):
        limited.fit(plain, images(Case(accumulate=2)))
    own = DataLoader(train_set, BATCH, sampler=torch.utils.data.RandomSampler(train_set, generator=seeded_by_rank()))
    refused("order", plain, own, use_distributed_sampler=False)


def seeded_by_rank() -> torch.Generator:
    return torch.Generator().manual_seed(int(os.environ["RANK"]))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())
