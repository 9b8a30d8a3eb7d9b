"""Streams on threads: real workers, one group; every kind of source under exact and local policies."""

import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import default_collate

from tests.train.exact_runs import OPTIMIZERS, Net, X, Y, mean_loss
from tests.train.stream_runs import SIZES, STARTS, Plain, Shards, SizedPlain, train
from uneven.config import Evaluation
from uneven.data.reader import Extent, Reader, ReaderClient, ReaderServer
from uneven.data.source import units
from uneven.errors import GroupLostError, InputError, RankError


class UnsizedShards(Shards):
    shard_sizes = None


SOURCES = {"shards": Shards, "unsized shards": UnsizedShards, "sized": SizedPlain, "unsized": Plain}


def plain_loop(order: list[list[int]], batch: int) -> dict[str, torch.Tensor]:
    """A PyTorch loop over these places of X, epoch by epoch."""
    model = Net(torch.float64)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for epoch in order:
        for first in range(0, len(epoch), batch):
            samples = default_collate([(X[place].double(), Y[place]) for place in epoch[first : first + batch]])
            optimizer.zero_grad()
            mean_loss(model, samples).backward()
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def order_of(kind: str, seed: int, epoch: int) -> list[int]:
    if "shards" not in kind:
        return list(range(len(X)))
    return [STARTS[u.shard] + u.start + i for u in units(seed, epoch, SIZES) for i in range(u.count)]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("size", "changes"), [(1, {}), (2, {"policy": "sync"}), (3, {}), (2, {"shares": (3, 1)})])
def test_exact_policies_equal_a_plain_loop_over_the_same_order(kind: str, size: int, changes: dict[str, Any]) -> None:
    dataset = SOURCES[kind]()
    results = train(size, dataset, global_batch_size=24, **changes)
    expected = plain_loop([order_of(kind, 3, epoch) for epoch in range(2)], 24)
    for name, value in results[0].state.params.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
    assert [entry["samples"] for entry in results[0].state.history] == [70, 140]
    if kind != "shards":  # where every rank reads by itself, it measures its step beforehand
        assert sorted(dataset.read) == sorted(2 * list(range(len(X)))), "somebody read a sample to skip it"


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("size", [2, 3])
def test_local_policies_train_what_the_stream_gives_exactly_once(kind: str, policy: str, size: int) -> None:
    dataset = SOURCES[kind]()
    results = train(size, dataset, policy=policy, anchor=2, batch_size=4)
    trained = sum(samples for result in results for _, _, samples in result.log)
    assert trained == 140
    assert [entry["samples"] for entry in results[0].state.history] == [70, 140]
    if kind != "shards":
        assert sorted(dataset.read) == sorted(2 * list(range(len(X))))


@pytest.mark.parametrize("policy", ["balanced", "cadence", "async"])
@pytest.mark.parametrize(("samples", "shrinks"), [(1, 0), (8, 0), (48, 17), (70, 1)])
def test_the_end_of_a_stream_without_length_is_agreed(policy: str, samples: int, shrinks: int) -> None:
    """Fewer samples than ranks, full slots to the end, and epochs of different length; evaluated after each epoch."""

    def count(model: nn.Module, batch: Any) -> tuple[dict[str, torch.Tensor], int]:
        del model
        return {"sum": batch.sum()}, len(batch)

    dataset = Plain(samples, shrinks)
    evaluation = Evaluation([torch.tensor(1.0), torch.tensor(5.0)] * 200, count)
    results = train(3, dataset, policy=policy, batch_size=4, evaluation=evaluation)
    history = results[0].state.history
    assert [entry["samples"] for entry in history] == [samples, 2 * samples - shrinks]
    assert [entry["sum"] for entry in history] == [3.0, 3.0]
    assert results[0].state.dataset_samples == samples
    assert sorted(dataset.read) == sorted([*range(samples), *range(samples - shrinks)])


def test_one_thread_of_rank_0_reads_and_every_rank_trains_from_it() -> None:
    dataset = SizedPlain()
    results = train(3, dataset, policy="sync", global_batch_size=9)
    assert len(dataset.threads) == 1
    assert all(sum(samples for _, _, samples in result.log) > 0 for result in results)


def test_every_rank_opens_only_what_it_trains() -> None:
    """Apart from the one open at the first sample with which a rank measures its step."""
    dataset = Shards()
    train(2, dataset, policy="sync", global_batch_size=10, epochs=1)
    measured = [place for place in dataset.read if dataset.read.count(place) > 1]
    assert len(set(dataset.read)) == len(X)
    assert set(measured) <= set(order_of("shards", 3, 0)[:10]), "only the first slot is read for a measurement"


@pytest.mark.parametrize("size", [1, 2])
def test_what_the_stream_raises_reaches_the_caller(size: int) -> None:
    class Broken(Plain):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(9):
                yield X[0].double(), Y[0]
            raise ValueError("line 10 is damaged")

    with pytest.raises((ValueError, RankError), match="line 10 is damaged"):
        train(size, Broken())


