"""The losses of a lost rank are taken over by the furthest of those who are left; with real workers: test_settle.py."""

import math
from dataclasses import replace

import torch

from uneven.step.finite import OwnCheck, losses_of
from uneven.step.loss import LossMeter
from uneven.train.settle import Settlement, Standing, settled_losses, take_losses


def meter(loss_sum: float, count: float) -> LossMeter:
    found = LossMeter(torch.device("cpu"))
    found.totals.copy_(torch.tensor([loss_sum, count], dtype=torch.float64))
    return found


def test_the_furthest_one_takes_over_what_the_lost_ones_meters_held() -> None:
    own = meter(1.5, 3.0)
    own.known = [(10.0, 1.0), (1.5, 3.0), (20.0, 2.0), (30.0, 4.0)]
    settled = settled_losses(own, ["a", "b", "c", "d"], "b", ["b", "d", "new"])
    assert settled == [(31.5, 6.0), (30.0, 4.0), (0.0, 0.0)]
    take_losses(own, settled, 0, are_taken=False)
    assert own.totals.tolist() == [31.5, 6.0]
    assert own.known == settled


def test_a_rank_that_was_alone_knows_its_own() -> None:
    assert settled_losses(meter(5.0, 2.0), ["a"], "a", ["a", "new"]) == [(5.0, 2.0), (0.0, 0.0)]


def test_losses_that_are_in_an_epochs_mean_are_gone() -> None:
    own = meter(5.0, 2.0)
    take_losses(own, [(5.0, 2.0), (1.0, 1.0)], 0, are_taken=True)
    assert own.totals.tolist() == [0.0, 0.0]
    assert own.known == [(0.0, 0.0), (0.0, 0.0)]


def test_only_an_event_with_a_mean_of_its_own_has_taken_the_losses() -> None:
    """A checkpoint inside an epoch that was interrupted took what the meters held of the epoch with it."""
    standing = Standing(0, 5, 4, ("a", "b"))

    def settlement(loss: float | None) -> Settlement:
        return Settlement((standing, replace(standing, event_loss=loss)), 0)

    assert settlement(0.5).has_taken_losses
    assert not settlement(math.nan).has_taken_losses
    assert not settlement(None).has_taken_losses


def test_an_event_that_the_furthest_one_has_finished_is_not_reached_again() -> None:
    """Its loss was that of the next epoch, too."""
    behind = Standing(0, 5, 4, ("a", "b"), event_loss=0.5)
    assert Settlement((replace(behind, event=5, event_loss=None), behind), 0).event_loss is None


def test_losses_travel_in_fp32_with_48_bits() -> None:
    found = meter(123456.789012345, 2.0**25 + 1)
    sent = found.halves().float().double().tolist()
    ((loss_sum, count),) = losses_of([OwnCheck(0.0, 0.0, 0.0, 0.0, *sent)])
    assert abs(loss_sum / 123456.789012345 - 1) < 1e-14
    assert count == 2.0**25 + 1
