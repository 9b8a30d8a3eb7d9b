"""Groups over Gloo, in shared memory and over machines, on two processes. The last test of each takes rank 1's life."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.comm.pair import Pair, pair_over
from uneven.average.background import BackgroundAverage
from uneven.average.buffers import BufferAverage
from uneven.average.replica import Replica
from uneven.average.transport import make_transport
from uneven.comm.group import SoloGroup
from uneven.comm.torch_group import TorchGroup
from uneven.errors import InputError


@pytest.fixture(scope="module", params=["gloo", "shm", "cpu"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_over(request.param) as pair:
        assert pair.group.backend == request.param  # type: ignore[attr-defined]
        yield pair


def test_a_default_group_of_the_scripts_own_is_named_with_what_to_do(pair: Pair) -> None:
    with pytest.raises(InputError, match=r"process group is there already.*take init_process_group\(\.\.\.\) out"):
        TorchGroup(torch.distributed.HashStore(), 0, 2)
    assert pair.group.world_size == 2  # it is the one that was there


def test_another_group_does_not_queue_behind_the_first(pair: Pair) -> None:
    first = pair.group.all_reduce(torch.tensor([1.0, 2.0]))
    second = pair.twin.all_reduce(torch.tensor([10.0]))
    pair.ask("twin.all_reduce(torch.tensor([5.0])).wait().tolist()")  # the other way round than here
    assert second.wait().tolist() == [15.0]
    assert not first.is_completed()
    pair.ask("group.all_reduce(torch.tensor([3.0, 4.0])).wait().tolist()")
    assert first.wait().tolist() == [4.0, 6.0]
    assert [pair.answer(), pair.answer()] == ["[15.0]", "[4.0, 6.0]"]


def test_another_group_has_the_same_ranks_and_its_own_traffic(pair: Pair) -> None:
    before = (pair.group.traffic.payload_bytes, pair.twin.traffic.payload_bytes)
    pair.ask(
        "twin.all_reduce_max(torch.tensor([7, 1])).wait().tolist(), twin.broadcast(torch.zeros(1)).wait().tolist()"
    )
    assert pair.twin.all_reduce_max(torch.tensor([3, 4])).wait().tolist() == [7, 4]
    pair.twin.broadcast(torch.tensor([0.5])).wait()
    assert pair.answer() == "([7, 4], [0.5])"
    assert (pair.twin.rank, pair.twin.world_size) == (0, 2)
    assert pair.group.traffic.payload_bytes == before[0]
    assert pair.twin.traffic.payload_bytes == before[1] + 2 * 8 + 4


def test_claims_of_all_ranks_come_from_one_count_and_nobody_waits(pair: Pair) -> None:
    assert pair.group.claim(3) == 0
    assert pair.group.claim(1) == 3
    pair.ask("group.claim(5)")
    assert pair.answer() == "4"
    assert pair.group.claim(2) == 9
    pair.ask("[group.claim(2) for _ in range(100)]")  # at the same time as ours
    own = [pair.group.claim(2) for _ in range(100)]
    theirs = eval(pair.answer())
    assert sorted(own + theirs) == list(range(11, 411, 2))
    assert own == sorted(own)


def test_a_claim_does_not_wait_for_another_request_to_the_store(pair: Pair) -> None:
    """Claims may come from a thread of their own, and a client of the store that waits blocks its other users."""
    waiting = threading.Thread(
        target=pair.store.wait, args=(["a key of this test"], timedelta(seconds=60)), daemon=True
    )
    waiting.start()
    first = pair.group.claim(2)
    assert waiting.is_alive()
    pair.ask("store.set('a key of this test', b'1')")
    pair.answer()
    waiting.join(60)
    assert not waiting.is_alive()
    assert pair.group.claim(1) == first + 2


def test_a_round_in_flight_ends_when_another_rank_dies(pair: Pair) -> None:
    model = nn.Linear(3, 2)
    replica = Replica(model, SGD(model.parameters(), lr=0.1))
    average = BackgroundAverage(replica, make_transport(replica, is_nccl=False), BufferAverage(model), pair.twin)
    before = model.weight.detach().clone()
    average.start(1.0, lambda: [0.0])
    assert not average.is_done()
    pair.ask("os.kill(os.getpid(), signal.SIGKILL)")
    average.wait()
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|socket"):
        average.finish(is_unchanged=True)
    assert torch.equal(model.weight, before)
    average.close()
    assert not average._thread.is_alive()


# Alone.


def test_alone_claims_count_on() -> None:
    group = SoloGroup()
    assert [group.claim(many) for many in (3, 1, 2)] == [0, 3, 4]


def test_alone_another_group_is_one_of_its_own() -> None:
    group = SoloGroup()
    group.claim(3)
    twin = group.new_group()
    assert twin.claim(1) == 0
    assert twin.traffic is not group.traffic
    assert twin.all_reduce(torch.tensor([2.0])).wait().tolist() == [2.0]
