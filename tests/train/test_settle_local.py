"""Local policies when ranks are killed: every slot once in the lineage, replicas equal, params that say the same."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.train.local_cluster import SAMPLES, Cluster, Count, Member
from uneven.data.sample_order import permutation, prove_exactly_once


def check(cluster: Cluster, members: list[Member]) -> None:
    first = members[0]
    axis, alone = first.engine.axis, first.is_alone
    logs = [member.engine.log for member in members] + [log["log"] for log in first.run.earlier_logs]
    prove_exactly_once(axis, logs, axis.total)
    expected = recount(cluster, members)
    for member in members:
        model = member.engine.model
        assert isinstance(model, Count)
        torch.testing.assert_close(model.w.detach(), expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(model.w, first.engine.model.w)  # type: ignore[arg-type]
        assert torch.equal(model.level, first.engine.model.level)  # type: ignore[arg-type]
        assert torch.equal(model.seen, first.engine.model.seen)  # type: ignore[arg-type]
        assert [entry[0] for entry in member.history] == list(range(axis.epochs)), "every epoch once"
        assert alone or [str(e) for e in member.history] == [str(e) for e in first.history]


def recount(cluster: Cluster, members: list[Member]) -> torch.Tensor:
    """From the logs alone: what each sample's coordinate must be, by the weights of the round that it was in."""
    axis = members[0].engine.axis
    handed = []  # (log, parts that each round had taken in all)
    for member in members:
        handed.append((member.engine.log, [entered for _, entered, _, _ in member.engine.rounds]))
    for log in members[0].run.earlier_logs:
        handed.append((log["log"], [entered for _, entered, _, _ in log["rounds"]]))
    weights: Counter[int] = Counter()
    for log, rounds in handed:
        for number, (start, stop) in enumerate(zip(rounds, rounds[1:], strict=False)):
            weights[number] += sum(samples for _, _, samples in log[start:stop])
    expected = torch.zeros(SAMPLES, dtype=torch.float64)
    for log, rounds in handed:
        for number, (start, stop) in enumerate(zip(rounds, rounds[1:], strict=False)):
            own = sum(samples for _, _, samples in log[start:stop])
            add(expected, axis, log[start:stop], own / weights[number] if weights[number] else 0.0)
        add(expected, axis, log[rounds[-1] :], 1.0)  # alone at last
    return expected


def add(expected: torch.Tensor, axis: Any, parts: list[Any], share: float) -> None:
    for slot, first, samples in parts:
        order = torch.from_numpy(permutation(0, axis.slot(slot).epoch, SAMPLES))[first : first + samples]
        expected[order] += share


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_undisturbed_the_params_tell_what_the_ledger_says(policy: str) -> None:
    cluster = Cluster(3, policy=policy)
    check(cluster, cluster.run())
    assert min(cluster.operations.values()) > 20


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("at", range(4, 100, 8))
def test_one_of_three_is_killed_at_any_operation(policy: str, at: int) -> None:
    cluster = Cluster(3, [(at % 3, at)], seed=at, policy=policy)
    members = cluster.run()
    check(cluster, members)


@pytest.mark.parametrize("policy", ["cadence", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_two_of_four_are_killed_also_while_the_others_settle(policy: str, seed: int) -> None:
    at = 7 + 9 * seed
    cluster = Cluster(4, [(seed % 4, at), ((seed + 1) % 4, at + 1 + seed)], seed=seed, policy=policy)
    check(cluster, cluster.run())
