"""A rank of a resumed run is lost: what it had trained before the resume still counts, once."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.clusters import Loss
from tests.train.elastic.lossy_local_runs import train
from tests.train.elastic.lossy_runs import train as train_exact

pytestmark = pytest.mark.usefixtures("equal_speeds")

SETTINGS: dict[str, Any] = {"save_every": "1 epoch", "keep_last": 1}


def test_exact_policies_have_its_log(tmp_path: Path) -> None:
    shares = (3.0, 2.0, 1.0)
    train_exact(3, [], shares=shares, epochs=1, out=tmp_path / "first", **SETTINGS)
    resumed = {"shares": shares, "resume": tmp_path / "first" / "epoch-1", "out": tmp_path / "second", **SETTINGS}
    _, leader = train_exact(3, [], **resumed)
    losses = [Loss("m1", (leader.begun + leader.collectives[0]) // 2), Loss("m0", 2, 1)]
    found, _ = train_exact(3, losses, **resumed)  # collect() counts every sample
    ((state, _),) = found.values()
    assert state.finished
    assert state.samples == 140
    assert sum(samples for log in state.log for _, _, samples in log) == 140


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_local_policies_have_its_log(policy: str, tmp_path: Path) -> None:
    train(3, [], policy=policy, epochs=1, out=tmp_path / "first", **SETTINGS)
    resumed = {"policy": policy, "resume": tmp_path / "first" / "epoch-1", "out": tmp_path / "second", **SETTINGS}
    _, leader = train(3, [], **resumed)
    found, _ = train(3, [Loss("m1", (leader.begun + leader.collectives[0]) // 2)], **resumed)
    for state, _ in found.values():
        assert state.finished
        assert sum(samples for log in state.log for _, _, samples in log) == 210
