"""MuonAdamW on many ranks is MuonAdamW on one, and both are torch's Muon and AdamW side by side."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group, SoloGroup
from uneven.errors import InputError
from uneven.parallel.ddp import DDPBucketed, Zero2
from uneven.parallel.muon_adamw import MuonAdamW

ROWS, STEPS = 12, 3
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.01}
ADAMW: dict[str, Any] = {"lr": 1e-2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        own = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own) * 0.4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        scores: Tensor = self.head(x)
        return scores


def kinds(model: Net) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [layer.weight for layer in model.layers]
    return matrices, [param for param in model.parameters() if not any(param is one for one in matrices)]


def groups(model: Net) -> list[dict[str, Any]]:
    matrices, rest = kinds(model)
    return [{"params": matrices, "kind": "muon", **MUON}, {"params": rest, "kind": "adamw", **ADAMW}]


def loss_of(model: nn.Module, step: int, rows: slice) -> Tensor:
    own = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 5, generator=own, dtype=torch.float64)
    y = torch.randint(0, 3, (ROWS,), generator=own)
    return F.cross_entropy(model(x[rows]), y[rows], reduction="sum") / ROWS


def dense() -> dict[str, Tensor]:
    model = Net()
    matrices, rest = kinds(model)
    both = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)]
    for step in range(STEPS):
        loss_of(model, step, slice(None)).backward()
        for one in both:
            one.step()
            one.zero_grad()
    return dict(model.state_dict())


ROWS_OF = {1: [slice(None)], 2: [slice(0, 8), slice(8, 12)], 3: [slice(0, 7), slice(7, 12), None]}


def train(group: Group, first: int = 0, state: Any = None, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = Net()
    optimizer = MuonAdamW(groups(model), group, **options)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    rows = ROWS_OF[group.world_size][group.rank]
    for step in range(first, STEPS):
        if rows is not None:  # a rank without samples brings no gradients
            loss_of(model, step, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and first == 0:
            state = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    return dict(model.state_dict()), state


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shares", [None, (5.0, 2.0, 1.0), (0.0, 1.0, 1.0)])
def test_any_ranks_and_shares_are_torchs_own_side_by_side(ranks: int, shares: Any) -> None:
    own = shares and (shares[:ranks] if any(shares[:ranks]) else None)
    found = on_threads(ranks, lambda group: train(group, memory=own, speed=own and own[::-1]))
    for params, _ in found:
        torch.testing.assert_close(params, dense(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(params, found[0][0], rtol=0, atol=0)


@pytest.mark.parametrize("over_nccl", [False, True])
def test_a_state_of_three_ranks_goes_on_with_two_and_with_one(over_nccl: bool) -> None:
    def first(group: ThreadGroup) -> Any:
        group.pretends_nccl = over_nccl
        return train(group, memory=(5, 2, 1), speed=(1, 2, 3))[1]

    state = on_threads(3, first)[2]
    for params, _ in [*on_threads(2, lambda group: train(group, 2, state)), train(SoloGroup(), 2, state)]:
        torch.testing.assert_close(params, dense(), rtol=1e-8, atol=1e-10)


def test_gradients_that_a_ddp_has_summed_are_not_summed_again() -> None:
    def rank(group: ThreadGroup) -> dict[str, Tensor]:
        model = Net()
        strategy = DDPBucketed(model, lambda _: MuonAdamW(groups(model), group, sums_gradients=False), group)
        for step in range(STEPS):
            loss_of(strategy.module, step, ROWS_OF[2][group.rank]).backward()
            strategy.optimizer.step()
            strategy.optimizer.zero_grad()
        return dict(model.state_dict())

    for params in on_threads(2, rank):
        torch.testing.assert_close(params, dense(), rtol=1e-8, atol=1e-10)


def test_gradients_are_not_summed_twice_nor_sharded_twice() -> None:
    def rank(group: ThreadGroup) -> None:
        model = Net()
        with pytest.raises(InputError, match="make it with sums_gradients=False"):
            DDPBucketed(model, MuonAdamW(groups(model), group), group)
        with pytest.raises(InputError, match="MuonAdamW divides its state among the ranks by itself"):
            Zero2(model, MuonAdamW(groups(model), group), group)

    on_threads(2, rank)


def test_all_sums_start_before_anything_is_updated_and_sent() -> None:
    class Watched(ThreadGroup):
        words: list[str]

        def all_reduce(self, tensor: Tensor) -> Any:
            self.words.append("sum")
            return super().all_reduce(tensor)

        def broadcast(self, tensor: Tensor, owner: int = 0) -> Any:
            self.words.append("send")
            return super().broadcast(tensor, owner)

    def rank(group: ThreadGroup) -> list[str]:
        group.__class__ = Watched
        group.words = []  # type: ignore[attr-defined]
        model = Net()
        optimizer = MuonAdamW(groups(model), group)
        loss_of(model, 0, ROWS_OF[2][group.rank]).backward()
        optimizer.step()
        words: list[str] = group.words  # type: ignore[attr-defined]
        return words

    for words in on_threads(2, rank):
        assert words == ["sum"] * 4 + ["send"] * 4, "gradients and flags of two kinds; then two owners of each kind"


def test_a_scheduler_reaches_both_kinds() -> None:
    optimizer = MuonAdamW(groups(Net()))
    scheduler = StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in optimizer._parts] == [MUON["lr"] / 2, ADAMW["lr"] / 2]


def test_wrong_groups_are_told() -> None:
    vector = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"matrices, not for a param of shape \(3,\)"):
        MuonAdamW([{"params": [vector], "kind": "muon"}])
    with pytest.raises(ValueError, match=r"kind None .* muon, adamw"):
        MuonAdamW([{"params": [vector]}])
    with pytest.raises(ValueError, match=r"kind None .* muon, adamw"):
        MuonAdamW([{"params": [vector], "kind": "adamw"}]).add_param_group({"params": [nn.Parameter(torch.ones(2))]})
