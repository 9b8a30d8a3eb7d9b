"""What a newcomer takes over from the ranks that have trained."""

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from uneven.train.settle import load_optimizer_state


def trained(optimizer_class: type[Optimizer], steps: int, **settings: float) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(steps)
    model = nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), lr=torch.tensor(0.01), **settings)  # type: ignore[call-arg]
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    state = {f"{at}.{key}": t for at, one in enumerate(optimizer.state.values()) for key, t in one.items()}
    return {**state, "lr": optimizer.param_groups[0]["lr"]}


def test_tensors_that_a_captured_step_may_hold_keep_their_addresses() -> None:
    _, source = trained(Adam, 5)
    _, newcomer = trained(Adam, 1)  # has warmed up
    held = tensors_of(newcomer)
    load_optimizer_state(newcomer, source.state_dict()["state"])
    found, wanted = tensors_of(newcomer), tensors_of(source)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor is held[name], name
        assert torch.equal(tensor, wanted[name]), name


def test_a_newcomer_without_state_gets_it() -> None:
    _, source = trained(SGD, 5, momentum=0.9)
    _, newcomer = trained(SGD, 0, momentum=0.9)
    load_optimizer_state(newcomer, source.state_dict()["state"])
    for name, tensor in tensors_of(source).items():
        assert torch.equal(tensors_of(newcomer)[name], tensor), name


def test_state_that_the_source_does_not_have_is_gone() -> None:
    _, source = trained(Adam, 0)
    _, newcomer = trained(Adam, 2)
    load_optimizer_state(newcomer, source.state_dict()["state"])
    assert not newcomer.state_dict()["state"]


def test_state_lies_in_memory_as_its_param_does() -> None:
    """What came over the network has its rows one after the other; a fused step goes through both by address."""
    param = nn.Parameter(torch.zeros(3, 2).t())
    newcomer = SGD([param], lr=0.1, momentum=0.9, fused=True)
    momentum = torch.arange(6.0).view(2, 3)
    load_optimizer_state(newcomer, {0: {"momentum_buffer": momentum}})
    found = newcomer.state[param]["momentum_buffer"]
    assert found.stride() == param.stride()
    assert torch.equal(found, momentum)
