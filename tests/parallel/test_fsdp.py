"""FSDP by itself: what is whole when, which order units have, types, checkpoints, and who holds how much."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.fsdp_nets import Tower, batch, dense, make_adamw, train
from tests.ranks import ThreadGroup, on_threads
from uneven.comm.group import Group, SoloGroup
from uneven.errors import InputError
from uneven.parallel.fsdp import FSDP
from uneven.parallel.units import blocks_of, params_by_unit


@dataclass
class Hidden:
    value: Tensor
    note: str = ""


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Holding(nn.Module):
    """A block whose output is an object with a tensor in it."""

    def __init__(self, block: nn.Module, kind: Any) -> None:
        super().__init__()
        self.block, self.kind = block, kind

    def forward(self, x: Any) -> Any:
        return self.kind(self.block(x.value if isinstance(x, Hidden | Opaque) else x))


def wrapped(group: Group, model: nn.Module, **options: Any) -> FSDP:
    return FSDP(model, make_adamw, group, **options)


@pytest.mark.parametrize("shares", [None, (15, 6), (1, 0), (0, 1)])
@pytest.mark.parametrize("saves", [False, True, "behind", "all"])
def test_blocks_train_as_one_process_does_also_from_checkpoints(shares: Any, saves: bool | str) -> None:
    for found in on_threads(2, lambda group: train(wrapped(group, Tower(saves=saves), shares=shares), group)):
        torch.testing.assert_close(found, dense(), rtol=1e-10, atol=1e-12)


def test_a_hook_that_was_there_before_finds_whole_params() -> None:
    """As that of torch.nn.utils.weight_norm, which makes the weight before forward."""

    def rank(group: ThreadGroup) -> list[bool]:
        model = Tower()
        is_here: list[bool] = []
        for module in (model, *model.blocks):  # at the root nothing is on its way yet
            module.register_forward_pre_hook(
                lambda module, _: is_here.append(next(module.parameters()).untyped_storage().nbytes() > 0)
            )
        strategy = wrapped(group, model)
        strategy.module(batch(0))
        return is_here

    assert on_threads(2, rank) == [[True] * 4] * 2


def backward_of_gradients(module: nn.Module, option: str) -> None:
    x = batch(0).requires_grad_()
    loss = module(x).square().sum()
    (torch.autograd.grad(loss, x, **{option: True})[0].square().sum() + loss).backward()


def backward_of_two_graphs(module: nn.Module, _: str) -> None:
    for loss in [module(batch(number)).sum() for number in (0, 1)]:
        loss.backward()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(backward_of_gradients, "create_graph=True", id="create_graph"),
        pytest.param(backward_of_gradients, "second backward since the last forward", id="retain_graph"),
        pytest.param(backward_of_two_graphs, "second backward since the last forward", id="two graphs"),
    ],
)
def test_a_second_backward_is_refused(call: Any, words: str, request: pytest.FixtureRequest) -> None:
    """A gradient penalty, gradients of the input that weigh the loss, a forward before the last one's backward: params
    are gone when backward comes again.
    """
    strategy = wrapped(SoloGroup(), Tower())
    with pytest.raises(InputError, match=rf"{words}.*use strategy='zero2'"):
        call(strategy.module, request.node.callspec.id)
    strategy.module(batch(0)).sum().backward()  # the next one is whole


def held(kind: Any) -> Tower:
    model = Tower()
    model.blocks = nn.ModuleList(Holding(block, kind) for block in model.blocks)
    model.last = nn.Sequential(Unheld(), model.last)
    return model


class Unheld(nn.Module):
    def forward(self, x: Any) -> Tensor:
        value: Tensor = x.value
        return value


def test_blocks_may_return_dataclasses_and_other_objects_are_refused() -> None:
    def run(group: ThreadGroup) -> dict[str, Tensor]:
        model = held(Hidden)
        return train(wrapped(group, model, units=list(model.blocks)), group)

    for whole in on_threads(2, run):
        names = {name.replace("block.", "").replace("last.1", "last"): value for name, value in whole.items()}
        for name, value in dense().items():
            torch.testing.assert_close(names[name], value, rtol=1e-10, atol=1e-10)
    model = held(Opaque)
    strategy = wrapped(SoloGroup(), model, units=list(model.blocks))
    with pytest.raises(InputError, match="returns a Opaque, in which no tensor is found; return tensors"):
        strategy.module(batch(0))


def test_units_are_whole_only_while_they_compute() -> None:
    def whole(strategy: FSDP) -> list[bool]:
        return [all(shards.is_unsharded for shards in unit.flat_shards) for unit in strategy._units]

    def rank(group: ThreadGroup) -> tuple[list[list[bool]], int, int]:
        model = Tower()
        strategy = wrapped(group, model, shares=(15, 6))
        seen = [whole(strategy)]
        for block in model.blocks:
            block.down.register_forward_hook(lambda *_: seen.append(whole(strategy)))
        loss = strategy.module(batch(0)).sum()
        seen.append(whole(strategy))
        loss.backward()
        seen.append(whole(strategy))
        held = sum(shards.held[group.rank].numel() for unit in strategy._units for shards in unit.flat_shards)
        kept = sum(param.untyped_storage().nbytes() for param in model.parameters())
        return seen, held, kept

    total = sum(param.numel() for param in Tower().parameters())
    for (seen, held, kept), share in zip(on_threads(2, rank), (15, 6), strict=True):
        assert seen[0] == seen[-1] == [False] * 4
        assert seen[1] == [True, True, True, False], "the first block, and the second on its way"
        assert seen[2] == [True, False, True, True]
        assert seen[3] == [True, False, True, True], "the last stays, and backward's next is on its way"
        assert seen[4] == [True, False, True, True]
        assert abs(held - total * share / 21) <= 4, "one element for each unit at most"
        assert kept == 0


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((1, 0, 2), "'fsdp': block blocks.1 was called where blocks.0 was due.*fsdp_units.*zero2"),
        ((0, 1), "'fsdp': block blocks.2 was not called.*fsdp_units.*zero2"),
        ((0, 0, 1), "once"),
    ],
)
def test_units_out_of_order_are_told(order: Sequence[int], words: str) -> None:
    strategy = wrapped(SoloGroup(), Tower(order))
    with pytest.raises(InputError, match=words):
        strategy.module(batch(0))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.jvp])
def test_a_transform_of_torch_func_around_the_model_is_refused(transform: Any) -> None:
    strategy, x = wrapped(SoloGroup(), Tower()), batch(0)

    def total(x: Tensor) -> Tensor:
        found: Tensor = strategy.module(x).sum()
        return found

    given: dict[Any, Any] = {torch.func.vjp: (total, x), torch.func.jvp: (total, (x,), (x,))}
    with pytest.raises(InputError, match=r"transform of torch.func.*zero2"):
        torch.func.grad(total)(x) if transform is torch.func.grad else transform(*given[transform])


def test_evaluation_leaves_nothing_unsharded_and_training_goes_on() -> None:
    def rank(group: ThreadGroup) -> tuple[Tensor, int]:
        strategy = wrapped(group, Tower())
        strategy.module(batch(0)).sum()  # a forward without a backward
        with torch.no_grad():
            found = strategy.module(batch(1))
        kept = sum(param.untyped_storage().nbytes() for param in strategy.module.parameters())
        strategy.module(batch(0)).sum().backward()
        return found, kept

    for found, kept in on_threads(2, rank):
        torch.testing.assert_close(found, Tower()(batch(1)))
        assert kept == 0


def test_halves_compute_and_whole_numbers_last() -> None:
    """Params are gathered in bfloat16, pieces and sums stay in fp32: near the dense run, and far finer than halves."""

    def rank(group: ThreadGroup) -> dict[str, Tensor]:
        model = Tower(dtype=torch.float32)
        seen: list[torch.dtype] = []
        model.blocks[0].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        found = train(wrapped(group, model, compute_dtype=torch.bfloat16, shares=(5, 2)), group)
        assert set(seen) == {torch.bfloat16}
        return found

    first, second = on_threads(2, rank)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for name, value in dense().items():
        assert first[name].dtype == torch.float32
        start = dict(Tower().state_dict())[name]
        moved = (value - start).norm()
        assert (first[name] - value).norm() < 0.25 * moved, name


def test_a_closed_model_is_the_users_again() -> None:
    def rank(group: ThreadGroup) -> dict[str, Tensor]:
        model = Tower()
        strategy = wrapped(group, model, shares=(5, 2))
        strategy.close()
        model(batch(0)).sum().backward()
        return dict(model.state_dict())

    for found in on_threads(2, rank):
        torch.testing.assert_close(found, dict(Tower().state_dict()), rtol=0, atol=0)


def test_shared_params_belong_to_the_root_and_units_do_not_overlap() -> None:
    model = Tower()
    assert blocks_of(model) == list(model.blocks)
    layers = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)]
    assert blocks_of(nn.Sequential(*layers)) == [layers[1][0]], "of a sequence inside"
    assert blocks_of(nn.Sequential(layers[0], nn.ReLU())) == [layers[0]]
    model.blocks[0].up.weight = model.blocks[1].up.weight
    root, first, *_ = params_by_unit(model, blocks_of(model))
    assert any(param is model.blocks[1].up.weight for param in root[1])
    assert first[0] == "blocks.0"
    assert all(param is not model.blocks[1].up.weight for param in first[1])
    with pytest.raises(InputError, match=r"the same Block.*fsdp_units.*zero2"):
        params_by_unit(model, [model.blocks[0], model.blocks])
    with pytest.raises(ValueError, match="requires a gradient"):
        wrapped(SoloGroup(), Tower().requires_grad_(False))
