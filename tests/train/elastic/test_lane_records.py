"""The lanes of ranks that were lost or have left: in the timeline of whoever is left, with their samples and why."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.clusters import Join, Loss, MemoryStore
from tests.train.elastic import lossy_local_runs as local
from tests.train.elastic import lossy_runs as exact
from uneven.launch.training import gone_lane, why_gone
from uneven.timeline.clock import Machine
from uneven.timeline.record import Recorder, account_of
from uneven.timeline.timeline import LEFT, LOST, Lane, Timeline
from uneven.train.settler import LaneRecords

pytestmark = pytest.mark.usefixtures("equal_speeds")


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """These runs last milliseconds."""
    monkeypatch.setattr("uneven.train.settler.COLLECT_NS", 0)


def timeline_of(found: dict[str, Any]) -> Timeline:
    """The same on all who are left, but for the clock."""
    timelines: list[Timeline] = [state.timeline for state, _ in found.values()]
    kinds = [[(lane.device, lane.samples, lane.ended) for lane in timeline.lanes] for timeline in timelines]
    assert all(one == kinds[0] for one in kinds)
    for state, _ in found.values():
        assert state.timeline.trained == state.samples_since_start
    return timelines[0]


def lost(policy: str, size: int = 3, **how: Any) -> tuple[dict[str, Any], Any]:
    """m1 is lost in the middle of a run, or leaves it."""
    if policy in ("sync", "balanced"):
        losses = [] if "leaves" in how else [Loss("m1", 25)]
        return exact.train(size, losses, policy=policy, **how)
    begun, _ = local.undisturbed(size, policy, 3)
    losses = [] if "leaves" in how else [Loss("m1", begun + 8)]
    return local.train(size, losses, policy=policy, is_evaluated=True, **how)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_lost_rank_keeps_its_lane(policy: str, size: int) -> None:
    """A page denied it: with one rank left there was "nobody to wait for"."""
    found, leader = lost(policy, size)
    timeline = timeline_of(found)
    assert len(timeline.lanes) == len(timeline.accounts) == size
    gone = timeline.lanes[-1]
    assert gone.rank == size - 1, "after those of the ranks at the end, as its log"
    assert gone.ended is not None
    assert (gone.ended.how, gone.ended.why) == (LOST, "m1 died")
    assert [lane.ended for lane in timeline.lanes[:-1]] == [None] * (size - 1)
    state, _ = next(iter(found.values()))
    assert gone.samples == state.rank_samples[gone.rank]
    assert gone.end_ns <= timeline.lanes[0].end_ns
    account = timeline.accounts[-1]
    assert account.rank == gone.rank
    assert account.seconds == account_of(gone.rank, gone.spans).seconds, "idle time and all other is kept"
    assert account.seconds["compute"] > 0
    assert [event.kind for event in timeline.events if event.rank == gone.rank].count("ready") == 1
    assert len(leader.generations) == 2


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_rank_that_has_left_counts_with_all_that_it_handed_in(policy: str) -> None:
    found, leader = lost(policy, leaves={"m1": 2})
    if "m1" in found:
        pytest.skip("on a busy machine it may have fewer steps")
    timeline = timeline_of(found)
    gone = timeline.lanes[-1]
    assert gone.ended is not None
    assert (gone.ended.how, gone.samples, gone.redone) == (LEFT, leader.left["m1"], 0)


def test_who_joins_and_is_lost_again_has_a_lane() -> None:
    found, leader = exact.train(2, [Loss("new", 45, 1)], joins=[Join("new", 25)])
    timeline = timeline_of(found)
    assert "new" not in found
    assert len(leader.generations) == 3
    assert [lane.ended is None for lane in timeline.lanes] == [True, True, False]


def fake_engine(recorder: Recorder, **changes: Any) -> Any:
    info = SimpleNamespace(member="b", rank=1, device="cpu", machine=Machine(0, "localhost"))
    config = SimpleNamespace(is_local=False)
    device = torch.device("cpu")
    state = SimpleNamespace(samples=0, log=[])
    known = {"recorder": recorder, "rank_info": info, "config": config, "device": device, "state": state}
    return SimpleNamespace(**known | changes)


def test_a_long_run_is_written_in_few_bytes_and_no_time_of_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now = [0]
    recorder = Recorder(1, clock=lambda: now[0])
    store = MemoryStore()
    records = LaneRecords(store, fake_engine(recorder))  # type: ignore[arg-type]
    for _ in range(40_000):  # four hours
        for state, ns in (("data", 60_000_000), ("compute", 300_000_000)):
            recorder.enter(state)  # type: ignore[arg-type]
            now[0] += ns
        records.tell()
    records.leave()
    (found,) = records.read(["b", "never began"])
    assert found["has_left"]
    (lane,) = Timeline.from_json(found["timeline"]).lanes
    assert all(before[2] == after[1] for before, after in zip(lane.spans, lane.spans[1:], strict=False))
    assert (lane.spans[0][1], lane.end_ns) == (0, now[0] - 300_000_000), "but for the state that it is in"
    seconds = account_of(1, lane.spans).seconds
    assert (seconds["data"], seconds["compute"]) == pytest.approx((2400.0, 11_999.7))
    assert len(store.values) < 4_000
    assert sum(map(len, store.values.values())) < 4e6


def test_a_cuda_device_is_shown_as_far_as_its_steps_are_known() -> None:
    now = [0]
    recorder = Recorder(1, clock=lambda: now[0])
    busy: list[tuple[int, int]] = []
    engine = fake_engine(recorder, device=torch.device("cuda"), run_ahead=SimpleNamespace(busy=busy))
    records = LaneRecords(MemoryStore(), engine)  # type: ignore[arg-type]
    for step in range(50):
        recorder.enter("compute")
        now[0] += 2
        recorder.enter("data")
        now[0] += 8
        if step:
            busy.append((10 * step - 9, 10 * step - 1))  # known one step late
        records.tell()
    records.leave()
    (found,) = records.read(["b"])
    (lane,) = Timeline.from_json(found["timeline"]).lanes
    totals = account_of(1, lane.spans).seconds
    assert totals["compute"] == pytest.approx(49 * 8e-9, abs=2e-9), "of every step that was finished"
    assert all(before[2] == after[1] for before, after in zip(lane.spans, lane.spans[1:], strict=False))


def test_a_lane_goes_to_its_machine_whose_number_may_have_changed() -> None:
    def of(host: str, number: int) -> Timeline:
        lane = Lane(0, "cpu", [("compute", 0, 5)], number)
        return Timeline([lane], [account_of(0, lane.spans)], [], [], (Machine(number, host),))

    present = [of("anna", 0), of("carl", 1)]
    for host, number, expected in (("anna", 0, 0), ("bert", 1, 2), ("carl", 2, 1)):
        written = {"timeline": of(host, number).to_json(), "trained": 9, "restored": 2, "has_left": False}
        timeline = gone_lane(written, 4, 8, "why", present)
        (lane,) = timeline.lanes
        assert (lane.rank, lane.machine, lane.samples, lane.redone) == (4, expected, 6, 3)
        assert timeline.machines == (Machine(expected, host),)
        Timeline.merge([*present, timeline]).to_json()


def test_why_a_member_is_gone_is_what_the_run_said_then() -> None:
    segments: list[dict[str, Any]] = [
        {"members": ["a", "b"]},
        {"members": ["a"], "why": "b was killed"},
        {"members": ["a", "c"], "why": "c joins"},
        {"members": ["a"], "why": "c leaves"},
    ]
    assert [why_gone(segments, member) for member in ("b", "c", "a")] == ["b was killed", "c leaves", ""]
