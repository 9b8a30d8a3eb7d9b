"""precision='fp16' when ranks are lost or join: all scale their losses alike, or gradients of different sizes add up.

On threads; the model is in double precision, which autocast leaves alone, so only the scaler makes a difference.
"""

from typing import Any

import pytest
import torch

from tests.train.clusters import Join, Loss
from tests.train.elastic.lossy_runs import SHARES, check, train
from uneven.results.state import TrainedState
from uneven.step.precision import Precision

STEPS = 6


@pytest.fixture(autouse=True)
def growing_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale grows with every second step: a rank that has counted one less is soon at another scale."""
    begin = Precision.__init__

    def grows(precision: Precision, name: str, device: torch.device) -> None:
        begin(precision, name, device)
        precision.scaler.set_growth_interval(2)

    monkeypatch.setattr(Precision, "__init__", grows)


def scaled(size: int, losses: list[Loss], **options: Any) -> tuple[dict[str, Any], Any]:
    return train(size, losses, **{"precision": "fp16", "policy": "balanced", "shares": SHARES[:size]} | options)


def check_scales(found: dict[str, Any], alone: TrainedState) -> None:
    check(found, alone)
    for _, worker in found.values():
        state = worker.engine.step.precision.scaler.state_dict()
        assert (state["scale"], state["_growth_tracker"]) == (2.0 ** (16 + STEPS // 2), 0)


def test_undisturbed_every_step_counts(alone: TrainedState) -> None:
    check_scales(scaled(3, [])[0], alone)


@pytest.mark.parametrize("blind", ["m0", "m2"])
def test_a_rank_that_takes_a_step_over_takes_the_scale_over(blind: str, alone: TrainedState) -> None:
    _, leader = scaled(3, [])
    for place in range(leader.begun, leader.begun + 12):
        found, _ = scaled(3, [Loss("m1", place, after=True, blind=frozenset({blind}))])
        assert set(found) == {"m0", "m2"}
        check_scales(found, alone)


def test_a_newcomer_begins_with_the_scale_of_the_others(alone: TrainedState) -> None:
    options: dict[str, Any] = {"policy": "sync", "shares": None}
    _, leader = scaled(2, [], **options)
    for place in range(leader.begun, leader.collectives[0] - 6, 5):
        found, _ = scaled(2, [], joins=[Join("new", place)], **options)
        assert set(found) == {"m0", "m1", "new"}
        check_scales(found, alone)
