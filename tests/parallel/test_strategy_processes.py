"""The strategies over a real wire: every one on three processes, against one process, and against PyTorch's own DDP."""

from pathlib import Path

import torch

from tests.parallel.parity import (
    OPTIMIZERS,
    Case,
    Net,
    Outcome,
    assert_same_state,
    batches,
    loss_of,
    train_dense,
    train_on,
)
from tests.parallel.test_strategies import WRAPS
from tests.parallel.test_tensor_parallel import KINDS, NOISE, dense, train
from tests.ranks import on_processes
from uneven.comm.group import Group

CASES = [Case(3, "zero", 2, "unused", "adamw"), Case(3, "unequal", 1, "tied", "sgd")]


def all_strategies(group: Group) -> list[Outcome]:
    return [train_on(case, wrap, group) for case in CASES for wrap in WRAPS.values()]


def tensors(group: Group) -> list[object]:
    return [train(group, kind, "sgd", True, (3, 1, 0)) for kind in KINDS]


def test_every_strategy_over_gloo(tmp_path: Path) -> None:
    found = on_processes(3, "tests.parallel.test_strategy_processes:all_strategies", tmp_path)
    for outcomes in found:
        for place, outcome in enumerate(outcomes):
            expected = train_dense(CASES[place // len(WRAPS)])
            assert_same_state(outcome.state, expected.state)
            torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-10, atol=1e-12)


def test_tensor_and_sequence_parallel_over_gloo(tmp_path: Path) -> None:
    expected, norms = dense("sgd", True)
    for outcomes in on_processes(3, "tests.parallel.test_strategy_processes:tensors", tmp_path):
        for state, clipped in outcomes:
            assert_same_state(state, expected, NOISE)
            torch.testing.assert_close(clipped, norms, rtol=1e-10, atol=1e-12)


def torchs_own(group: Group) -> dict[str, torch.Tensor]:
    """DistributedDataParallel, whose average becomes our sum by the number of ranks."""
    from torch.nn.parallel import DistributedDataParallel

    case = CASES[1]
    model = Net("tied", group.rank)
    wrapped = DistributedDataParallel(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for (micro,) in batches(case):
        (loss_of(wrapped, micro, case.parts()[group.rank], 12) * group.size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def test_pytorchs_own_ddp_trains_the_same(tmp_path: Path) -> None:
    for found in on_processes(3, "tests.parallel.test_strategy_processes:torchs_own", tmp_path):
        torch.testing.assert_close(found, train_dense(CASES[1]).state.model, rtol=1e-10, atol=1e-12)
