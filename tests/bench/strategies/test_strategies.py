"""The benchmark of strategies: the memory formula, measured memory and traffic, and rows in real processes."""

import json
import math
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import ThreadGroup, on_threads
from uneven.bench.models.gpt import SIZES, Gpt
from uneven.bench.orders import StrategiesOrder
from uneven.bench.strategies import measure as module
from uneven.bench.strategies.measure import Paired, StrategyRow, measure_strategies, run_ranks
from uneven.bench.strategies.memory import (
    Held,
    LiveBytes,
    count_params,
    measure,
    predict,
    predict_muon,
    replicated_bytes,
)
from uneven.bench.strategies.rank import alternate, sent_bytes
from uneven.bench.strategies.task import Batches, StrategyTask, make_model, make_trained, step
from uneven.config import STRATEGIES
from uneven.errors import InputError, RankError

CPU = torch.device("cpu")
TINY = Gpt(SIZES["gpt-tiny"])
P = count_params(TINY)
SHARES = (15.0, 6.0)


def task(**changes: Any) -> StrategyTask:
    plain = StrategyTask(
        row="ddp-bucketed",
        model="gpt-tiny",
        ranks=2,
        shares=None,
        steps=3,
        device="cpu",
        cores=[[], []],
        threads=[1, 1],
        home="",
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("strategy", "elements_per_param"),
    [
        ("dense", (1, 1, 2)),
        ("ddp-flat", (1, 1, 2)),
        ("torch-ddp", (1, 1, 2)),
        ("zero1", (1, 1, 2 * 6 / 21)),
        ("zero2", (1, 6 / 21, 2 * 6 / 21)),
        ("fsdp", (6 / 21, 6 / 21, 2 * 6 / 21)),
    ],
)
def test_the_formula_of_the_small_rank(strategy: str, elements_per_param: tuple[float, ...]) -> None:
    held = predict(strategy, TINY, SHARES, 1)
    assert (held.params, held.gradients, held.state) == tuple(round(4 * P * n) for n in elements_per_param)
    assert predict(strategy, TINY, SHARES, 0).total + held.total == pytest.approx(
        16 * P + replicated_bytes(strategy, TINY), abs=4
    ), "what is sharded exists once, the rest on both ranks"


def test_frozen_params_have_neither_gradients_nor_state() -> None:
    model = Gpt(SIZES["gpt-tiny"])
    model.requires_grad_(False).head.requires_grad_(True)
    trained = count_params(model.head)
    for strategy, held in (("dense", 1.0), ("zero1", 1.0), ("fsdp", 6 / 21)):
        found, state = predict(strategy, model, SHARES, 1), 1.0 if strategy == "dense" else 6 / 21
        gradients = state if strategy == "fsdp" else 1.0
        assert found == Held(round(4 * P * held), round(4 * trained * gradients), round(8 * trained * state))
        assert replicated_bytes(strategy, model) == {"dense": 4 * P + 12 * trained, "zero1": 4 * (P + trained)}.get(
            strategy, 0
        )


def test_tensor_parallelism_shards_by_whole_heads() -> None:
    large, small = (predict("tensor", TINY, SHARES, rank) for rank in (0, 1))
    width, heads = 32, 4
    whole = 8 * width + 2 * (4 * width + 2 * width) + 2 * width  # positions; per block norms and row biases; last norm
    assert replicated_bytes("tensor", TINY) == 16 * whole
    assert large.total + small.total == 16 * (P + whole)
    q_of_small = width * width // heads  # one head of four: 6 / 21 of four is nearest to one
    assert small.params < 4 * (whole + (P - whole) * 6 / 21 + q_of_small)
    assert predict("torch-tensor", TINY, (1, 1), 0) == predict("sequence", TINY, (1, 1), 1)


def test_muon_has_one_element_of_state_per_element_of_its_matrices() -> None:
    predicted = [predict_muon([100, 60, 40], 30, (1, 1), (1, 1), rank) for rank in (0, 1)]
    assert [held.state for held in predicted] == [4 * (100 + 30), 4 * (100 + 30)]
    assert [held.gradients for held in predicted] == [4 * 130] * 2


