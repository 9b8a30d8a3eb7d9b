"""The order of samples in an epoch: drawn by the user's sampler alike on every rank, shortened by drop_last."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from tests.api.loops import RunOnThreads
from tests.data.pipelines import QUIET, SAMPLES, Net, loss_of, pad, seeded, sgd
from tests.ranks import ThreadGroup, on_threads
from uneven import Ddp, InputError, TensorData, fit
from uneven.api.loop import Loop
from uneven.config import Loading, RunConfig, Task, resolve
from uneven.data.epoch_order import DrawnOrder, make_axis, make_order
from uneven.data.feed import make_feed
from uneven.policy.axis import part_of
from uneven.policy.exact import Fixed

CPU = torch.device("cpu")


def test_a_sampler_without_a_generator_draws_alike_on_every_rank_and_anew_in_every_epoch() -> None:
    sampler = WeightedRandomSampler([1.0] * 53, 30)
    before = torch.get_rng_state(), random.getstate()
    first, second = (DrawnOrder(Loading(sampler=sampler), 53, seed=3) for _ in range(2))
    torch.rand(7)
    for epoch in (0, 1, 5, 0):  # an epoch that was passed long ago is drawn again
        assert np.array_equal(first.indices(epoch), second.indices(epoch))
    assert not np.array_equal(first.indices(0), first.indices(1))
    assert first.fingerprint(2) == second.fingerprint(2)
    assert DrawnOrder(Loading(sampler=sampler), 53, seed=4).fingerprint(2) != first.fingerprint(2)
    torch.set_rng_state(before[0])
    assert random.getstate() == before[1]


class Entropy(Sampler[int]):
    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(50).tolist())


def test_ranks_whose_samplers_draw_differently_are_told_apart() -> None:
    prints = {DrawnOrder(Loading(sampler=Entropy()), 50, seed=0).fingerprint(1) for _ in range(2)}
    assert len(prints) == 2


def test_drop_last_shortens_the_axis_and_the_schedule() -> None:
    def axis(ranks: int = 1, **settings: Any) -> Any:
        config = RunConfig(batch_size=8, epochs=3, drop_last=True, **settings)
        return make_axis(make_order(Task(Net, sgd, loss_of, SAMPLES), config), config, ranks)

    assert (axis().samples, axis().slots_per_epoch, axis().total, axis().schedule_length) == (48, 6, 18, 18)
    assert (axis(2).samples, axis(2, policy="async").samples, axis(accumulate=3).samples) == (48, 48, 48)
    assert {slot.samples for slot in axis(2).slots()} == {16}
    with pytest.raises(InputError, match="drop_last=True leaves nothing to train: an epoch has 53 samples and a step"):
        axis(global_batch_size=54)


def test_tensors_are_read_whole_also_in_an_order_of_the_users() -> None:
    x = torch.arange(12.0).double()[:, None]
    seen: list[list[float]] = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        seen.append(batch[0].flatten().tolist())
        return model(batch[0]).mean()

    def order(**given: Any) -> list[list[float]]:
        seen.clear()
        fit(model=lambda: torch.nn.Linear(1, 1).double(), optimizer=sgd, step=step, epochs=1, **given, **QUIET)
        return list(seen)

    assert order(dataset=TensorDataset(x), shuffle=False, batch_size=5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert order(dataset=DataLoader(TensorDataset(x), batch_size=5, drop_last=True)) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert order(dataset=TensorDataset(x), sampler=[3, 3, 1], batch_size=2) == [[3, 3], [1]]
    assert order(dataset=TensorDataset(x), batch_sampler=[[7], [1, 2]]) == [[7], [1, 2]]


def test_rows_stay_with_their_rank_where_shares_and_order_are_fixed() -> None:
    """Sample t * 8 + k is piece t of text k: each rank sees every piece of its texts, in order."""
    texts: list[list[int]] = []
    for policy, shares in (("sync", None), ("balanced", (5, 3))):
        config = resolve({"batch_size": 4, "epochs": 1, "policy": policy, "shares": shares, "shuffle": False})
        task = Task(Net, sgd, loss_of, list(range(48)))
        fixed = Fixed.even(2) if shares is None else Fixed(shares)
        axis = make_axis(make_order(task, config), config, 2)
        for rank in (0, 1):
            feed = make_feed(task.dataset, CPU, 0, 4, order=make_order(task, config))
            parts = [part_of(slot, fixed.shares(slot.index, 8), rank, 8) for slot in axis.slots()]
            rows = torch.stack([batch for _, micros in feed.stream(parts) for batch, _ in micros])
            assert torch.equal(rows[1:], rows[:-1] + 8)
            texts.append((rows[0] % 8).tolist())
    assert texts == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3, 4], [5, 6, 7]]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(2)
        self.first = nn.Parameter(torch.randn(4, generator=own).double())
        self.again = nn.Parameter(torch.randn(4, 4, generator=own).double() * 0.3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[:, None] * self.first + state @ self.again)


def test_a_state_carried_from_batch_to_batch_is_that_of_one_device_with_fixed_shares() -> None:
    """Eight texts of six pieces: sample t * 8 + k is piece t of text k."""
    pieces = torch.randn(48, generator=seeded()).double()
    plain = Recurrent()
    optimizer, state = sgd(plain.parameters()), torch.zeros(8, 4).double()
    for x in pieces.split(8):
        state = plain(x, state.detach())
        optimizer.zero_grad()
        (state.sum(1) - 1).square().mean().backward()
        optimizer.step()

    config = resolve(
        {"batch_size": 4, "epochs": 1, "shares": (5, 3), "shuffle": False, "drop_last": True, "policy": "balanced"}
    )

    def rank(group: ThreadGroup) -> dict[str, torch.Tensor]:
        model = Recurrent()
        task = Task(lambda: model, sgd, lambda *_: None, TensorData(pieces), is_own_loop=True)
        ddp = Loop(task, RunOnThreads(group, config))
        state = torch.zeros((5, 3)[group.rank], 4).double()
        for x in ddp.batches(0):
            state = ddp(x, state.detach())
            ddp.step((state.sum(1) - 1).square().mean())
        return ddp.finish().params

    for params in on_threads(2, rank):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(params[name], param.detach(), rtol=1e-12, atol=1e-12)


def test_an_own_loop_in_order_says_where_rows_move(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be seen in the user's loop is said: its next error here is that two devices need two processes."""

    def said(**settings: Any) -> bool:
        given = {"batch_size": 4, "epochs": 1, "devices": "cpu,cpu", "progress": "lines", **settings}
        with pytest.raises(InputError, match="one process each"):
            Ddp.setup(Net(), sgd, dataset=SAMPLES, collate_fn=pad, **given)
        return "rows move between devices" in capsys.readouterr().err

    assert [said(shuffle=False), said(shuffle=False, policy="async")] == [True, True]
    assert [said(), said(shuffle=False, shares=(1, 1)), said(shuffle=False, policy="sync")] == [False, False, False]
