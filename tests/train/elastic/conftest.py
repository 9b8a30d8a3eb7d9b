"""Fixtures of the tests in which ranks are lost, leave and join."""

import pytest

from tests.train.elastic.lossy_runs import train
from uneven.policy.finish import Cost
from uneven.results.state import TrainedState


@pytest.fixture(autouse=True)
def equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank may look so slow that there are too few rounds."""
    monkeypatch.setattr("uneven.train.worker.measure", lambda _: Cost(0.0, 1.0))


@pytest.fixture(scope="module")
def alone() -> TrainedState:
    ((state, _),) = train(1, [], policy="sync")[0].values()
    return state
