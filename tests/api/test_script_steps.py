"""A step of the optimizer that the script makes itself, beside those of `ddp.step`."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from uneven import Ddp, TensorData
from uneven.api.loop import Loop
from uneven.errors import InputError

X = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))


def setup(model: nn.Module, optimizer: SGD | dict[str, SGD]) -> Loop:
    return Ddp.setup(model, optimizer, dataset=TensorData(X), batch_size=8, epochs=1, devices="cpu", progress="off")


def left_over(loop: Loop, optimizer: SGD, batch: torch.Tensor) -> None:
    loop.step(loop(batch).mean())
    optimizer.step()


def in_its_place(loop: Loop, optimizer: SGD, batch: torch.Tensor) -> None:
    loop(batch).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("how", [left_over, in_its_place])
def test_a_step_beside_ours_is_refused(how: Callable[[Loop, SGD, torch.Tensor], None]) -> None:
    """Every gradient was applied twice, and nothing said so."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loop = setup(model, optimizer)
    batches = loop.batches(0)
    batch = next(batches)
    with pytest.raises(InputError, match=r"optimizer.step\(\) was called by the script: ddp.step\(loss\)"):
        how(loop, optimizer, batch)


def test_one_of_several_optimizers_is_refused_too() -> None:
    model = nn.ModuleDict({"g": nn.Linear(2, 1), "d": nn.Linear(2, 1)})
    optimizers = {name: SGD(part.parameters(), lr=0.1) for name, part in model.items()}
    loop = setup(model, optimizers)
    batches = loop.batches(0)
    batch = next(batches)
    loop.step(model["g"](batch).mean(), optimizer="g")
    loop.step(model["d"](batch).mean(), optimizer="d")
    with pytest.raises(InputError, match="was called by the script"):
        optimizers["d"].step()


def test_without_gradients_and_after_the_run_the_optimizer_is_the_scripts() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loop = setup(model, optimizer)
    for batch in loop.batches(0):
        optimizer.zero_grad()
        optimizer.step()  # changes nothing
        loop.step(loop(batch).mean())
    loop.finish()
    before = model.weight.detach().clone()
    model(X).mean().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_backward_beside_ours_is_named() -> None:
    model = nn.Linear(2, 1)
    loop = setup(model, SGD(model.parameters(), lr=0.1))
    batches = loop.batches(0)
    loss = loop(next(batches)).square().mean()
    loss.backward()
    with pytest.raises(InputError, match=r"take loss.backward\(\) out of the loop"):
        loop.step(loss)
