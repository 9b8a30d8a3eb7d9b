"""Optimizers, and what strategies are wrapped around for tests of each part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from tests.parallel.parity import STEPS, Case, Net, batches, loss_of
from uneven.comm.group import Group
from uneven.parallel import (
    FSDP,
    Columns,
    DDPBucketed,
    DDPFlat,
    Rows,
    TensorParallel,
    Zero1,
    Zero2,
)

PLAN = {"0": Columns(), "2": Rows()}


Wrap = Callable[[nn.Module, Any, Group], Any]


WRAPS: dict[str, Wrap] = {
    "DDPFlat": DDPFlat,
    "DDPBucketed": DDPBucketed,
    "Zero1": lambda model, optimizer, group: Zero1(model, optimizer, group, shares=(3, 1)),
    "Zero1, flat": lambda model, optimizer, group: Zero1(model, optimizer, group, flat=True),
    "Zero2": lambda model, optimizer, group: Zero2(model, optimizer, group, shares=(1, 3)),
    "FSDP": lambda model, optimizer, group: FSDP(model, optimizer, group, shares=(3, 1)),
    "TensorParallel": lambda model, optimizer, group: TensorParallel(model, optimizer, group, plan=PLAN),
}


def make_adamw(params: Any) -> AdamW:
    return AdamW(params, lr=0.01)


class Counting(Optimizer):
    """Counts its steps in the group and adds a key later, as schedule-free optimizers do; elementwise if it says so."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for settings in self.param_groups:
            settings["k"] += 1
            settings["weight"] += settings["lr"] ** 2
            settings["largest"] = max(settings.get("largest", 0.0), settings["lr"])
            for param in settings["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * settings["lr"] / settings["k"] * (1 + settings["weight"]))


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """The same whole batch on every rank: gradients need no sum."""
    loss_of(model, batches(Case(1))[number % STEPS][0], slice(None), 12).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(make: Callable[[Any], Optimizer], steps: int = 2) -> tuple[nn.Module, Optimizer]:
    model = Net("plain", 0)
    optimizer = make(model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def assert_equal(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
