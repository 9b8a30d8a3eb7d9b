"""The test set as a DataLoader: its own batches, collate function and processes."""

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from tests.data.pipelines import QUIET, SAMPLES, Net, loss_of, pad, sgd
from uneven import fit
from uneven.config import Loading
from uneven.data.feed import make_feed


def count(model: Any, batch: Any) -> tuple[dict[str, Any], int]:
    return {"seen": batch["y"].new_ones(len(batch["y"])).sum(), "lengths": batch["lengths"].sum()}, 1


@pytest.mark.parametrize(
    ("test_set", "seen", "batches"),
    [
        (SAMPLES[:10], 10, 2),  # read with the collate_fn and batch_size of fit
        (DataLoader(SAMPLES[:10], batch_size=4, collate_fn=pad), 10, 3),
        (DataLoader(SAMPLES[:10], batch_size=4, collate_fn=pad, drop_last=True, shuffle=True), 8, 2),
        (DataLoader(SAMPLES, batch_size=4, collate_fn=pad, sampler=SubsetRandomSampler([1, 5, 9])), 3, 1),
        (DataLoader(SAMPLES, collate_fn=pad, batch_sampler=[[0, 1, 2], [3, 4]]), 5, 2),
    ],
)
def test_the_test_set_may_be_a_loader(test_set: Any, seen: int, batches: int) -> None:
    train = DataLoader(SAMPLES, batch_size=8, collate_fn=pad)
    given = {"collate_fn": pad, "evaluate": (test_set, count)}
    state = fit(model=Net, optimizer=sgd, step=loss_of, dataset=train, epochs=1, **given, **QUIET)
    assert state.history[0]["seen"] * batches == pytest.approx(seen)  # count() counts batches


def test_a_loaders_collate_is_its_own() -> None:
    """A training loader's may mix samples up; the test set, loader or not, is not read with it."""

    def mixed(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {**pad(samples), "y": torch.zeros(len(samples), dtype=torch.int64)}

    def right(_: Any, batch: Any) -> tuple[dict[str, Any], int]:
        return {"ones": batch["y"].sum()}, len(batch["y"])

    train = DataLoader(SAMPLES, batch_size=8, collate_fn=mixed)
    same = [({**pad([sample]), "y": torch.tensor([1])}) for sample in SAMPLES[:1] * 4]
    rows = [{name: value[0] for name, value in row.items()} for row in same]
    for test_set in (rows, DataLoader(rows, batch_size=2)):
        state = fit(
            model=Net, optimizer=sgd, step=loss_of, dataset=train, evaluate=(test_set, right), epochs=1, **QUIET
        )
        assert state.history[0]["ones"] == 1.0


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_test_loaders_processes_may_live_on(is_kept: bool) -> None:
    class Whose(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return os.getpid()

    feed = make_feed(Whose(), torch.device("cpu"), 0, 2, 1, loading=Loading(persistent_workers=is_kept))
    first, second = ({int(pid) for batch, _ in feed.in_order() for pid in batch} for _ in range(2))
    assert (first == second) == is_kept
    assert os.getpid() not in first
    assert len(list(feed.in_order(1, 2))) == 1