@pytest.mark.parametrize(
    ("strategy", "shares", "redundancy"),
    [*((name, SHARES, 0) for name in STRATEGIES), *((name, (3, 3, 2), 1) for name in ("zero1", "zero2", "fsdp"))],
)
def test_every_strategy_holds_what_the_formula_predicts(
    strategy: str, shares: tuple[float, ...], redundancy: int
) -> None:
    """By category, with unequal shares; only step counts and flags come on top."""

    def rank(group: ThreadGroup) -> Held:
        trained = make_trained(strategy, make_model(strategy, "gpt-tiny"), group, shares, redundancy)
        for number in range(2):
            step(trained, Batches(strategy, "gpt-tiny", group, CPU), number)
        return measure(trained, trained.module, trained.optimizer, CPU)

    few = 16 * len(list(TINY.parameters())) + 64
    for place, held in enumerate(on_threads(len(shares), rank)):
        expected = predict(strategy, TINY, shares, place, redundancy)
        assert held.params == pytest.approx(expected.params, abs=few)
        assert held.gradients == pytest.approx(expected.gradients, abs=few)
        assert held.state == pytest.approx(expected.state, abs=few)


def test_live_bytes_follow_storages_that_are_allocated_freed_and_resized() -> None:
    buffer = torch.zeros(1000)
    buffer.untyped_storage().resize_(0)
    start = LiveBytes().peak
    with LiveBytes() as live:
        first = torch.zeros(500)
        del first
        second = torch.zeros(600)
        assert live.peak - start == 4 * 600
        buffer.untyped_storage().resize_(4000)
        buffer.zero_()
        assert live.peak - start == 4 * 1600
        buffer.untyped_storage().resize_(0)
        second.add_(1.0)
        third = second.view(20, 30) + 1.0
    assert live.peak - start == 4 * 1600, "a freed buffer does not count together with later tensors"
    assert third.shape == (20, 30)


def test_sent_bytes_counts_what_this_process_sent() -> None:
    before = sent_bytes()
    if before is None:
        pytest.skip("this kernel does not count the bytes of a connection")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        near.sendall(b"x" * 5000)
        assert len(far.recv(5000, socket.MSG_WAITALL)) == 5000
        now = sent_bytes()
    assert now is not None
    assert now - before == 5000


def test_rows_in_processes_train_the_model_of_one_rank() -> None:
    lines: list[str] = []
    order = StrategiesOrder(model="gpt-tiny", ranks=2, steps=3, only=("torch-tensor",))
    dense, tensor = measure_strategies(order, lines.append)
    assert lines[::2] == ["row 1 of 2: dense", "row 2 of 2: torch-tensor"]
    assert lines[3].endswith("ms a step, in sync")
    assert (dense.cause, tensor.cause) == (None, None)
    assert dense.ranks[0]["communication"] == {"in_flight_s": 0.0, "hidden_s": 0.0, "exposed_s": 0.0}
    assert tensor.ranks[0]["communication"] is None, "torch starts these in C++: not seen, so not shown as 0"
    assert dense.is_good
    assert tensor.is_good
    assert abs(tensor.loss_difference) < 1e-5
    assert 0 < tensor.ranks[0]["drift"] < 1e-4
    for row in (dense, tensor):
        for measured in row.ranks:
            held, expected = Held(**measured["held"]), Held(**measured["predicted"])
            assert held.total == pytest.approx(expected.total, rel=0.1)
            assert measured["peak"] > held.total
    assert tensor.ranks[0]["compared"] == 2 * 6 + 3, "two norms and two biases per block, positions, last norm"
    assert tensor.ranks[1]["wire"] > 0


def test_a_rank_that_fails_reports_its_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="gpt-huge"):
        run_ranks(task(row="dense", ranks=1, model="gpt-huge", cores=[[]], threads=[1]), tmp_path / "row")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ((1, 1), "rank 1: ValueError: the cause"),
        ((1, -11), "rank 1: Segmentation fault"),
        ((None, 1), "rank 1: ValueError: the cause"),
    ],
)
def test_the_first_rank_that_failed_is_the_cause(tmp_path: Path, codes: tuple[Any, ...], message: str) -> None:
    later = {"failed_at": 2.0, "cause": "RuntimeError: Connection closed by peer"}
    (tmp_path / "rank-0.json").write_text(json.dumps(later))
    (tmp_path / "rank-1.log").write_text("words\nSegmentation fault\n")
    if codes[1] == 1:
        (tmp_path / "rank-1.json").write_text(json.dumps({"failed_at": 1.0, "cause": "ValueError: the cause"}))
    with pytest.raises(RankError, match=message):
        module._results(codes, tmp_path)


