"""The group through shared memory on two processes, beside what test_group.py holds for every transport.

The last test of the pair takes the life of rank 1. What is summed, and how, is in test_exchange.py.
"""

import io
import os
import signal
import zlib
from collections.abc import Iterator
from contextlib import closing, redirect_stderr
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.comm.pair import Pair, pair_over
from tests.ranks import on_processes
from uneven.average.background import BackgroundAverage
from uneven.average.buffers import BufferAverage
from uneven.average.replica import Replica
from uneven.average.transport import make_transport
from uneven.comm import segment
from uneven.comm.group import Group
from uneven.comm.shared_memory import SharedMemoryGroup
from uneven.comm.torch_group import TorchGroup


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with pair_over("shm") as pair:
        assert isinstance(pair.group, SharedMemoryGroup)
        yield pair


def test_ranks_that_wait_in_different_groups_answer_each_other(pair: Pair) -> None:
    """Both tensors are larger than a ring: what is left of one is sent while the other is waited for."""
    big = 3_000_000
    one, two = torch.ones(big), torch.ones(big)
    works = [pair.group.all_reduce(one), pair.twin.all_reduce(two)]
    pair.ask(
        f"[w.wait().sum().item() for w in (group.all_reduce(torch.ones({big})), twin.all_reduce(torch.ones({big})))]"
    )
    for work in reversed(works):
        work.wait()
    assert torch.equal(one + two, torch.full((big,), 4.0))
    assert pair.answer() == f"[{2.0 * big}, {2.0 * big}]"


def test_a_stopped_rank_is_waited_for(pair: Pair) -> None:
    os.kill(pair.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pair.process.pid, os.WSTOPPED)
    pair.ask("group.all_reduce(torch.tensor([1])).wait().tolist()")
    work = pair.group.all_reduce(torch.tensor([2]))
    assert not work.is_completed()
    os.kill(pair.process.pid, signal.SIGCONT)
    assert work.wait().tolist() == [3]
    assert pair.answer() == "[3]"


def test_a_rank_that_is_killed_ends_a_round_and_is_named(pair: Pair) -> None:
    """What it had sent before is still summed up."""
    model = nn.Linear(3, 2)
    replica = Replica(model, SGD(model.parameters(), lr=0.1))
    with closing(
        BackgroundAverage(replica, make_transport(replica, is_nccl=False), BufferAverage(model), pair.twin)
    ) as average:
        before = model.weight.detach().clone()
        average.start(1.0, lambda: [0.0])
        pair.ask("str(group.all_reduce(torch.tensor([20.0])))[:1]")
        assert pair.answer() == "<"
        pair.ask("os.kill(os.getpid(), signal.SIGKILL)")
        average.wait()
        with pytest.raises(RuntimeError, match=r"rank 1 has left: connection closed by peer"):
            average.finish(is_unchanged=True)
        assert torch.equal(model.weight, before)
    assert not average._thread.is_alive()
    assert pair.group.all_reduce(torch.tensor([3.0])).wait().tolist() == [23.0]
    with pytest.raises(RuntimeError, match="rank 1 has left"):
        pair.group.all_reduce(torch.tensor([3.0])).wait()


def test_where_memory_cannot_be_shared_all_ranks_take_gloo_and_rank_0_says_so(
    tmp_path: Path,
) -> None:
    found = on_processes(2, "tests.comm.test_shared_memory:without_memory", tmp_path)
    assert [(backend, total) for backend, total, _ in found] == [("gloo", 3.0)] * 2
    said = [words for _, _, words in found]
    assert said == ["uneven: ranks communicate over Gloo, shared memory is not possible: not here (rank 1)\n", ""]


def without_memory(group: Group) -> tuple[str, float, str]:
    """Rank 1 cannot map what rank 0 offers."""
    assert isinstance(group, SharedMemoryGroup)
    if group.rank == 1:
        segment.Segment.__init__ = _refuse  # type: ignore[method-assign,assignment]
    with redirect_stderr(io.StringIO()) as said:
        twin = group.new_group()
    assert isinstance(twin, TorchGroup)
    with open("/proc/self/maps") as maps:
        assert maps.read().count("memfd:uneven") == 1, "the first group's alone"
    return twin.backend, twin.all_reduce(torch.tensor(1.0 + group.rank)).wait().item(), said.getvalue()


def _refuse(*_: object) -> None:
    raise OSError("not here")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_million_exchanges_with_checksums(tmp_path: Path) -> None:
    """From 4 bytes to 4 kB, with a new segment in the middle. On Arm this is where a lost order would show."""
    found = on_processes(2, "tests.comm.test_shared_memory:a_million", tmp_path, limit_s=850)
    assert found[0] == found[1]


def a_million(group: Group) -> int:
    assert isinstance(group, SharedMemoryGroup)
    group._family.verify = True
    checksum = 0
    for _ in range(2):
        verified = group.new_group()
        own, generator = torch.empty(50, 1024), torch.Generator().manual_seed(1)
        counts = torch.randint(1, 1025, (10_000, 50), generator=generator).tolist()
        for number, row in enumerate(counts):
            own.fill_(float(number + group.rank))
            parts = [part[:count] for part, count in zip(own, row, strict=True)]
            for work in [verified.all_reduce(part) for part in parts]:
                work.wait()
            assert all(part[-1] == 2 * number + 1 for part in parts)
            checksum = zlib.crc32(torch.cat(parts).numpy().tobytes(), checksum) if number % 100 == 0 else checksum
    return checksum
