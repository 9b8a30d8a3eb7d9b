"""The controllers at a thousand ranks: linear work, and the same numbers on every CPU."""

import ast
import random
from pathlib import Path

import numpy as np
import pytest

import uneven.policy
from uneven.policy.exact import Balanced
from uneven.policy.finish import Cost, equal_finish
from uneven.policy.round_report import RoundReport
from uneven.policy.slot_times import PROBE_ROUNDS, LastThree, next_probes, with_probes
from uneven.policy.windows import LocalSGDConfig, Windows

FILES = sorted(Path(uneven.policy.__file__).parent.glob("*.py"))
ORDERED = {"cumsum", "dot", "einsum", "inner", "matmul", "mean", "nansum", "prod", "sum", "tensordot", "trace", "vdot"}


def numpy_sums(path: Path) -> list[str]:
    """Functions that call what of numpy depends on the order in which it adds, which differs between CPUs."""
    text = path.read_text()
    if "import numpy" not in text:
        return []
    found = []
    for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
        calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        found += [function.name for call in calls if isinstance(call, ast.Attribute) and call.attr in ORDERED]
    return found


def test_no_controller_adds_floats_in_an_order_of_the_library() -> None:
    found = [name for path in FILES for name in numpy_sums(path)]
    assert sorted(found) == ["best_counts", "slots_per_ms"], "of whole numbers, which have one sum"


def test_the_typical_value_is_the_lower_median_of_the_last_three() -> None:
    chance = random.Random(0)
    lists: list[list[float]] = [[] for _ in range(5)]
    last = LastThree(lists)
    for _ in range(200):
        if chance.random() < 0.1:
            rank = chance.randrange(5)
            lists[rank] = []
            last.forget([rank])
        ranks = sorted(chance.sample(range(5), chance.randint(1, 5)))
        values = [chance.choice([1.0, 2.0, chance.uniform(0.0, 9.0)]) for _ in ranks]
        for rank, value in zip(ranks, values, strict=True):
            lists[rank] = [*lists[rank], value][-3:]
        index = slice(None) if len(ranks) == 5 else np.array(ranks)
        assert last.add(index, np.array(values)).tolist() == [
            sorted(lists[rank])[(len(lists[rank]) - 1) // 2] for rank in ranks
        ]
        assert last.to_lists() == lists
        assert last.is_known.tolist() == [bool(one) for one in lists]
        assert last.is_full(slice(None)).tolist() == [len(one) == 3 for one in lists]
        assert LastThree(lists).tobytes() == last.tobytes(), "as after it is loaded from a checkpoint"


def test_the_rest_is_shared_out_in_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look through a thousand ranks for each of the samples that are left took 140 ms, in every step."""
    chance = random.Random(1)
    costs = [Cost(chance.uniform(1.0, 3.0), chance.uniform(0.1, 0.5)) for _ in range(1000)]
    calls = [0]
    time_ms = Cost.time_ms

    def counted(self: Cost, samples: int) -> float:
        calls[0] += 1
        return time_ms(self, samples)

    monkeypatch.setattr(Cost, "time_ms", counted)
    assert sum(equal_finish(costs, 32_000)) == 32_000
    assert calls[0] <= 2000


@pytest.mark.parametrize("is_async", [False, True])
def test_a_thousand_ranks_get_counts_by_their_speeds(is_async: bool) -> None:
    chance = random.Random(2)
    ms = [chance.uniform(5.0, 25.0) for _ in range(1000)]
    config = LocalSGDConfig(anchor=40, is_async=is_async)
    windows, copy = (Windows(config, 1000, 64, lambda slot: (slot // 10**7 + 1) * 10**7, ms) for _ in range(2))
    for _ in range(6):
        reports = [
            RoundReport(float(windows.due), 64.0 * count, count * ms[rank] * chance.uniform(0.97, 1.03))
            for rank, count in enumerate(windows.cut())
        ]
        windows.note(reports)
        copy.note(reports)
        assert windows.fingerprint() == copy.fingerprint()
    took = [count * each for count, each in zip(windows.counts, ms, strict=True)]
    assert max(took) < 1.1 * min(took)


def test_a_rank_that_is_left_out_waits_longer_the_slower_it_is() -> None:
    probe_in, ms = np.array([-1, -1, -1]), np.array([1.0, 500.0, 50_000.0])
    usual, tried = np.array([1.0, 1.0, 1.0]), np.array([True, True, True])
    first = next_probes(probe_in, ms, usual, 40.0, tried)
    assert first[0] == -1
    assert PROBE_ROUNDS[0] <= first[1] < first[2] == PROBE_ROUNDS[1]
    assert next_probes(first, ms, usual, 40.0, ~tried).tolist() == [-1, first[1] - 1, first[2] - 1]
    due = np.array([-1, 0, 3])
    assert next_probes(due, ms, usual, 40.0, ~tried).tolist() == [-1, 0, 2], "it stays due until it was tried"
    assert with_probes((5, 0, 0), due) == (4, 1, 0)


def test_shares_that_are_out_of_reach_do_not_go_farther() -> None:
    """A share beyond its reach moved away from where it should be, below zero."""
    chance = random.Random(0)
    for _ in range(60):
        ranks = chance.choice([3, 5, 9])
        costs = [Cost(chance.uniform(0.0, 8.0), chance.uniform(0.05, 2.0)) for _ in range(ranks)]
        true = [cost.scaled(chance.uniform(0.5, 2.0)) for cost in costs]
        policy = Balanced(tuple(costs), 64 * ranks, grid=4, reach=3, lookahead=2)
        for slot in range(120):
            shares = policy.shares(slot, 64 * ranks)
            assert min(shares) >= 0
            assert sum(shares) == 64 * ranks
            if slot == 60:
                true[0] = true[0].scaled(10.0)
            busy = [cost.time_ms(share) * chance.uniform(0.9, 1.1) for cost, share in zip(true, shares, strict=True)]
            policy.note(slot, 64 * ranks, busy)
