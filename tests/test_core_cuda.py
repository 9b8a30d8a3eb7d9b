"""Shares in loops that are not ours on CUDA: over NCCL, and a clock that waits for the device alone."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.core_ranks import SPEEDS, STEP, data, net, order, train_dense
from tests.ranks import on_processes
from uneven.comm.group import Group
from uneven.core import StepSampler, StepShares, watch_ddp

pytestmark = pytest.mark.cuda


def train(process_group: Any) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    shares = StepShares(STEP, group=process_group)
    sampler = StepSampler(order(), shares)
    ddp = DistributedDataParallel(net().cuda(), device_ids=[0], process_group=process_group)
    optimizer = AdamW(ddp.parameters(), lr=0.01)
    watch_ddp(ddp, shares)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data(), batch_sampler=sampler):
            step = shares.step
            shares.start(before_s=1e3 * shares.of(step)[shares.rank] / SPEEDS[shares.rank])
            loss = F.cross_entropy(ddp(x.cuda()), y.cuda()) * shares.factor(step, sampler.own[step, 0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            shares.note(step)
    last = shares.of(shares.step)
    shares.close()
    return {name: param.detach().cpu() for name, param in ddp.module.named_parameters()}, last


def in_two_groups(group: Group) -> list[tuple[dict[str, Tensor], tuple[int, ...]]]:
    """torch's default one, which has Gloo for the host, and one of NCCL alone."""
    return [train(None), train(dist.new_group([0, 1], backend="nccl"))]


def test_params_over_nccl_are_those_of_one_process(tmp_path: Path) -> None:
    by_rank = on_processes(2, "tests.test_core_cuda:in_two_groups", tmp_path, "nccl")
    expected = train_dense(6)
    for params, last in (found for by_group in by_rank for found in by_group):
        assert last == (12, 4)
        for key, param in params.items():
            assert torch.allclose(param, expected[key], rtol=1e-9, atol=1e-11), key


def test_the_clock_counts_the_work_of_the_device_since_the_start() -> None:
    cycles = 100_000_000  # of a clock of at most 3 GHz: 30 ms and more
    shares = StepShares(4)
    torch.zeros(1, device="cuda")
    for num_before in (0, 20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_before):
            torch.cuda._sleep(cycles)
        step = shares.step
        shares.of(step)
        shares.start(before_s=0.0)
        torch.cuda._sleep(cycles)
        shares.note(step)
        whole_ms = 1e3 * (time.perf_counter() - began)
        assert 30.0 <= shares.busy_ms[0] <= whole_ms / (1 + num_before) * 2
