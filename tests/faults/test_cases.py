"""The storm's own parts: what it draws is a function of its seed, and its checks see what is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.faults.cases import EXACT, FAULTS, POLICIES, STRATEGIES, Case, draw_case, kinds_of
from tests.faults.checks import Outcome, _count_rows, axis_of, compare_weights, count_parts, distance, train_plainly
from tests.faults.fault import INSIDE, SILENT_S
from tests.faults.training import Training, factor, make_data, settings_of
from uneven import fit
from uneven.data.sample_order import permutation


def case(policy: str = "sync", model: str = "rows") -> Case:
    drawn = draw_case(0, 0, (policy,), ("kill",), is_small=True)
    slots, epochs = (8, 1) if model == "rows" else (5, 2)
    optimizer = "sgd" if model == "rows" else "adam"
    drawn = replace(drawn, model=model, optimizer=optimizer, slots=slots, epochs=epochs, devices=("cpu", "cpu"))
    return replace(drawn, samples=slots * drawn.slot_size - (model != "rows"), eval_every=None, save_every=None)


def test_a_case_follows_from_seed_and_number_alone() -> None:
    cases = [draw_case(3, number) for number in range(200)]
    assert cases == [draw_case(3, number) for number in range(200)]
    assert cases != [draw_case(4, number) for number in range(200)]
    assert [Case.from_json(json.loads(json.dumps(one.to_json()))) for one in cases] == cases
    assert {(one.policy, one.kind) for one in cases} == {
        (name, kind) for name in POLICIES for kind in kinds_of(name, FAULTS)
    }
    assert {len(one.devices) for one in cases} == {2, 3, 4, 5}
    assert {len(one.machines) for one in cases} == {1, 2, 3}
    assert {one.strategy for one in cases if one.redundancy} == {*STRATEGIES}
    assert {one.strategy for one in cases if one.strategy and not one.redundancy} == {*STRATEGIES}
    assert {one.joins for one in cases if one.kind == "join"} == {0, 1}
    assert {fault.how for one in cases for fault in one.faults if fault.kind == "cut"} == {
        "cable",
        "launcher",
        "flicker",
    }


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("has_machines", [False, True])
def test_somebody_is_always_left_and_nobody_wakes_when_its_silence_counts(is_small: bool, has_machines: bool) -> None:
    kinds = FAULTS if has_machines and not is_small else [kind for kind in FAULTS if kind != "cut"]
    for number in range(200):
        drawn = draw_case(5, number, POLICIES, kinds, is_small=is_small, has_machines=has_machines)
        lost = set()
        for fault in drawn.faults:
            if fault.kind == "cut":
                first = sum(drawn.machines[: fault.victim])
                lost |= {*range(first, first + drawn.machines[fault.victim])}
            elif fault.kind not in ("delay", "full", "join"):
                assert fault.victim not in lost
                lost.add(fault.victim)
        assert lost <= {*range(len(drawn.devices))}
        assert not lost >= {*range(drawn.machines[0])}, "the first machine keeps a rank"
        assert sum(drawn.machines) == len(drawn.devices)
        assert all(abs(fault.for_s - SILENT_S) >= 0.5 * SILENT_S for fault in drawn.faults if fault.kind == "wake")
        assert all(0 < fault.at < 1 for fault in drawn.faults)
        assert all(drawn.verify for fault in drawn.faults if fault.kind == "flip")
        assert drawn.silent_s == (15.0 if drawn.kind == "hold" else SILENT_S)
        if drawn.policy not in EXACT:
            assert drawn.strategy is None
        if drawn.kind in INSIDE:
            assert drawn.faults[0].kind == drawn.kind


def test_what_the_log_has_lost_or_doubled_is_counted() -> None:
    axis = axis_of(case())
    size = axis.slot_size
    whole = [[slot, slot * size, size] for slot in range(axis.total)]
    assert count_parts(axis, [whole, []]) == (0, 0)
    assert count_parts(axis, [whole[1:], []]) == (size, 0)
    assert count_parts(axis, [whole, [[2, 2 * size + 1, 3]]]) == (0, 3)
    assert count_parts(axis, [whole, [[axis.total, 0, 2]]]) == (0, 2)


def rows_of(one: Case, weight: float) -> torch.Tensor:
    """As a right run leaves them, where every slot has this weight in its average."""
    axis, order = axis_of(one), torch.as_tensor(permutation(one.seed, 0, one.samples))
    rows = torch.zeros(one.samples, dtype=torch.float64)
    for slot in range(axis.total):
        rows[order[axis.slot(slot).first : axis.slot(slot).stop]] = weight * factor(slot)
    return rows


@pytest.mark.parametrize(("policy", "weight"), [("sync", 1.0), ("async", 0.4)])
def test_params_that_count_their_samples_tell_on_a_log_that_lies(policy: str, weight: float) -> None:
    def faults(rows: torch.Tensor) -> tuple[int, int, int]:
        found = Outcome(case(policy))
        parts = [[slot, 0, case(policy).slot_size] for slot in range(case(policy).slots)]
        # One rank that is left handed in all of the slots in one round, and two lost ones as much again and half more.
        rounds = [[[0, 0, 0, 1.0], [8, len(parts), len(parts), 1.0]]]
        _count_rows(found, rows, {"ranks": [parts, parts, parts[:4]], "rounds": rounds})
        return len(found.faults), found.lost, found.doubled

    right = rows_of(case(policy), weight)
    assert faults(right) == (0, 0, 0)
    for place, factor_of_it, told in ((0, 0.0, (1, 1, 0)), (1, 2.0 / weight, (1, 0, 1))):
        wrong = right.clone()
        wrong[place] *= factor_of_it
        found = faults(wrong)
        assert found[0] == told[0]
        assert policy == "async" or found == told
    assert faults(right * 0.875)[0] == 1  # at the rate of another slot, or with another weight


def test_weights_that_are_not_those_of_the_log() -> None:
    # Two ranks: in round 1 they hand in 8 and 4 samples, in round 2 4 and 4; a third, lost after round 1, 4 of 16.
    logs = [[[0, 0, 4], [1, 4, 4], [4, 16, 4]], [[2, 8, 4], [5, 20, 4]], [[3, 12, 4]]]
    rounds = [[[0, 0, 0, 1.0], [3, 2, 2, 1.0], [6, 3, 3, 1.0]], [[0, 0, 0, 1.0], [3, 1, 1, 1.0], [6, 2, 2, 1.0]]]
    values = [0.5, 0.5, 0.25, 0.25, 0.5, 0.5]
    assert compare_weights(values, logs, rounds) is None
    assert "by the log one" in str(compare_weights([0.5, 0.25, *values[2:]], logs, rounds))
    assert "on another" in str(compare_weights([0.5, 0.5, 0.5, *values[3:]], logs, rounds))
    assert "fewer samples" in str(compare_weights([*values[:4], 1.0, 1.0], logs, rounds))
    assert "by the log 8" in str(compare_weights(values, [*logs, [[6, 24, 4]]], rounds))


@pytest.mark.parametrize("model", ["rows", "mlp", "norm"])
def test_the_plain_loop_is_what_one_process_trains(model: str, tmp_path: Path) -> None:
    one = case("sync", model)
    training, data = Training(one, tmp_path), make_data(one)
    settings = settings_of(one, tmp_path) | {"devices": "cpu", "batch_size": one.slot_size, "progress": "off"}
    settings.pop("sync_batchnorm", None)
    state = fit(
        model=training.model,
        optimizer=training.optimizer,
        step=training.step,
        scheduler=training.scheduler,
        dataset=data,
        **settings,
    )
    if model == "rows":
        assert torch.allclose(state.params["rows"], rows_of(one, 1.0), atol=1e-12)
        return
    assert distance(one, state) < 1e-12
    some = next(iter(train_plainly(one)))
    state.params[some][0] += 1e-9
    assert distance(one, state) > 1e-10
