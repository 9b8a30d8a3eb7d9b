"""Collectives in flight and waits for them, of our groups and of torch's own code."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from uneven.comm.observed import BackwardTail, Observed, observe_collectives
from uneven.comm.torch_group import TorchGroup
from uneven.parallel.reference import TorchReplicated


def test_what_is_waited_for_is_exposed_and_the_rest_of_the_flight_is_hidden() -> None:
    observed = Observed(
        flights=[(6.0, 8.0), (0.0, 2.0), (1.0, 4.0)],  # two of them overlap: from 0 to 4, and from 6 to 8
        waits=[(3.0, 3.5), (3.25, 5.0), (9.0, 9.5)],  # 1 of them in flight; the last one waits for nothing
    )
    assert (observed.in_flight_s, observed.exposed_s, observed.hidden_s) == (6.0, 1.0, 5.0)
    assert Observed().hidden_s == 0.0


@pytest.fixture
def group() -> Iterator[TorchGroup]:
    """One rank over Gloo: torch's own code for collectives, without a second process."""
    group = TorchGroup(dist.HashStore(), 0, 1)
    yield group
    group.close()


def test_our_collectives_and_waits_are_seen_only_inside(group: TorchGroup) -> None:
    with observe_collectives() as observed:
        work = group.all_reduce(torch.ones(1000))
        group.broadcast(torch.ones(10)).wait()
        work.wait()
    assert len(observed.waits) == 2
    deadline = time.monotonic() + 10
    while len(observed.flights) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # torch calls back from a thread of its own
    assert len(observed.flights) == 2
    assert all(start <= end for start, end in (*observed.flights, *observed.waits))
    assert observed.in_flight_s == pytest.approx(observed.hidden_s + observed.exposed_s)
    group.all_reduce(torch.ones(10)).wait()
    assert len(observed.waits) == 2, "torch's methods are put back, and still work"


def test_ddp_waits_inside_backward_and_its_sums_are_seen(group: TorchGroup) -> None:
    strategy = TorchReplicated(nn.Linear(4, 2), lambda params: torch.optim.SGD(params, lr=0.1), group)
    with observe_collectives() as observed:
        BackwardTail(observed)(strategy.module(torch.ones(3, 4)).sum())
    assert observed.waits[-1][0] > 0.0, "backward's end was marked"
    assert observed.flights, "DDP's hook sums through Python"
    start, end = observed.waits[-1]
    assert observed.flights[0][0] < end, "the sum began before backward returned"
    assert start < end
