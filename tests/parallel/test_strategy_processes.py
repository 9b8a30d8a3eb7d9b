"""The strategies over a real wire: every one on three processes, against one process; PyTorch's own, too."""

from dataclasses import dataclass

import pytest
import torch

from tests.parallel import fsdp_nets, page_examples
from tests.parallel.collective_counts import count_all
from tests.parallel.parity import (
    WRAPS,
    Case,
    Outcome,
    assert_same_state,
    train_dense,
    train_on,
)
from tests.parallel.tensor_nets import KINDS, NOISE, dense, train
from tests.ranks import on_processes
from uneven.comm.group import Group
from uneven.comm.torch_group import as_group
from uneven.parallel.reference import TorchFsdp, TorchReplicated
from uneven.parallel.strategy import FullState

OWNERS, BLOCKS, CUT_BLOCKS = 2, 3, 2  # of three ranks one has no share
GATHERS = 1 + BLOCKS + BLOCKS - 1  # the root, every block forward, and all but the last again backward
EXPECTED = {
    "ddp-flat": {"allreduce_": 1},
    "ddp-bucketed": {"allreduce_": 1},
    "zero1": {"allreduce_": 1, "broadcast_": OWNERS},
    "zero1-flat": {"allreduce_": 1, "broadcast_": OWNERS},
    "zero2": {"allreduce_": 1 + 1, "broadcast_": OWNERS},  # and who used which param
    "fsdp": {"allreduce_": 1 + BLOCKS + 1, "broadcast_": GATHERS * OWNERS},
    # Two sums a block forward and two backward; the embedding's forward, the last layer's backward and its gather.
    "tensor": {"allreduce_": 4 * CUT_BLOCKS + 2, "broadcast_": OWNERS},
    # The same sums, which go to owners of rows; what they then make whole; and one for the params of what is by rows.
    "sequence": {"allreduce_": 4 * CUT_BLOCKS + 2 + 1, "broadcast_": (4 * CUT_BLOCKS + 3) * OWNERS},
}
HARD, TIED = Case(3, "zero", 2, "unused", "adamw"), Case(3, "unequal", 1, "tied", "sgd")
# One of each kind of shards and buckets; on threads test_strategies.py has them all.
WIRED = (
    *("flat", "bucketed, small", "flat, sharded by tensors, uneven", "bucketed, sharded by elements, uneven"),
    *("zero2 by elements, uneven", "zero2 by tensors", "fsdp", "fsdp, uneven"),
)
CELLS = [(HARD, name) for name in WIRED] + [(TIED, name) for name in ("bucketed", "zero2 by elements", "fsdp, uneven")]
EQUAL = Case(3, "equal", 1, "frozen", "adamw")
REFERENCES = {
    "ddp": TorchReplicated,
    "ddp and zero": lambda model, make, group: TorchReplicated(model, make, group, is_sharded=True),
}


@dataclass
class Everything:
    """What one rank found."""

    ours: list[Outcome]
    tensors: list[tuple[FullState, list[float]]]
    torchs: dict[str, Outcome]
    torchs_fsdp: dict[str, torch.Tensor]
    collectives: dict[str, dict[str, int]]
    examples: dict[str, dict[str, dict[str, torch.Tensor]]]


def everything(group: Group) -> Everything:
    return Everything(
        [train_on(case, WRAPS[name], group) for case, name in CELLS],
        [train(group, kind, "sgd", True, (3, 1, 0)) for kind in KINDS],
        {name: train_on(EQUAL, wrap, group) for name, wrap in REFERENCES.items()},
        fsdp_nets.train(TorchFsdp(fsdp_nets.Tower(), fsdp_nets.make_adamw, group), group),
        count_all(as_group(None)),  # torch sees those of its own groups alone
        page_examples.run_in_groups(),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Everything]:
    """On three processes, which start once: that takes longer than all the training."""
    what = "tests.parallel.test_strategy_processes:everything"
    return on_processes(3, what, tmp_path_factory.mktemp("ranks"))


def test_every_strategy_through_shared_memory(found: list[Everything]) -> None:
    dense = {case: train_dense(case) for case in (HARD, TIED)}
    for one in found:
        for (case, _), outcome in zip(CELLS, one.ours, strict=True):
            expected = dense[case]
            assert_same_state(outcome.state, expected.state)
            torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-10, atol=1e-12)


def test_tensor_and_sequence_parallel_through_shared_memory(found: list[Everything]) -> None:
    expected, norms = dense("sgd", True)
    for one in found:
        for state, clipped in one.tensors:
            assert_same_state(state, expected, NOISE)
            torch.testing.assert_close(clipped, norms, rtol=1e-10, atol=1e-12)


def test_pytorchs_own_train_the_same(found: list[Everything]) -> None:
    expected = train_dense(EQUAL)
    for rank, one in enumerate(found):
        for name, outcome in one.torchs.items():
            torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(outcome.state.model, expected.state.model, rtol=1e-10, atol=1e-12)
            if name != "ddp and zero" or rank == 0:
                assert_same_state(outcome.state, expected.state)


def test_pytorchs_own_fsdp_trains_the_same(found: list[Everything]) -> None:
    """On blocks: it refuses params without a dimension, which the other model has."""
    for one in found:
        torch.testing.assert_close(one.torchs_fsdp, fsdp_nets.dense(), rtol=1e-10, atol=1e-12)


def test_a_step_has_the_collectives_that_it_must_have(found: list[Everything]) -> None:
    """As PyTorch's CommDebugMode counts them. PyTorch's ZeRO sends every param by itself, ours every owner's shard."""
    for one in found:
        torchs = {name: count for name, count in one.collectives.items() if name.startswith("torch-")}
        assert {name: count for name, count in one.collectives.items() if name not in torchs} == EXPECTED
        assert sum(torchs["torch-zero1"].values()) > sum(EXPECTED["zero1"].values())
        assert torchs["torch-ddp"]["allreduce_"] == EXPECTED["ddp-bucketed"]["allreduce_"]
        assert torchs["torch-fsdp"] == {"_allgather_base_": 1 + BLOCKS + BLOCKS, "_reduce_scatter_base_": 1 + BLOCKS}


def test_the_examples_of_the_page_in_all_ranks_and_in_some(found: list[Everything]) -> None:
    """A torch process group is taken as it is; in the sub-group of ranks 0 and 2 the global ranks are translated."""
    assert [list(one.examples) for one in found] == [["all", "some"], ["all"], ["all", "some"]]
    for one in found:
        page_examples.check_examples(one.examples)
