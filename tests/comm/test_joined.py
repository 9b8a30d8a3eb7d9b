"""FSDP in groups that torch has formed: ranks in different numbers of groups, and what is left when it is closed."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from tests.parallel.tower import inputs, run, tower
from tests.ranks import on_processes
from uneven.comm.group import Group
from uneven.comm.torch_group import as_group, as_host_group
from uneven.errors import InputError
from uneven.parallel import FSDP


def make_adamw(params: Any) -> AdamW:
    return AdamW(params, lr=0.01)


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def train(group: Any) -> list[dict[str, Tensor]]:
    before = num_groups()
    strategy = FSDP(tower(), make_adamw, group)
    (strategy.module(inputs(0)).square().sum() / dist.get_world_size(group)).backward()
    strategy.optimizer.step()
    # torch names groups that are formed by their members alone by the number of those that it knows on each of them.
    assert num_groups() == before
    params = strategy.full_params()
    strategy.close()
    strategy.close()
    return [params, strategy.full_params()]  # the user's group is still there


def in_pairs(group: Group) -> list[list[dict[str, Tensor]]]:
    """By ranks 0 and 1, by 1 and 2, and again by 0 and 1: rank 1 is in more groups than the others."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if group.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    found = [train(pair) for pair in (*pairs, pairs[0]) if pair != dist.GroupMember.NON_GROUP_MEMBER]
    joined = as_group(None)
    twin = joined.new_group()
    joined.close()
    with pytest.raises(RuntimeError, match="closed"):
        twin.all_reduce(torch.ones(1))
    assert joined.all_reduce(torch.ones(1)).wait().item() == 3.0
    return found


def test_ranks_in_different_numbers_of_groups_train_in_each_of_them(tmp_path: Path) -> None:
    model = tower()
    expected = run(model, make_adamw(model.parameters()), 1)
    by_rank = on_processes(3, "tests.comm.test_joined:in_pairs", tmp_path, "gloo", limit_s=100)
    assert [len(found) for found in by_rank] == [2, 3, 1]
    for params in (params for found in by_rank for pair in found for params in pair):
        torch.testing.assert_close(params, expected, rtol=1e-10, atol=1e-12)


def in_host_groups(group: Group) -> list[float]:
    """Of all ranks and of two of them; what is under way in one does not hold another's."""
    found = []
    for pair in (None, dist.new_group([0, 2]), None):
        if pair is not None and group.rank == 1:
            continue
        before = num_groups()
        host = as_host_group(pair)
        assert num_groups() == before
        theirs = torch.full((1,), 1.0)
        ours = host.all_reduce(torch.tensor([float(group.rank)]))
        dist.all_reduce(theirs, group=pair)
        found += [ours.wait().item(), theirs.item()]
        host.close()
        with pytest.raises(RuntimeError, match="closed"):
            host.all_reduce(torch.ones(1))
    return found


def test_a_host_group_beside_the_users_has_the_same_ranks(tmp_path: Path) -> None:
    by_rank = on_processes(3, "tests.comm.test_joined:in_host_groups", tmp_path, "gloo", limit_s=100)
    all_ranks, pair = [3.0, 3.0], [2.0, 2.0]
    assert by_rank == [all_ranks + pair + all_ranks, all_ranks + all_ranks, all_ranks + pair + all_ranks]


def test_a_backend_that_cannot_be_formed_again_is_refused() -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(InputError, match="its backend is 'fake'"):
            as_group(None).new_group()
    finally:
        dist.destroy_process_group()
