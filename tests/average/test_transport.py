"""The transports of a CUDA rank's average: nothing is read before it is copied, nothing merged before it is back.

See [Note: snapshot synchronisation] in uneven/average/transport.py.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from uneven.average.background import BackgroundAverage
from uneven.average.buffers import BufferAverage
from uneven.average.replica import Replica
from uneven.average.transport import HostTransport, Transport, make_transport
from uneven.comm.group import SoloGroup
from uneven.errors import RankError

pytestmark = pytest.mark.cuda

LONG = 200_000_000  # cycles of the device: about a tenth of a second


class Rank:
    """One rank alone on the GPU, so that its average is its snapshot, and a stale or torn one shows at once."""

    def __init__(self, is_nccl: bool = False, verify: bool = False, with_buffers: bool = True) -> None:
        layers = [nn.Linear(500, 500), *([nn.BatchNorm1d(500)] if with_buffers else [])]
        self.model = nn.Sequential(*layers).cuda()
        replica = Replica(self.model, SGD(self.model.parameters(), lr=0.1))
        self.transport: Transport = make_transport(replica, is_nccl)
        self.average = BackgroundAverage(replica, self.transport, BufferAverage(self.model), SoloGroup(), verify)

    @property
    def params(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    @torch.no_grad()
    def work(self, number: float) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.fill_(number)

    def close(self) -> None:
        self.average.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Without buffers: their own way to the device waits for the same stream, and would hide what is tested."""
    with closing(Rank(with_buffers=False)) as one:
        yield one


def test_a_snapshot_is_read_only_when_it_has_landed(rank: Rank) -> None:
    """Fails when the wait in HostTransport.wait_for_snapshot is taken out: the host then sums what was there before."""
    assert isinstance(rank.transport, HostTransport)
    for number in (1.0, 2.0, 3.0):
        rank.work(number)
        with torch.cuda.stream(rank.transport.copy_stream):
            torch.cuda._sleep(LONG)
        rank.average.start(1.0, list)
        rank.work(-number)  # what training does meanwhile has no part in the snapshot
        rank.average.finish(is_unchanged=True)
        assert rank.params.eq(number).all()


def test_an_average_is_merged_only_when_it_is_loaded(rank: Rank) -> None:
    """Fails when the wait in HostTransport.copy_to_device is taken out."""
    assert isinstance(rank.transport, HostTransport)
    copy_to_device, copy_stream = rank.transport.copy_to_device, rank.transport.copy_stream

    def slow_copy() -> None:
        with torch.cuda.stream(copy_stream):
            torch.cuda._sleep(LONG)
        copy_to_device()

    rank.transport.copy_to_device = slow_copy  # type: ignore[method-assign]
    for number in (1.0, 2.0, 3.0):
        rank.work(number)
        rank.average.start(1.0, list)
        rank.average.finish(is_unchanged=True)
        assert rank.params.eq(number).all()


@pytest.mark.parametrize("is_nccl", [False, True])
def test_training_is_not_waited_for_and_its_work_is_kept(is_nccl: bool) -> None:
    with closing(Rank(is_nccl)) as rank:
        rank.work(1.0)
        torch.cuda._sleep(LONG)  # the device is busy with steps that were enqueued before
        rank.average.start(1.0, list)
        assert not rank.average.is_done(), "the snapshot is still in the queue"
        rank.work(5.0)
        rank.average.finish(is_unchanged=False)
        assert rank.params.eq(5.0).all(), "5 + average - snapshot"
        assert rank.model[1].running_mean.eq(1.0).all(), "buffers are overwritten"


def test_verify_names_a_snapshot_that_had_not_landed() -> None:
    with closing(Rank(verify=True, with_buffers=False)) as rank:
        assert isinstance(rank.transport, HostTransport)
        rank.work(1.0)
        rank.average.start(1.0, list)
        rank.average.finish(is_unchanged=True)
        rank.transport.wait_for_snapshot = lambda: None  # type: ignore[method-assign]
        with torch.cuda.stream(rank.transport.copy_stream):
            torch.cuda._sleep(LONG)
        rank.work(2.0)
        rank.average.start(1.0, list)
        with pytest.raises(RankError, match="snapshot changed between its taking and its sending"):
            rank.average.finish(is_unchanged=True)


@pytest.mark.parametrize("which", ["device_average", "delta"])
def test_verify_names_an_average_that_did_not_arrive(which: str) -> None:
    with closing(Rank(verify=True)) as rank:
        rank.work(1.0)
        rank.average.start(1.0, list)
        rank.average.wait()
        getattr(rank.transport, which).buffer[3] += 1.0
        with pytest.raises(RankError, match="average changed between its arrival and its merge"):
            rank.average.finish(is_unchanged=True)