def test_a_stream_that_ends_before_its_length_is_an_error() -> None:
    class Short(Plain):
        def __len__(self) -> int:
            return self.samples + 5

    with pytest.raises(InputError, match=r"ended after 70 samples in epoch 0, and its len\(\) is 75"):
        train(1, Short())


def test_a_rank_that_asks_the_reader_gets_a_wrong_input_as_one() -> None:
    """Whichever rank asked first ended the run: another than rank 0 did so with a traceback of ours."""
    reader = Reader(lambda _: iter(range(5)), Extent(epochs=1, length=9), ahead=2)
    server = ReaderServer(reader, connections=1)
    client = ReaderClient(server.address)
    client.send("take", 0, 0, 8)
    with pytest.raises(InputError, match=r"^the stream ended after 5 samples in epoch 0, and its len\(\) is 9"):
        client.receive()
    client.close()
    reader.close()


class Planted:
    """A pickle that would leave a mark."""

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Planted, "was_run", True)

    was_run = False


@pytest.mark.parametrize(
    "address", [pickle.dumps(Planted()), b"", b"5", b'["uneven-x", "00"]', b'["/tmp/other", "00"]', b'[["a"], "00"]']
)
def test_the_address_of_the_reader_is_not_unpickled(address: bytes) -> None:
    """It comes through a collective, which anybody on the network of a run can write to."""
    with pytest.raises(RankError, match="address"):
        ReaderClient(address)
    assert not Planted.was_run


def test_a_reader_is_believed_only_where_it_is_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    reader = Reader(lambda _: iter(range(5)), Extent(epochs=1, length=5), ahead=2)
    server = ReaderServer(reader, connections=1)
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(RankError, match="another user"):
        ReaderClient(server.address)
    monkeypatch.undo()
    reader.close()


def test_a_server_that_is_closed_leaves_no_thread_and_nobody_waiting() -> None:
    """One rank has connected and waits for an answer; another one, which was lost before, never came."""
    go_on = threading.Event()

    def read_pass(epoch: int) -> Iterator[int]:
        yield epoch
        go_on.wait()

    before = {*threading.enumerate()}
    reader = Reader(read_pass, Extent(epochs=1), ahead=2)
    server = ReaderServer(reader, connections=2)
    client = ReaderClient(server.address)
    client.send("take", 0, 0, 1)
    assert client.receive() == [0]
    client.send("take", 0, 1, 2)
    server.close()
    with pytest.raises(GroupLostError):
        client.receive()
    with pytest.raises(GroupLostError):
        ReaderClient(server.address)
    go_on.set()
    reader.close()
    for thread in {*threading.enumerate()} - before:
        thread.join(10.0)
        assert not thread.is_alive(), thread.name


def test_a_stream_that_cannot_begin_anew_is_an_error() -> None:
    class Once(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.samples_left = super().__iter__()

        def __iter__(self) -> Iterator[Any]:
            return self.samples_left

    with pytest.raises(InputError, match="gave no sample in epoch 1: every epoch calls iter"):
        train(1, Once())


def test_all_ranks_of_a_model_parallel_strategy_get_the_same_samples() -> None:
    results = train(2, Plain(), policy="sync", strategy="tensor", batch_size=12)
    expected = plain_loop(2 * [list(range(len(X)))], 24)
    for name, value in results[0].state.params.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


class Endless(Plain):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_max_steps_bounds_an_endless_stream(policy: str) -> None:
    """Evaluated every two steps; the scheduler takes the number of steps, which is known."""
    totals: list[int] = []

    def scheduler(optimizer: Any, total: int) -> Any:
        totals.append(total)
        return StepLR(optimizer, total)

    def count(model: nn.Module, batch: Any) -> tuple[dict[str, torch.Tensor], int]:
        del model
        return {"sum": batch.sum()}, len(batch)

    evaluation = Evaluation([torch.tensor(1.0), torch.tensor(5.0)] * 200, count)
    changes = {"max_steps": 7, "eval_every": "2 steps", "batch_size": 4}
    results = train(2, Endless(), policy=policy, scheduler=scheduler, evaluation=evaluation, **changes)
    samples = 7 * (8 if policy == "sync" else 4)
    state = results[0].state
    assert (state.slot, sum(samples for result in results for _, _, samples in result.log)) == (7, samples)
    assert [entry["step"] for entry in state.history if "sum" in entry] == [2, 4, 6, 7]
    assert set(totals) == {7}


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_max_steps_ends_a_stream_in_its_second_epoch_or_not_at_all(policy: str) -> None:
    slots = -(-48 // (8 if policy == "sync" else 4))
    state = train(2, Plain(48), policy=policy, batch_size=4, max_steps=slots + 2)[0].state
    assert (state.slot, [entry["step"] for entry in state.history]) == (slots + 2, [slots, slots + 2])
    state = train(2, Plain(48), policy=policy, batch_size=4, epochs=1, max_steps=slots + 2)[0].state
    assert (state.slot, [entry["step"] for entry in state.history]) == (slots, [slots])
