import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import uneven
from uneven.errors import InputError
from uneven.policy.axis import Axis, Part
from uneven.policy.events import Events
from uneven.policy.ledger import Ledger
from uneven.policy.stream_axis import StreamAxis
from uneven.step.finite import Cause, Fault
from uneven.timeline.record import Recorder
from uneven.train.state import RunState

AXIS = Axis(samples=20, slot_size=4, epochs=3)


def make_state(axis: Axis = AXIS) -> RunState:
    state = RunState(Recorder(0))
    state.follow(axis, Events(axis))
    return state


def train(state: RunState, steps: int, *, bad: tuple[int, ...] = ()) -> None:
    for _ in range(steps):
        slot = state.axis.slot(state.trained)
        fault = Fault(0, Cause.LOSS_NAN) if slot.index in bad else None
        found = state.commit(
            Part(slot, slot.first, slot.samples, slot.samples), lambda fault=fault: fault, slot.index + 1
        )
        state.dropped.count(sum(part.samples for part, _ in found))


def test_after_the_gaps_the_end_of_a_stream_is_asked_for() -> None:
    """The slots that are left were counted up to a total that nobody knows yet."""
    axis = StreamAxis(4, 1)
    axis.connect(lambda epoch, first, count: 18 if first + count >= 18 else 0)
    state = make_state(axis)
    state.ledger = Ledger(2, 3, ((1, 2),))
    state.reach_slot(2)
    assert [(slot.index, slot.samples) for slot in state.slots_left()] == [(1, 4), (3, 4), (4, 2)]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_a_step_is_logged_with_its_position_and_a_bad_one_is_dropped() -> None:
    state = make_state()
    train(state, 3, bad=(1,))
    assert list(state.log) == [(0, 0, 4), (1, 4, 4), (2, 8, 4)]
    assert state.trained == 3
    assert state.samples == 8
    assert state.dropped.parts == [(1, 4, 4)]


def test_a_rest_that_is_left_out_counts_as_no_samples_and_no_steps() -> None:
    state = make_state()
    train(state, 2)
    state.skip_epoch(0)
    assert (state.trained, state.skipped, state.skipped_slots) == (5, [(0, 12)], 3)
    assert state.samples_before(5) == 8
    train(state, 1)
    assert state.samples_before(state.trained) == 12


def test_in_a_local_policy_the_samples_that_all_ranks_trained_say_what_is_left() -> None:
    state = make_state()
    train(state, 1)
    state.skip_epoch(0, trained_samples=12)
    assert (state.trained, state.skipped, state.skipped_slots) == (5, [(0, 8)], 2)


def test_who_takes_what_is_shared_stands_where_the_source_does_with_its_own_log() -> None:
    source, behind = make_state(), make_state()
    train(source, 4, bad=(3,))
    train(behind, 2)
    source.skip_epoch(0)
    source.events.request_save(9)
    source.add_entry({"epoch": 1, "step": 5})
    source.note_save(5)
    source.begin_segment({"slot": 0})
    shared = through_json(source.shared())
    behind.take(shared)
    behind.take_past(shared, kept=None)
    behind.enter_generation(shared, {"slot": 5, "members": ["a"]}, [], [])
    source.enter_generation(shared, {"slot": 5, "members": ["a"]}, [], [])
    assert behind.shared() == source.shared()
    assert list(behind.log) == [(0, 0, 4), (1, 4, 4)]
    assert behind.history == [{"epoch": 1, "step": 5, "dropped": 4}]


def test_a_checkpoint_goes_on_with_what_this_rank_had_and_a_new_rank_with_nothing_of_its_own() -> None:
    state = make_state()
    train(state, 7, bad=(6,))
    state.add_entry({"epoch": 1, "step": 5})
    ledger = Ledger.prefix(7)
    record, own = through_json({**state.checkpoint(ledger), "train_seconds": 1.5}), through_json(state.own())
    same, new = make_state(), make_state()
    same.resume(record, own, [])
    new.resume(record, None, [own])
    assert same.own() == state.own()
    assert same.trained == new.trained == 7
    assert list(new.log) == []
    assert new.earlier_logs == [own]
    assert same.history == new.history == [{"epoch": 1, "step": 5, "dropped": 4}]
    assert same.train_seconds == 1.5


