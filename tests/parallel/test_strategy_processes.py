"""The strategies over a real wire: every one on three processes, against one process; PyTorch's own, too."""

from pathlib import Path

import torch

from tests.parallel import test_fsdp
from tests.parallel.parity import (
    Case,
    Outcome,
    assert_same_state,
    train_dense,
    train_on,
)
from tests.parallel.test_strategies import WRAPS
from tests.parallel.test_tensor_parallel import KINDS, NOISE, dense, train
from tests.ranks import on_processes
from uneven.comm.group import Group
from uneven.parallel.reference import TorchFsdp, TorchReplicated

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


REFERENCES = {
    "ddp": TorchReplicated,
    "ddp and zero": lambda model, make, group: TorchReplicated(model, make, group, is_sharded=True),
}
EQUAL = Case(3, "equal", 1, "frozen", "adamw")


def torchs_own(group: Group) -> list[Outcome]:
    return [train_on(EQUAL, wrap, group) for wrap in REFERENCES.values()]


def test_pytorchs_own_train_the_same(tmp_path: Path) -> None:
    expected = train_dense(EQUAL)
    for rank, outcomes in enumerate(on_processes(3, "tests.parallel.test_strategy_processes:torchs_own", tmp_path)):
        for name, outcome in zip(REFERENCES, outcomes, strict=True):
            torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(outcome.state.model, expected.state.model, rtol=1e-10, atol=1e-12)
            if name != "ddp and zero" or rank == 0:
                assert_same_state(outcome.state, expected.state)


def torchs_fsdp(group: Group) -> dict[str, torch.Tensor]:
    return test_fsdp.train(TorchFsdp(test_fsdp.Tower(), test_fsdp.make_adamw, group), group)


def test_pytorchs_own_fsdp_trains_the_same(tmp_path: Path) -> None:
    """On blocks: it refuses params without a dimension, which the other model has."""
    for found in on_processes(2, "tests.parallel.test_strategy_processes:torchs_fsdp", tmp_path):
        torch.testing.assert_close(found, test_fsdp.dense(), rtol=1e-10, atol=1e-12)
