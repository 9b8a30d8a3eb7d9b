"""The thread of a background average: its phases, its errors, its end."""

import time
from contextlib import closing

import pytest
import torch
from torch import Tensor

from tests.average.phases import gated
from tests.average.sides import Side
from uneven.comm.group import SoloGroup
from uneven.comm.work import Work


def test_a_round_goes_through_its_phases_while_the_caller_trains() -> None:
    with gated() as (side, group):
        average, (head, params, _) = side.average, group.gates
        assert average.phase == "idle"
        assert not average.is_done()
        average.start(1.0, list)
        assert average.phase == "collecting"
        assert head.reached.wait(100)
        assert (average.phase, average.is_done()) == ("collecting", False)
        all_came_ns = time.perf_counter_ns()
        head.opened.set()
        assert params.reached.wait(100)
        assert (average.phase, average.is_done()) == ("computing", False)
        sent_ns = time.perf_counter_ns()
        params.opened.set()
        average.wait()
        assert (average.phase, average.is_done()) == ("idle", True)
        arrived = average.finish(is_unchanged=True)
        assert not average.is_done(), "there is no round any more"
        assert arrived.snapshot_ns < all_came_ns < arrived.joined_ns < sent_ns < arrived.done_ns


def test_a_snapshot_is_taken_at_once_and_not_when_it_is_sent() -> None:
    with gated() as (side, group):
        before = side.params
        side.average.start(1.0, list)
        assert group.gates[0].reached.wait(100)
        side.work(5.0)
        group.open()
        side.average.finish(is_unchanged=True)
        assert torch.equal(side.params, before)


def test_one_round_at_a_time() -> None:
    with gated() as (side, group):
        with pytest.raises(AssertionError, match="started first"):
            side.average.finish(is_unchanged=True)
        side.average.start(1.0, list)
        with pytest.raises(AssertionError, match="one round in flight"):
            side.average.start(1.0, list)
        group.open()
        side.average.finish(is_unchanged=True)


@pytest.mark.parametrize("sums", [0, 1])
def test_an_error_on_the_way_is_raised_by_finish(sums: int) -> None:
    class Lost(SoloGroup):
        """The other rank is gone, before or after it has entered the round."""

        left = sums

        def all_reduce(self, tensor: Tensor) -> Work:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("Connection closed by peer")
            return super().all_reduce(tensor)

    with closing(Side(Lost())) as side:
        before = side.params
        side.average.start(1.0, list)
        side.average.wait()
        assert side.average.is_done(), "a pace that asks must not wait for ever"
        with pytest.raises(RuntimeError, match="closed by peer"):
            side.average.finish(is_unchanged=False)
        assert torch.equal(side.params, before)
        assert side.average.phase == "idle"


def test_close_ends_the_thread_and_may_be_called_again() -> None:
    side = Side(SoloGroup())
    thread = side.average._thread
    side.round(1.0)
    assert thread.is_alive()
    side.close()
    assert not thread.is_alive()
    side.close()


def test_close_does_not_wait_for_a_round_that_may_never_come_back() -> None:
    with gated() as (side, group):
        side.average.start(1.0, list)
        assert group.gates[0].reached.wait(100)
        side.close()
        thread = side.average._thread
        assert thread.is_alive()
        group.open()
        thread.join(30)
        assert not thread.is_alive()


# verify