def test_going_back_forgets_what_came_after_but_not_the_time() -> None:
    state = make_state()
    train(state, 5)
    record, own = through_json({**state.checkpoint(Ledger.prefix(5)), "train_seconds": 1.0}), through_json(state.own())
    train(state, 4)
    state.add_entry({"epoch": 2, "step": 9})
    state.events.request_save(11)
    state.train_seconds = 3.0
    state.go_back(record, own, [own])
    assert (state.trained, state.history, list(state.log)) == (5, [], [])
    assert state.earlier_logs == [own]
    assert not state.events.extra_saves
    assert state.train_seconds == 3.0


def test_a_smaller_max_steps_had_ended_the_run_inside_an_epoch_that_goes_on_now() -> None:
    state = make_state()
    train(state, 7)
    state.add_entry({"epoch": 2, "step": 7})
    resumed = make_state()
    resumed.resume({**state.checkpoint(Ledger.prefix(7)), "train_seconds": 0.0}, None, [])
    assert resumed.history[-1]["is_inside_epoch"]


def test_an_event_that_was_not_reached_by_all_is_forgotten_with_its_dropped_samples() -> None:
    state = make_state()
    train(state, 2, bad=(1,))
    mark = state.mark()
    state.add_entry({"step": 2})
    state.note_save(2)
    state.forget_after(mark)
    assert (state.history, state.saves) == ([], [])
    state.add_entry({"step": 2})
    assert state.history == [{"step": 2, "dropped": 4}]


def test_the_log_of_a_member_that_is_lost_after_a_resume_is_an_earlier_one() -> None:
    state = make_state()
    state.know_resumed({"a": {"log": [1]}, "b": {"log": [2]}})
    state.enter_generation(through_json(state.shared()), {"members": ["a", "new"]}, [{"member": "b"}], [])
    assert state.resumed_logs == {"a": {"log": [1]}}
    assert state.earlier_logs == [{"log": [2]}]
    state.end_generations()
    assert (state.earlier_logs, state.lost_logs) == ([{"log": [2]}, {"member": "b"}], [])


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_registered_values_go_on_in_place_once() -> None:
    state, counter, numbers, tensor = make_state(), Counter(), [1], torch.zeros(2)
    saved = {"counter": {"count": 7}, "numbers": [1, 2], "tensor": torch.ones(2), "plain": 3}
    assert state.register("counter", counter, lambda: saved) is counter
    assert state.register("numbers", numbers, lambda: saved) is numbers
    assert state.register("tensor", tensor, lambda: saved) is tensor
    assert state.register("plain", 0, lambda: saved) == 3
    assert state.register("plain", 9, lambda: saved) == 9
    assert (counter.count, numbers, tensor.tolist()) == (7, [1, 2], [1.0, 1.0])
    assert state.user_values()["counter"] == {"count": 7}
    with pytest.raises(InputError, match="must be text"):
        state.register("", 1, dict)


def test_only_its_own_module_writes_the_state() -> None:
    """Who assigned to it from elsewhere made six copies of what a checkpoint, a survivor and a newcomer need."""
    names = set(vars(make_state())) - {"_recorder"}
    root, found = Path(uneven.__file__).parent, []
    for path in root.rglob("*.py"):
        if path == root / "train/state.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (one for outer in targets for one in getattr(outer, "elts", [outer])):
                owner = ast.unparse(target.value) if isinstance(target, ast.Attribute) else ""
                if owner.rpartition(".")[2] == "state" and target.attr in names:  # type: ignore[union-attr]
                    found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not found
