"""What a user's pipeline asks for and uneven cannot keep: refused in one line, before a rank starts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from tests.data.pipelines import QUIET, SAMPLES, Net, loss_of, pad, sgd
from uneven import InputError, TensorData, fit
from uneven.config import Loading, resolve
from uneven.data.epoch_order import DrawnOrder
from uneven.data.feed import make_feed
from uneven.data.user_loader import take_apart


class Varying(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 + self.epoch))


class Halved(DataLoader):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return (batch / 2 for batch in super().__iter__())


class InBatches(list[Any]):
    """As a TensorDict: a DataLoader gets whole batches from it, and its collate_fn passes them on."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor([self[index] for index in indices])


class Rows(Mapping[str, Any]):
    """As a TensorDict, which is a mapping by its type, and a data set by what it does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), float(index))}

    def __iter__(self) -> Any:
        return (self[index] for index in range(8))


class Doubled(TensorData):
    def take(self, indices: torch.Tensor, keys: torch.Tensor | None) -> Any:
        return 2 * super().take(indices, keys)


class Sharded(BatchSampler):
    num_processes, process_index = 2, 0


def apart(loader: Any = None, loading: Loading = Loading(), **settings: Any) -> Any:  # noqa: B008
    return take_apart(SAMPLES if loader is None else loader, loading, settings)


def test_a_mapping_that_gives_rows_is_a_data_set() -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()  # type: ignore[no-any-return]

    model = torch.nn.Linear(3, 1)
    assert fit(model=model, optimizer=sgd, step=loss, dataset=Rows(), batch_size=4, epochs=1, **QUIET).samples == 8


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two batch sizes": (
        lambda: apart(DataLoader(SAMPLES, batch_size=8), batch_size=16),
        "batch_size=16 and DataLoader",
    ),
    "whole batches of the data set": (
        lambda: apart(DataLoader(InBatches(range(8)), batch_size=4, collate_fn=lambda batch: batch)),
        r"InBatches.__getitems__ makes whole batches \(Tensor\).*collate_fn that makes a batch of a list",
    ),
    "two workers": (lambda: apart(DataLoader(SAMPLES, num_workers=1), num_workers=2), "num_workers=2 and DataLoader"),
    "two orders": (lambda: apart(DataLoader(SAMPLES), shuffle=True), r"shuffle=True and DataLoader\(shuffle=False\)"),
    "two collates": (
        lambda: apart(DataLoader(SAMPLES, collate_fn=pad), Loading(collate_fn=list)),
        "beside a DataLoader that has its own collate_fn",
    ),
    "a sampler beside a loader": (
        lambda: apart(DataLoader(SAMPLES), Loading(sampler=[1])),
        "give it to the DataLoader",
    ),
    "two samplers": (lambda: apart(None, Loading(sampler=[1], batch_sampler=[[1]])), "leave one out"),
    "a shuffled sampler": (lambda: apart(None, Loading(sampler=[1]), shuffle=True), "the sampler decides the order"),
    "distributed": (
        lambda: apart(DataLoader(SAMPLES, sampler=DistributedSampler(SAMPLES, num_replicas=2, rank=0))),
        "DistributedSampler divides the samples over ranks, and uneven does that itself",
    ),
    "distributed batches": (
        lambda: apart(DataLoader(SAMPLES, batch_sampler=Sharded(SequentialSampler(SAMPLES), 8, False))),
        "Sharded divides the samples over ranks",
    ),
    "no batches": (lambda: apart(DataLoader(SAMPLES, batch_size=None)), "the data set makes whole batches"),
    "an own __iter__": (lambda: apart(Halved(SAMPLES)), "Halved is a DataLoader that iterates in its own way"),
    "an own take": (
        lambda: make_feed(Doubled(torch.zeros(4)), torch.device("cpu"), 0, 2),
        "Doubled is a TensorData with its own take, which would not be called",
    ),
    "an iterator": (lambda: apart(None, Loading(sampler=iter([1]))), "ends after one pass"),
    "a context": (
        lambda: apart(DataLoader(SAMPLES, num_workers=1, multiprocessing_context="spawn")),
        "uneven starts loader processes itself",
    ),
    "out of order": (lambda: apart(DataLoader(SAMPLES, in_order=False)), "in_order=False"),
    "batches and a size": (
        lambda: apart(None, Loading(batch_sampler=[[1]]), batch_size=4),
        "batch_size=4 with batch_s",
    ),
    "batches and accumulate": (
        lambda: apart(None, Loading(batch_sampler=[[1]]), accumulate=2),
        "accumulate=2 with bat",
    ),
    "an empty batch": (lambda: apart(None, Loading(batch_sampler=[[1], []])), "gave an empty batch"),
    "no samples": (lambda: DrawnOrder(Loading(sampler=[]), 5, 0), "draws no sample"),
    "no collate": (lambda: apart(None, Loading(collate_fn=3)), "collate_fn=3 must be a function"),  # type: ignore[arg-type]
    "no sampler": (lambda: apart(None, Loading(sampler=3)), "sampler=3 must be iterable"),  # type: ignore[arg-type]
    "names": (lambda: DrawnOrder(Loading(sampler=["a"]), 5, 0), "gave 'a': positions"),  # type: ignore[list-item]
    "too far": (lambda: DrawnOrder(Loading(sampler=[4, 5]), 5, 0), "gave 5, and the data set has 5 samples"),
    "negative": (lambda: DrawnOrder(Loading(sampler=[-1]), 5, 0), "gave -1, and the data set"),
    "other epochs": (lambda: DrawnOrder(Loading(sampler=Varying()), 50, 0).indices(1), "drew 11 in epoch 1 and 10"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused_in_one_line(case: str) -> None:
    act, words = REFUSED[case]
    with pytest.raises(InputError, match=words) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_equal_values_and_the_command_line_are_no_conflict() -> None:
    assert apart(DataLoader(SAMPLES, batch_size=8), batch_size=8, num_workers=3).settings["num_workers"] == 3
    loader = DataLoader(SAMPLES, batch_size=8, drop_last=True, shuffle=True, collate_fn=pad)
    dataset, loading, settings = apart(loader)
    assert dataset is SAMPLES
    assert loading.collate_fn is pad
    assert loading.sampler is None
    assert settings == {"batch_size": 8, "drop_last": True, "shuffle": True}
    assert resolve({**settings, "epochs": 1}, {"batch_size": 16}).batch_size == 16


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (SAMPLES, {}, r"^dataset: samples of different shapes: pass collate_fn=, .* equal size"),
        ([object()] * 9, {}, "^dataset: samples that cannot be stacked: pass collate_fn="),
        (
            SAMPLES,
            {"collate_fn": lambda samples: samples[99]},
            "^collate_fn failed on 4 samples of dataset with IndexErr",
        ),
        (
            SAMPLES,
            {"collate_fn": pad, "evaluate": ([1, "a"], loss_of)},
            "^collate_fn failed on 2 samples of the test set",
        ),
        (SAMPLES, {"collate_fn": pad, "evaluate": (DataLoader(SAMPLES, collate_fn=pad), loss_of)}, None),
        (
            SAMPLES,
            {"collate_fn": pad, "evaluate": (DataLoader(SAMPLES, 9), loss_of)},
            "^the test set: samples of different",
        ),
        (
            TensorData(torch.zeros(8), transform=lambda rows, _: rows),
            {"collate_fn": default_collate},
            "the transform makes the batch; leave one out",
        ),
    ],
)
def test_samples_that_make_no_batch_are_refused_before_a_rank_starts(
    dataset: Any, options: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception): ...

    def start(*_: Any, **__: Any) -> None:
        raise StartedError

    monkeypatch.setattr("uneven.launch.run.Run", start)
    train = {"model": Net, "optimizer": sgd, "step": loss_of, "batch_size": 4, "epochs": 1, "devices": "cpu,cpu"}
    with pytest.raises(StartedError if words is None else InputError, match=words) as caught:
        fit(dataset=dataset, progress="off", **train, **options)
    assert "\n" not in str(caught.value)


def test_a_data_set_that_fails_is_named_with_the_sample() -> None:
    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise KeyError("no such\nfile")

    with pytest.raises(InputError, match=r"^dataset\[\d\] failed with KeyError: 'no such"):
        fit(model=Net, optimizer=sgd, step=loss_of, dataset=Broken(), batch_size=2, epochs=1, **QUIET)
