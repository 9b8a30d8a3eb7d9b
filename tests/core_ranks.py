"""Training loops with torch's own DDP on ranks that are processes, and the same training by one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from uneven.comm.group import Group
from uneven.core import StepSampler, StepShares, watch_ddp
from uneven.errors import InputError

SPEEDS = (3.1, 1.0, 1.7)  # of the ranks, as the scripted times have them; no two divisions end at the same time
COUNT = 50  # samples an epoch
STEP = 16  # so that the last step has two
MEASURED_EPOCHS = 6  # by then the shares have moved


@dataclass(frozen=True)
class Case:
    epochs: int = 2
    pieces: int = 1
    drop_last: bool = False
    workers: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "measured": Case(MEASURED_EPOCHS),
    "measured, two pieces": Case(MEASURED_EPOCHS, pieces=2, settings={"least": 2}),
    "measured, read ahead by workers": Case(MEASURED_EPOCHS, workers=1, settings={"lookahead": 2}),
    "even": Case(settings={"shares": "sync"}),
    "a rank without samples": Case(settings={"shares": (3, 0, 1)}),
    "fillers in pieces": Case(pieces=2, settings={"shares": (1, 0, 15)}),
    "the short step dropped": Case(drop_last=True, settings={"shares": (2, 3, 1)}),
}


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(COUNT, 6, generator=made).double(), torch.arange(COUNT) % 3)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def order() -> "DistributedSampler[Any]":
    return DistributedSampler(data(), num_replicas=1, rank=0, seed=5)


def train_dense(epochs: int, drop_last: bool = False) -> dict[str, Tensor]:
    model, sampler = net(), order()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data(), batch_size=STEP, sampler=sampler, drop_last=drop_last):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


class Training:
    """One rank of a run; whole epochs, or steps of one that is resumed."""

    def __init__(self, case: Case, group: Any = None) -> None:
        self.case = case
        self.shares = StepShares(STEP, group=group, **case.settings)
        self.sampler = StepSampler(order(), self.shares, pieces=case.pieces, drop_last=case.drop_last)
        self.ddp = DistributedDataParallel(net(), process_group=group)
        self.optimizer = AdamW(self.ddp.parameters(), lr=0.01)
        self.divisions: list[tuple[int, ...]] = []
        watch_ddp(self.ddp, self.shares)

    def run(self, epoch: int, until: int | None = None) -> None:
        sampler, shares, pieces = self.sampler, self.shares, self.case.pieces
        sampler.set_epoch(epoch)
        loader = DataLoader(data(), batch_sampler=sampler, num_workers=self.case.workers)
        for place, (x, y) in enumerate(loader, sampler.skip * pieces):
            step, piece = shares.step, place % pieces
            if piece == 0:
                own = shares.of(step)[shares.rank]
                # Of what the step really takes nothing is felt beside it, so shares do not depend on the machine.
                shares.start(before_s=1e3 * own / SPEEDS[shares.rank])
                self.divisions.append(shares.of(step))
            is_last = piece == pieces - 1
            self.ddp.require_backward_grad_sync = is_last  # what no_sync() sets
            loss = F.cross_entropy(self.ddp(x), y) * shares.factor(step, sampler.own[step, piece])
            loss.backward()
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()
                shares.note(step)
                if shares.step == until:
                    return

    def params(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.ddp.module.named_parameters()}


Found = tuple[dict[str, Tensor], list[tuple[int, ...]]]


def all_cases(group: Group) -> dict[str, Found]:
    found = {name: whole(case) for name, case in CASES.items()}
    found["resumed"] = resumed()
    found["summed by the loop"] = by_sums()
    some = dist.new_group([0, 2])
    if group.rank != 1:
        found["some"] = whole(Case(settings={"shares": (1, 2)}), some)
    check_wrong_uses()
    return found


def whole(case: Case, group: Any = None) -> Found:
    training = Training(case, group)
    for epoch in range(case.epochs):
        training.run(epoch)
    training.shares.close()
    return training.params(), training.divisions


def resumed() -> Found:
    """Stopped inside an epoch; what is needed to go on is in three state dicts."""
    case = CASES["measured"]
    first = Training(case)
    for epoch in range(MEASURED_EPOCHS - 2):
        first.run(epoch)
    first.run(MEASURED_EPOCHS - 2, until=first.shares.step + 1)
    states = first.ddp.module.state_dict(), first.optimizer.state_dict(), first.shares.state_dict()
    second = Training(case)
    second.ddp.module.load_state_dict(states[0])
    second.optimizer.load_state_dict(states[1])
    second.shares.load_state_dict(states[2])
    begin, second.sampler.skip = divmod(second.shares.step, second.sampler.steps)
    for epoch in range(begin, MEASURED_EPOCHS):
        second.run(epoch)
    return second.params(), first.divisions + second.divisions


def by_sums() -> Found:
    """Without DDP: the loop sums gradients over ranks itself, and stops the clock before."""
    shares = StepShares(STEP, shares=(2, 1, 1))
    sampler, model = StepSampler(order(), shares), net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data(), batch_sampler=sampler):
            step = shares.step
            shares.start()
            (F.cross_entropy(model(x), y) * shares.factor(step, sampler.own[step, 0], reduce="sum")).backward()
            shares.stop()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            shares.note(step)
    return {name: param.detach() for name, param in model.named_parameters()}, []


def check_wrong_uses() -> None:
    """On every rank, so that none of them waits for another."""
    training = Training(Case(settings={"shares": "sync"}))
    shares, ddp, (x, y) = training.shares, training.ddp, data()[:4]
    loss_of: Callable[[], Tensor] = lambda: F.cross_entropy(ddp(x), y)  # noqa: E731
    loss_of().backward()  # no step: nothing is sent
    with pytest.raises(InputError, match="start"):
        shares.note(0)
    shares.of(0)
    shares.start()
    with pytest.raises(InputError, match="watch_ddp"):
        shares.note(0)
    loss_of().backward()
    with pytest.raises(InputError, match="no_sync"):
        loss_of().backward()
    with pytest.raises(InputError, match="under way"):
        shares.begin(5)
    shares.note(0)
    calls: list[Any] = []

    def hook(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    own = DistributedDataParallel(net())
    watch_ddp(own, shares, hook, calls)
    shares.of(1)
    shares.start()
    F.cross_entropy(own(x), y).backward()
    shares.note(1)
    assert calls
