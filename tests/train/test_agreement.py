"""Ranks that a script's own code has driven apart are told so, and rounding is not taken for it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from tests.api.loops import make_loop
from tests.ranks import ThreadGroup, on_threads
from tests.train.exact_runs import Net
from uneven.errors import InputError, LeftLoopError
from uneven.train.synchronizer import check_replicas


def said(code: str, **options: Any) -> list[str]:
    """What every rank's `finish` raises, with so much code of the script's own behind each step.

    The second rank has no batch in the last slot of an epoch: 70 samples by 23.
    """

    def rank(group: ThreadGroup) -> str:
        net = Net(torch.float64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = ExponentialLR(optimizer, gamma=0.7)
        loop = make_loop(group, model=net, optimizer=optimizer, global_batch_size=23, shares=(22, 1), **options)
        try:
            for epoch in range(2):
                for x, y in loop.batches(epoch):
                    loop.step(F.cross_entropy(loop(x), y))
                    if code == "scheduler":
                        scheduler.step()
                    elif code == "clamp":
                        for param in net.parameters():
                            param.data.clamp_(-0.05, 0.05)
            loop.finish()
        except (InputError, LeftLoopError) as error:
            return str(error)
        return ""

    return on_threads(2, rank)


def test_code_that_runs_on_some_ranks_alone_is_found() -> None:
    for words in said("scheduler"):
        assert "rank 1 has the learning rate" in words
        assert "give the scheduler to Ddp.setup" in words
    for words in said("clamp"):
        assert "rank 1 has other values in first.weight than rank 0" in words
        assert "a callback's on_step" in words
    assert said("") == said("", max_grad_norm=0.1) == ["", ""]


@pytest.mark.parametrize(
    ("dtype", "factor", "differs"),
    [
        (torch.float32, 1e-6, False),  # of very many steps
        (torch.float32, 1e-2, True),
        (torch.bfloat16, 2**-8, False),
        (torch.bfloat16, 0.5, True),
        (torch.complex64, 1e-2, True),
    ],
)
def test_rounding_is_no_difference(dtype: torch.dtype, factor: float, differs: bool) -> None:
    def rank(group: ThreadGroup) -> str:
        model = nn.Module()
        model.register_parameter("near_zero", nn.Parameter(torch.full((2,), 1e-9 * group.rank).to(dtype)))
        model.register_parameter("weight", nn.Parameter((torch.arange(1, 9) * (1 + factor * group.rank)).to(dtype)))
        model.register_parameter("empty", nn.Parameter(torch.zeros(0, dtype=dtype)))
        try:
            check_replicas(group, model, torch.optim.SGD(model.parameters(), lr=0.1))
        except InputError as error:
            return str(error)
        return ""

    assert ["in weight than rank 0" in words for words in on_threads(2, rank)] == [differs, differs]
