"""A replica as one flat buffer: what is in it, in which order, and what comes back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from uneven import InputError
from uneven.average.replica import Flat, Replica

STATEFUL: dict[str, tuple[Callable[[Any], Optimizer], tuple[str, ...]]] = {
    "sgd": (lambda params: SGD(params, lr=0.1, momentum=0.9), ("momentum_buffer",)),
    "adam": (lambda params: Adam(params, lr=0.1), ("exp_avg", "exp_avg_sq")),
    "adamw": (lambda params: AdamW(params, lr=0.1), ("exp_avg", "exp_avg_sq")),
    "rmsprop": (lambda params: RMSprop(params, lr=0.1), ("square_avg",)),
}
all_stateful = pytest.mark.parametrize("name", STATEFUL)


class Net(nn.Module):
    """Mixed dtypes, a param under two names, and a frozen one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.tensor([0.1, 0.2]))
        self.frozen = nn.Parameter(torch.tensor([7.0]), requires_grad=False)
        self.wide = nn.Parameter(torch.tensor([[1 / 3], [2 / 3]], dtype=torch.float64))
        self.tied = self.narrow


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def stepped(name: str, steps: int = 2) -> tuple[nn.Linear, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = STATEFUL[name][0](model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([[1.0, -2.0, 0.5]])).square().sum().backward()
    optimizer.step()


def taken(replica: Replica) -> Flat:
    flat = replica.new_flat()
    replica.copy_to(flat)
    return flat


def filled(replica: Replica, value: float) -> Flat:
    flat = replica.new_flat()
    flat.buffer.fill_(value)
    return flat


def test_the_layout_is_every_trained_param_once_in_the_models_order() -> None:
    model = Net()
    flat = taken(Replica(model, plain_sgd(model)))
    assert [tuple(view.shape) for view in flat.views] == [(2,), (2, 1)]
    expected = [*model.narrow.double().tolist(), *model.wide.flatten().tolist()]
    assert flat.buffer.tolist() == expected, "the frozen one and the second name are not in it"
    flat.views[1][1, 0] = 5.0
    assert flat.buffer[3] == 5.0, "views are of the buffer itself"


def test_numbers_are_as_wide_as_the_widest_param_and_never_narrower_than_fp32() -> None:
    for dtypes, wide in (
        ((torch.float32,), torch.float32),
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
        ((torch.bfloat16, torch.float64), torch.float64),
    ):
        model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes])
        assert Replica(model, plain_sgd(model)).new_flat().buffer.dtype == wide


def test_a_complex_param_beside_a_real_one_is_merged_with_both_its_parts() -> None:
    """Its two parts are real numbers of the buffer: as a complex buffer it could not be added to the real param."""
    model = nn.ParameterList([nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([[2 + 3j]]))])
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9)
    (model[0].sum() + model[1].real.sum() + 2 * model[1].imag.sum()).backward()
    optimizer.step()
    replica = Replica(model, optimizer, with_state=True)
    flat = taken(replica)
    assert flat.buffer.dtype == torch.float32
    assert flat.buffer.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    delta, average = filled(replica, 0.5), filled(replica, 4.0)
    replica.merge(average, delta)
    assert (model[0].item(), model[1].item()) == (0.5, 1.5 + 1.5j)
    assert optimizer.state[model[1]]["momentum_buffer"].item() == 4 + 4j
    replica.load(flat)
    assert (model[0].item(), model[1].item()) == (0.0, 1 + 1j)


def test_bf16_params_average_in_fp32() -> None:
    values = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 1.0078125, 1.0)]  # 1 + 2^-7: one bit more
    flats = []
    for value in values:
        model = nn.ParameterList([nn.Parameter(value.clone())])
        replica = Replica(model, plain_sgd(model))
        flats.append(taken(replica))
    together = replica.new_flat()
    for flat in flats:
        together.buffer.add_(flat.buffer, alpha=1 / 3)
    torch.testing.assert_close(together.buffer, torch.tensor([1 + 2**-7 / 3]), rtol=1e-6, atol=0)
    replica.load(together)
    assert model[0].dtype == torch.bfloat16
    assert model[0].item() == 1.0, "rounded once, at the end"


def test_what_was_taken_comes_back_bit_by_bit() -> None:
    model = Net()
    replica = Replica(model, plain_sgd(model))
    before = [param.detach().clone() for param in model.parameters()]
    flat = taken(replica)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    replica.load(flat)
    assert torch.equal(model.narrow, before[0])
    assert torch.equal(model.wide, before[2])
    assert model.frozen.item() == 9.0, "a frozen param is not averaged"
    assert model.tied is model.narrow


def test_a_merge_adds_the_change_to_params_once_each() -> None:
    model = Net()
    replica = Replica(model, plain_sgd(model))
    change = replica.new_flat()
    change.buffer.copy_(torch.tensor([1.0, 2.0, 0.25, 0.5]))
    replica.merge(filled(replica, 100.0), change)
    torch.testing.assert_close(model.narrow.detach(), torch.tensor([1.1, 2.2]))
    torch.testing.assert_close(
        model.wide.detach().flatten(), torch.tensor([1 / 3 + 0.25, 2 / 3 + 0.5], dtype=torch.float64)
    )
    assert model.frozen.item() == 7.0


