"""A stop whose checkpoint a lost rank interrupts: those who are left go on and stop again; one stop is recorded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.clusters import DiedError
from tests.train.elastic import lossy_runs as test_settle
from tests.train.elastic.lossy_local_runs import train
from uneven.errors import GroupLostError
from uneven.train.run_events import RunEvents
from uneven.train.synchronizer import Asked, Inbox
from uneven.train.worker import Worker

pytestmark = pytest.mark.usefixtures("equal_speeds")


def lose_in(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, info_of: Callable[[Any], Any]) -> None:
    """m2 dies where it calls this method, and the others lose the group when they have returned from it."""
    method = getattr(kind, name)

    def losing(self: Any, *arguments: Any) -> Any:
        info = info_of(self)
        if info.member == "m2":
            raise DiedError
        found = method(self, *arguments)
        if info.generation == 0:
            raise GroupLostError("connection closed by peer")
        return found

    monkeypatch.setattr(kind, name, losing)


@pytest.mark.parametrize("where", ["while it is saved", "after it was saved"])
@pytest.mark.parametrize("policy", ["cadence", "sync"])
def test_a_stop_that_was_interrupted_is_no_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str, where: str
) -> None:
    monkeypatch.setattr(Inbox, "read", lambda self: Asked(len(self._callbacks._engine.state.log) > 3, self._wish()))
    if where == "while it is saved":
        lose_in(monkeypatch, RunEvents, "_save", lambda events: events._engine.rank_info)
    else:
        lose_in(monkeypatch, Worker, "end_callbacks", lambda worker: worker.rank_info)
    start = train if policy == "cadence" else test_settle.train
    found, leader = start(3, [], policy=policy, out=tmp_path, epochs=9)
    assert set(found) == {"m0", "m1"}
    assert len(leader.generations) == 2
    for state, worker in found.values():
        assert not state.finished
        assert len(state.stop_rounds) + len(state.saves) == 1, (state.stop_rounds, state.saves)
        assert bool(state.stop_rounds) == (policy == "cadence")
        assert (tmp_path / f"step-{worker.engine.state.trained}" / "state.json").exists()
