"""Strategies on three ranks of two machines, as threads over real transports, against one process."""

import torch

from tests.comm.machine_ranks import on_machines
from tests.parallel.parity import WRAPS, Case, Outcome, assert_same_state, train_dense, train_on
from tests.parallel.tensor_nets import KINDS, NOISE, dense, train
from uneven.comm.hierarchy import HierarchicalGroup
from uneven.parallel.strategy import FullState

MACHINES = (0, 1, 1)
HARD = Case(3, "zero", 2, "unused", "adamw")
NAMES = ("bucketed, small", "flat, sharded by tensors, uneven", "zero2 by elements, uneven", "fsdp, uneven")


def test_one_strategy_of_each_kind() -> None:
    def rank(group: HierarchicalGroup) -> list[Outcome]:
        return [train_on(HARD, wrap, group) for wrap in (WRAPS[name] for name in NAMES)]

    expected = train_dense(HARD)
    for outcomes in on_machines(MACHINES, rank):
        for outcome in outcomes:
            assert_same_state(outcome.state, expected.state)
            torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-10, atol=1e-12)


def test_tensor_and_sequence_parallel() -> None:
    def rank(group: HierarchicalGroup) -> list[tuple[FullState, list[float]]]:
        return [train(group, kind, "sgd", True, (3, 1, 0)) for kind in KINDS]

    state, norms = dense("sgd", True)
    for found in on_machines(MACHINES, rank):
        for own, clipped in found:
            assert_same_state(own, state, NOISE)
            torch.testing.assert_close(clipped, norms, rtol=1e-10, atol=1e-12)
