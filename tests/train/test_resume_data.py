"""A resumed run trains on the samples that the uninterrupted one would have, wherever they come from."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tests.train.exact_runs import Net as PlainNet
from tests.train.exact_runs import X, Y
from tests.train.resumed_data import make_model
from tests.train.resumed_runs import CADENCE, EXACT, assert_same
from tests.train.resumed_runs import train as train_on_threads
from uneven import InputError, TrainedState, fit
from uneven.data.reader import Extent, Reader

Sample = tuple[Tensor, Tensor]


class Noisy(Dataset[Sample]):
    """A random augmentation."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Sample:
        return X[index].double() + torch.randn(X.shape[1]).double(), Y[index]


class Stream(IterableDataset[Sample]):
    """Without length."""

    def __iter__(self) -> Iterator[Sample]:
        return ((x, y) for x, y in zip(X.double(), Y, strict=True))


class Shards:
    shards = (0, 1, 2)
    shard_sizes = (30, 20, 20)

    def open(self, shard: int, start: int) -> Iterator[Sample]:
        first = sum(self.shard_sizes[:shard])
        return ((X[i].double(), Y[i]) for i in range(first + start, first + self.shard_sizes[shard]))


def seeded(number: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def stacked(samples: list[Sample]) -> Sample:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "loader with a worker": lambda: {
        "dataset": DataLoader(Noisy(), 8, shuffle=True, num_workers=1, collate_fn=stacked)
    },
    "loader with a generator": lambda: {"dataset": DataLoader(Noisy(), 8, shuffle=True, generator=seeded())},
    "weighted": lambda: {"dataset": Noisy(), "sampler": WeightedRandomSampler(torch.rand(70), 64, generator=seeded())},
    "batch sampler": lambda: {
        "dataset": Noisy(),
        "batch_sampler": BatchSampler(RandomSampler(Noisy(), generator=seeded()), 8, False),
    },
    "shards": lambda: {"dataset": Shards()},
    "stream": lambda: {"dataset": Stream()},
}


def train(**options: Any) -> TrainedState:
    def step(model: nn.Module, batch: Sample) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    size = {} if "batch_sampler" in options else {"batch_size": 8}
    return fit(
        model=make_model,
        optimizer=torch.optim.Adam,
        step=step,
        **{**size, "epochs": 3, "devices": "cpu", "seed": 3, "progress": "off", **options},
    )


@pytest.mark.parametrize("source", list(SOURCES))
def test_the_same_samples_come(source: str, tmp_path: Path) -> None:
    torch.manual_seed(9)  # of the weights
    made = SOURCES[source]()
    whole = train(**made, save_every="7 steps", out=tmp_path / "whole")
    for slot in (7, 14) if source == "stream" else (14,):  # in the first epoch, and in the second
        again = train(**made, save_every="7 steps", out=tmp_path / "again", resume=tmp_path / f"whole/step-{slot}")
        assert_same(again, whole)
        assert again.samples == whole.samples
    if source == "stream":
        again = train(**made, save_every="7 steps", out=tmp_path / "whole", resume="auto")  # finished: nothing to train
        assert_same(again, whole)


@pytest.mark.parametrize("options", [EXACT, {**CADENCE, "shares": (3, 1)}], ids=["balanced", "cadence"])
def test_a_stream_without_length_is_read_on_by_two_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    run = partial(
        train_on_threads,
        2,
        make_model=partial(PlainNet, torch.float64),
        data=Stream(),
        optimizer="adam",
        **options,
    )
    whole = run(save_every="4 steps", out=tmp_path)
    for slot in (4, 8):
        again = run(resume=tmp_path / f"step-{slot}", save_every="4 steps", out=tmp_path / f"{slot}")
        assert_same(again, whole, 1e-10 if options is EXACT else 0.0)
        assert again.samples == 3 * 70


def test_an_order_that_cannot_be_drawn_again_is_refused(tmp_path: Path) -> None:
    class Moving(Sampler[int]):
        """Draws from a generator that is somewhere else in every run."""

        def __init__(self, number: int) -> None:
            self.generator = seeded(number)

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(70, generator=self.generator).tolist())

    train(dataset=Noisy(), sampler=Moving(1), save_every="7 steps", out=tmp_path, epochs=1)
    train(dataset=Noisy(), sampler=Moving(1), resume=tmp_path / "step-7", out=tmp_path / "more", epochs=2)
    with pytest.raises(InputError, match=r"step-7: the sampler drew another order"):
        train(dataset=Noisy(), sampler=Moving(2), resume=tmp_path / "step-7", epochs=1)


def test_a_reader_drops_what_was_trained_before() -> None:
    passes: list[int] = []

    def read_pass(epoch: int) -> Iterator[int]:
        passes.append(epoch)
        return iter(range(10 * epoch, 10 * epoch + 8))

    reader = Reader(read_pass, Extent(3, start=(1, 4), sizes=[8]))
    assert reader.ends_within(1, 4, 2) == 0
    assert len(reader._ready) == 3  # and one more, which told that the epoch goes on
    assert (reader.take(1, 4, 6), reader.take(1, 6, 8), reader.ends_within(1, 6, 2)) == ([14, 15], [16, 17], 8)
    assert reader.take(2, 0, 1) == [20]
    assert passes == [1, 2]
    reader = Reader(read_pass, Extent(3, start=(1, 2), trained=[((1, 3), (1, 6)), ((2, 1), (2, 2))], sizes=[8]))
    assert reader.take(2, 0, 1) == [20]
    assert [*reader._ready] == [(1, 2), (1, 6), (1, 7)], "it keeps what nobody will take"
    assert reader.take(2, 2, 3) == [22]
