"""The Work object behaves the same on Gloo, on threads and alone."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group, SoloGroup
from uneven.comm.lost import Lost, as_lost
from uneven.comm.store import open_store
from uneven.comm.torch_group import TorchGroup
from uneven.comm.work import GlooWork, Traffic, Work
from uneven.errors import GroupLostError, RankError

Check = Callable[[Group], None]


def on_gloo(check: Check) -> None:
    store, _ = open_store()
    group = TorchGroup(store, 0, 1)
    try:
        check(group)
    finally:
        group.close()


def on_two_threads(check: Check) -> None:
    on_threads(2, lambda group: check(group))


def alone(check: Check) -> None:
    check(SoloGroup())


everywhere = pytest.mark.parametrize("run", [on_gloo, on_two_threads, alone])


@everywhere
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_max", "broadcast"])
def test_wait_gives_the_tensor_itself_and_may_be_called_again(run: Callable[[Check], None], name: str) -> None:
    def check(group: Group) -> None:
        tensor = torch.full((3,), 2.0)
        work = getattr(group, name)(tensor)
        assert work.wait() is tensor
        factor = group.world_size if name == "all_reduce" else 1
        assert tensor.tolist() == [2.0 * factor] * 3
        assert work.wait() is tensor
        assert tensor.tolist() == [2.0 * factor] * 3
        assert work.is_completed()

    run(check)


class Slow:
    """A collective that completes when the test sets an event."""

    def __init__(self) -> None:
        self.arrived = threading.Event()

    def wait(self) -> None:
        assert self.arrived.wait(100)

    def is_completed(self) -> bool:
        return self.arrived.is_set()


def test_completion_bytes_and_waiting_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.25])  # a third reading would fail
    monkeypatch.setattr("uneven.comm.work.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    traffic, slow = Traffic(), Slow()
    tensor = torch.zeros(10, dtype=torch.float64)
    work = Work(slow, tensor, traffic)
    assert (traffic.collectives, traffic.payload_bytes, traffic.wait_s) == (1, 80, 0.0)
    assert not work.is_completed()
    slow.arrived.set()
    assert work.is_completed()
    work.wait()
    work.wait()
    assert traffic.wait_s == 0.25, "a second wait costs nothing"


def test_what_is_waited_for_can_be_told_from_another_thread() -> None:
    traffic, seen = Traffic(), list[str]()

    class Asking(Slow):
        def wait(self) -> None:
            assert traffic.awaited is not None
            seen.append(traffic.awaited.describe())

    Work(Asking(), torch.zeros(2), traffic, name="broadcast").wait()
    assert seen == ["broadcast of 8 bytes, its collective number 1"]
    assert traffic.awaited is None


def test_a_group_counts_what_it_sends() -> None:
    def rank(group: ThreadGroup) -> Traffic:
        group.all_reduce(torch.zeros(5)).wait()
        group.all_reduce_max(torch.zeros(2, dtype=torch.int64)).wait()
        return group.traffic

    for traffic in on_threads(2, rank):
        assert traffic.collectives == 2
        assert traffic.payload_bytes == 5 * 4 + 2 * 8
    solo = SoloGroup()
    solo.all_reduce(torch.zeros(100)).wait()
    assert solo.traffic.payload_bytes == 0, "alone nothing is on the wire"


def test_gloo_sends_bytes_too() -> None:
    def check(group: Group) -> None:
        group.all_reduce(torch.zeros(7)).wait()
        assert group.traffic.payload_bytes == 28

    on_gloo(check)


def test_threads_sum_in_rank_order_whatever_order_they_come_in() -> None:
    tiny = torch.tensor([1.0, 1e8, -1e8])

    def rank(group: ThreadGroup) -> Tensor:
        return group.all_reduce(tiny[group.rank].clone()).wait()

    assert [one.item() for one in on_threads(3, rank)] == [((tiny[0] + tiny[1]) + tiny[2]).item()] * 3


class Failing:
    """A collective that fails, or one that a stopped peer holds up for ever."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def wait(self, *_: Any) -> None:
        raise self.error or RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.error is not None


@pytest.mark.parametrize(
    "words",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21714",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:4: Connection reset by peer",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 1800000ms for recv",
    ],
)
@pytest.mark.parametrize("kind", [Work, GlooWork])
def test_a_peer_that_is_gone_is_a_lost_group_in_the_transport_s_words(kind: type[Work], words: str) -> None:
    lost = Lost()
    work = kind(Failing(RuntimeError(words)), torch.zeros(1), Traffic(), lost)
    for _ in range(2):
        with pytest.raises(GroupLostError) as raised:
            work.wait()
        own, _, where = str(raised.value).partition("; this rank waited in ")
        assert own == words.partition("] ")[2]
        assert ("number 1: a peer that still runs" in where) == ("Timed out" in words), (
            "it may be in another collective"
        )
    assert work.is_completed()
    assert lost.is_lost
    assert lost.error is None, "another group may still complete what the peer had sent"


@pytest.mark.parametrize(
    "error",
    [
        RankError("verify: chunk 3 of rank 1 arrived with another checksum than it was sent"),
        RankError("rank 0 sent 12 bytes where 16 were expected: the ranks started different collectives"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("not finite"),
    ],
)
@pytest.mark.parametrize("kind", [Work, GlooWork])
def test_other_errors_stay_what_they_are(kind: type[Work], error: Exception) -> None:
    lost = Lost()
    with pytest.raises(type(error)) as raised:
        kind(Failing(error), torch.zeros(1), Traffic(), lost).wait()
    assert raised.value is error
    assert not lost.is_lost


def test_an_abort_ends_a_wait_over_gloo_and_comes_before_what_was_closed_with_it() -> None:
    lost = Lost()
    work = GlooWork(Failing(None), torch.zeros(1), Traffic(), lost)
    assert not work.wait_for(0.001)
    threading.Timer(0.01, lambda: lost.abort("rank 2 is silent")).start()
    with pytest.raises(GroupLostError, match="rank 2 is silent"):
        work.wait()
    lost.close()
    lost.abort("later")
    with pytest.raises(GroupLostError, match="rank 2 is silent"):
        lost.check()


def test_a_lost_peer_is_told_without_the_transport_s_own_places_and_advice() -> None:
    said = (
        "[/src/gloo/transport/tcp/pair.cc:537] Read error [192.0.2.3]:54956: Connection timed out. This is typically "
    )
    lost = as_lost(RuntimeError(said + "caused by a remote worker hanging or bugs in the application. Check the logs."))
    assert isinstance(lost, GroupLostError)
    assert str(lost) == "Read error [192.0.2.3]:54956: Connection timed out"
