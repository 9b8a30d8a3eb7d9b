"""Fixtures of the tests in which ranks are lost, leave and join."""

import pytest

from tests.train.elastic.lossy_runs import train
from uneven.results.state import TrainedState


@pytest.fixture(scope="module")
def alone() -> TrainedState:
    ((state, _),) = train(1, [], policy="sync")[0].values()
    return state