def measurement(**changes: Any) -> dict[str, Any]:
    return {
        "held": asdict(Held(10, 10, 20)),
        "uncut": 0,
        "unequal": [],
        "drift": 1e-6,
        "losses": [2.0],
        "seconds": 0.1,
        **changes,
    }


def test_a_row_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(given: StrategyTask, folder: Path) -> list[dict[str, Any]]:
        if given.row == "fsdp":
            raise RankError("rank 1: no memory")
        return [measurement() for _ in range(given.ranks)]

    monkeypatch.setattr(module, "run_ranks", run)
    rows = measure_strategies(StrategiesOrder(only=("fsdp", "tensor"), ranks=2), lambda _: None)
    assert [(row.name, row.cause) for row in rows] == [
        ("dense", None),
        ("fsdp", "rank 1: no memory"),
        ("tensor", None),
    ]
    assert [row.is_good for row in rows] == [True, False, True]


@pytest.mark.parametrize(
    ("rank", "is_good"),
    [(measurement(), True), (measurement(unequal=["head.weight"]), False), (measurement(drift=2e-4), False)],
)
def test_a_row_that_is_not_in_sync_is_not_good(rank: dict[str, Any], is_good: bool) -> None:
    assert StrategyRow("ddp-flat", [measurement(), measurement()]).is_good
    assert StrategyRow("ddp-flat", [rank, measurement()]).is_good is is_good


def test_parts_are_of_the_sharded_bytes() -> None:
    ranks = [measurement(held=asdict(Held(10, 10, 15)), uncut=20), measurement(held=asdict(Held(10, 10, 6)), uncut=20)]
    assert StrategyRow("zero1", ranks).parts() == pytest.approx([15 / 21, 6 / 21])


def test_which_rows_a_quick_run_has() -> None:
    assert "muon" in module._rows(StrategiesOrder())
    assert "muon" not in module._rows(StrategiesOrder(is_quick=True))
    assert module._rows(StrategiesOrder(is_quick=True, only=("muon",))) == ["muon-1", "muon"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"only": ("fsdp", "zero3")}, "'zero3' must be one of dense, ddp-flat"),
        ({"model": "lenet"}, "'lenet' must be one of gpt, "),
        ({"shares": (1.0, -2.0), "ranks": 2}, "none negative"),
        ({"ranks": 9}, "from 2 to 8"),
        ({"steps": 2}, "at least 3"),
        ({"device": "tpu"}, "allowed is cpu, cuda"),
        ({"device": "cpu@0.5"}, "a whole GPU"),
    ],
)
def test_bad_orders_are_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_strategies(StrategiesOrder(**changes), lambda _: None)


def test_two_strategies_take_turns_on_the_same_ranks() -> None:
    pairs = task(row="ddp-bucketed", against="zero1", steps=1, pairs=3)
    for result in on_threads(2, lambda group: alternate(pairs, group, CPU)):
        assert len(result["ours"]) == len(result["theirs"]) == 3
        assert all(seconds > 0 for seconds in result["ours"])


def test_as_fast_means_that_the_whole_interval_is_above_the_bound() -> None:
    steady = Paired("fsdp", "torch-fsdp", [1.0] * 30, [1.0, 1.02] * 15)
    mean, half = steady.interval
    assert mean == pytest.approx(1.01)
    assert steady.is_as_fast
    disturbed = replace(steady, is_disturbed=True)
    assert disturbed.is_as_fast is None, "nothing follows from disturbed pairs"
    noisy = Paired("fsdp", "torch-fsdp", [1.0] * 30, [0.5, 1.6] * 15)
    assert noisy.interval[0] > 1.0
    assert not noisy.is_as_fast
    assert math.isfinite(half)
