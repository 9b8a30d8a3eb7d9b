"""Whose time is whose in a loop of the user's own: what rank 0 does by itself is not the others' communication."""

import time

import pytest
from torch.nn import functional as F

from tests.api.loops import make_loop
from tests.ranks import ThreadGroup, on_threads
from uneven.api.loop import Loop
from uneven.timeline.record import Recorder
from uneven.train.gradient_sync import StepStats, record_wait

WORK_S = 0.1  # the user's own work, as long as another rank waits for it


def spent(stats: list[StepStats], waited_ms: int) -> dict[str, float]:
    """How rank 1 divides `waited_ms` in its collective, in ms."""
    now = [0]
    recorder = Recorder(1, clock=lambda: now[0])
    recorder.enter("wait")
    now[0] = waited_ms * 1_000_000
    record_wait(recorder, 1, [one.busy_ms for one in stats], [one.user_ms for one in stats], 0, now[0])
    recorder.close()
    return {state: 1e3 * seconds for state, seconds in recorder.account().seconds.items() if seconds}


def row(busy_ms: float, user_ms: float = 0.0) -> StepStats:
    return StepStats(busy_ms, 0.0, 0.0, 0.0, user_ms)


def test_waiting_for_code_of_the_users_own_is_the_users_time() -> None:
    assert spent([row(10), row(4)], 8) == {"wait": 6, "communication": 2}
    assert spent([row(10, user_ms=50), row(4)], 58) == {"user": 50, "wait": 6, "communication": 2}
    assert spent([row(2, user_ms=50), row(4)], 50) == {"user": 48, "communication": 2}
    # Both evaluate; and the one that came last waits for nobody, though the other is slower.
    assert spent([row(10, user_ms=50), row(4, user_ms=30)], 27) == {"user": 20, "wait": 6, "communication": 1}
    assert spent([row(10), row(4, user_ms=50)], 2) == {"communication": 2}


def work_while_the_other_waits(loops: dict[int, Loop], epochs: dict[int, int]) -> None:
    """Rank 0's own work: from the moment that rank 1 waits for it in the second epoch, WORK_S more."""
    while epochs.get(1) != 1 or loops[1].worker.recorder.state not in ("wait", "communication"):
        time.sleep(0.001)
    time.sleep(WORK_S)


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("where", ["between", "pause", "finish"])
def test_what_rank_0_does_by_itself_is_no_training_time_on_any_rank(policy: str, where: str) -> None:
    loops: dict[int, Loop] = {}
    epochs: dict[int, int] = {}  # each rank's; what it waited for in the first one is over in the second

    def rank(group: ThreadGroup) -> dict[str, float]:
        # By speed, rank 0 may have no batch of the second epoch on a busy machine.
        equal = {"anchor": 2, "shares": (1, 1)} if policy == "cadence" else {}
        loop = loops[group.rank] = make_loop(group, policy=policy, global_batch_size=None, **equal)
        for epoch in range(2):
            epochs[group.rank] = epoch
            for count, (x, y) in enumerate(loop.batches(epoch)):
                if where == "pause" and (group.rank, epoch, count) == (0, 1, 0):
                    with loop.pause("evaluation"), loop.pause("a part of it"):
                        work_while_the_other_waits(loops, epochs)
                loop.step(F.cross_entropy(loop(x), y))
            if where == "between" and group.rank == epoch == 0:
                work_while_the_other_waits(loops, epochs)
        if where == "finish" and group.rank == 0:
            while loops[1].worker.group.traffic.collectives == group.traffic.collectives:
                time.sleep(0.001)
            time.sleep(WORK_S)
        timeline = loop.finish().timeline
        assert timeline is not None
        paused = [event.fields["what"] for event in timeline.events if event.kind == "pause"]
        assert paused == (["evaluation"] if where == "pause" else [])
        return timeline.accounts[group.rank].seconds

    for seconds in on_threads(2, rank):
        assert seconds["user"] > 0.1 * WORK_S  # as good as nothing if it were booked elsewhere