def test_params_that_are_not_contiguous_keep_their_places() -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model = nn.ParameterList([weight])
    replica = Replica(model, plain_sgd(model))
    flat = taken(replica)
    assert flat.buffer.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    replica.load(flat)
    assert weight.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@all_stateful
def test_state_is_left_alone_unless_asked_for(name: str) -> None:
    model, optimizer = stepped(name)
    replica = Replica(model, optimizer)
    assert len(replica.new_flat().views) == 2
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    replica.load(filled(replica, 3.0))
    replica.merge(filled(replica, 3.0), filled(replica, 1.0))
    assert torch.equal(model.weight, torch.full((2, 3), 4.0))
    assert all(torch.equal(optimizer.state[model.weight][key], value) for key, value in before.items())


@all_stateful
def test_state_follows_the_params_name_by_name(name: str) -> None:
    names = STATEFUL[name][1]
    model, optimizer = stepped(name)
    replica = Replica(model, optimizer, with_state=True)
    flat = taken(replica)
    params = [model.weight, model.bias]
    expected = [*params, *(optimizer.state[param][key] for key in names for param in params)]
    assert len(flat.views) == len(expected)
    for view, tensor in zip(flat.views, expected, strict=True):
        assert torch.equal(view, tensor)
        assert view.abs().sum() > 0, "a state of zeros would show nothing"
    counts = {key: float(value) for key, value in optimizer.state[model.weight].items() if key == "step"}
    replica.load(filled(replica, 0.5))
    for tensor in expected:
        assert torch.equal(tensor, torch.full_like(tensor, 0.5))
    assert all(float(optimizer.state[model.weight][key]) == value for key, value in counts.items())


@all_stateful
def test_a_merge_overwrites_state_for_a_change_could_leave_a_mean_of_squares_below_zero(name: str) -> None:
    model, optimizer = stepped(name)
    replica = Replica(model, optimizer, with_state=True)
    replica.merge(average=filled(replica, 0.25), delta=filled(replica, -100.0))
    for key in STATEFUL[name][1]:
        state = optimizer.state[model.bias][key]
        assert torch.equal(state, torch.full_like(state, 0.25))
    assert (model.weight < -90).all()


@all_stateful
def test_state_that_is_not_there_yet_counts_as_zeros_and_is_not_made_up(name: str) -> None:
    model, optimizer = stepped(name, steps=0)
    replica = Replica(model, optimizer, with_state=True)
    flat = filled(replica, 9.0)
    replica.copy_to(flat)
    assert all(not view.any() for view in flat.views[2:]), "what stood there before is gone"
    replica.load(filled(replica, 2.0))
    replica.merge(filled(replica, 2.0), filled(replica, 1.0))
    assert torch.equal(model.bias, torch.full((2,), 3.0))
    assert not optimizer.state[model.weight]
    step(model, optimizer)  # it begins by itself
    assert taken(replica).views[-1].any()


def test_the_layout_is_the_same_before_and_after_the_first_step() -> None:
    shapes = []
    for steps in (0, 1):
        model, optimizer = stepped("adam", steps)
        shapes.append([view.shape for view in Replica(model, optimizer, with_state=True).new_flat().views])
    assert shapes[0] == shapes[1]


def test_sgd_without_momentum_has_nothing_to_average() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    replica = Replica(model, optimizer, with_state=True)
    assert not taken(replica).views[-1].any()
    replica.load(filled(replica, 1.0))
    assert not optimizer.state[model.weight].get("momentum_buffer")


def test_an_optimizer_whose_state_is_unknown_is_refused_with_the_way_out() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(InputError, match="SGD, Adam, AdamW, RMSprop, not of Adagrad; use 'keep'"):
        Replica(model, Adagrad(model.parameters()), with_state=True)
    Replica(model, Adagrad(model.parameters()))

    class Own(Adam):
        """What it keeps under Adam's names may mean anything."""

    with pytest.raises(InputError, match="not of Own"):
        Replica(model, Own(model.parameters()), with_state=True)


class Prepared(Optimizer):
    """Makes its state when it is made and relies on it, as torch's own Adagrad did for long."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.ones_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            squares = self.state[param]["sum"].addcmul_(param.grad, param.grad)
            param.addcdiv_(param.grad, squares.sqrt(), value=-self.param_groups[0]["lr"])


@pytest.mark.cuda
def test_a_replica_on_a_gpu_is_taken_put_and_merged() -> None:
    model = nn.Linear(3, 2).cuda()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3, device="cuda")).sum().backward()
    optimizer.step()
    replica = Replica(model, optimizer, with_state=True)
    before = model.weight.detach().clone()
    flat = taken(replica)
    assert flat.buffer.device == model.weight.device
    assert replica.new_pinned_flat().buffer.is_pinned()
    replica.merge(filled(replica, 0.5), filled(replica, 1.0))
    torch.testing.assert_close(model.weight.detach(), before + 1.0)
    assert optimizer.state[model.weight]["momentum_buffer"].unique().tolist() == [0.5]
    replica.load(flat)
    assert torch.equal(model.weight, before)
