"""FSDP with frozen params: when they are whole, what is gathered for them, and that training stays exact."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.fsdp_nets import ROWS, STEPS, Tower, adapted, batch, make_adamw
from tests.ranks import ThreadGroup, on_processes, on_threads
from uneven.bench.models.gpt import Gpt, Size
from uneven.bench.strategies.memory import LiveBytes
from uneven.comm.group import Group, SoloGroup
from uneven.errors import InputError
from uneven.parallel.activations import Activations
from uneven.parallel.fsdp import FSDP
from uneven.parallel.strategy import on_host

WIDE = Size(width=96, blocks=12, heads=4, vocabulary=32, window=16)
Loss = Callable[[nn.Module, Tensor], Tensor]


def loss_of(module: nn.Module, rows: Tensor) -> Tensor:
    found: Tensor = module(rows).square().sum() / ROWS
    return found


def of_two_forwards(module: nn.Module, rows: Tensor) -> Tensor:
    """One backward for both: a block's frozen params are needed until both are through with it."""
    return loss_of(module, rows) + loss_of(module, rows.flip(1))


def after_a_lost_forward(module: nn.Module, rows: Tensor) -> Tensor:
    loss_of(module, rows.flip(1))  # no backward comes to it
    return loss_of(module, rows)


def from_its_input(module: nn.Module, rows: Tensor) -> Tensor:
    """The input has a gradient, so that backward comes to all blocks."""
    return loss_of(module, rows.requires_grad_())


def train(
    group: Group, make: Callable[[], nn.Module], loss: Loss, counts: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """`counts`: samples of each rank, by micro-batch of a step."""
    strategy = FSDP(make(), trained_by_adamw, group, shares=(3.0, 1.0)[: group.world_size])
    for step in range(STEPS):
        for place, rows in enumerate(batch(step).split([sum(counts) for counts in counts])):
            own = rows.split(list(counts[place]))[group.rank]
            if len(own):
                loss(strategy.module, own).backward()
            else:
                strategy.backward_without_samples()
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    return strategy.full_state().model


def dense(make: Callable[[], nn.Module], loss: Loss) -> dict[str, Tensor]:
    model = make()
    optimizer = trained_by_adamw(model.parameters())
    for step in range(STEPS):
        loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(on_host(model.state_dict()))


def trained_by_adamw(params: Any) -> torch.optim.Optimizer:
    return make_adamw([param for param in params if param.requires_grad])


def tower(first: int, saves: bool | str = False, activations: str = "keep") -> nn.Module:
    model = adapted(Tower(saves=saves), first)
    Activations(model, activations)
    return model


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        pytest.param(partial(tower, 0), loss_of, id="all blocks"),
        pytest.param(partial(tower, 2), loss_of, id="the last block"),
        pytest.param(partial(tower, 1, True), loss_of, id="checkpoints"),
        pytest.param(partial(tower, 1, "behind"), loss_of, id="checkpoints, behind"),
        pytest.param(partial(tower, 2, "all"), loss_of, id="one checkpoint"),
        pytest.param(partial(tower, 1, False, "recompute"), loss_of, id="recompute"),
        pytest.param(partial(tower, 0, False, "offload"), loss_of, id="offload"),
        pytest.param(partial(tower, 0), of_two_forwards, id="two forwards"),
        pytest.param(partial(tower, 1), after_a_lost_forward, id="a lost forward"),
        pytest.param(partial(tower, 2), from_its_input, id="from its input"),
    ],
)
@pytest.mark.parametrize("counts", [((4, 4),), ((8, 0),), ((3, 2), (0, 3))], ids=["both", "one", "accumulated"])
def test_adapters_train_as_in_one_process(
    make: Callable[[], nn.Module], loss: Loss, counts: Sequence[Sequence[int]]
) -> None:
    if loss in (of_two_forwards, after_a_lost_forward) and 0 in (count for ranks in counts for count in ranks):
        counts = ((5, 3),)  # all ranks run the same number of forwards
    expected = dense(make, loss)
    for found in on_threads(2, lambda group: train(group, make, loss, counts)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class EncoderDecoder(nn.Module):
    """What the first block returns goes into all others."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.blocks = nn.ModuleList(nn.Bilinear(3, 3, 3) for _ in range(5))
        self.double().requires_grad_(False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=own, dtype=torch.float64) * 0.3)
        self.blocks[0].requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        encoded = found = self.blocks[0](x, x)
        for block in list(self.blocks)[1:]:
            found = block(found, encoded)
        return found


def test_an_input_that_goes_to_several_blocks_keeps_none_of_them() -> None:
    expected = dense(EncoderDecoder, loss_of)
    for found in on_threads(2, lambda group: train(group, EncoderDecoder, loss_of, ((5, 3),))):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert max(whole_in_backward(SoloGroup(), EncoderDecoder(), batch(0))) <= 3


def whole_in_backward(group: Group, model: nn.Module, rows: Tensor) -> list[int]:
    """How many blocks are whole whenever a block's output has its gradient."""
    strategy = FSDP(model, trained_by_adamw, group)
    seen: list[int] = []

    def look(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda _: seen.append(sum(unit.is_here for unit in strategy._units[1:])))

    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(look)
    loss_of(strategy.module, rows).backward()
    return seen


def test_blocks_below_the_first_adapter_are_not_gathered_for_backward() -> None:
    """Found out in the first backward, also for a rank without samples that only takes part."""

    def payloads(group: ThreadGroup) -> list[int]:
        strategy = FSDP(tower(2), trained_by_adamw, group)
        found = []
        for step, has_samples in enumerate((True, group.rank == 0, True, group.rank == 1)):
            before = group.traffic.payload_bytes
            if has_samples:
                loss_of(strategy.module, batch(step)).backward()
            else:
                strategy.backward_without_samples()
            found.append(group.traffic.payload_bytes - before)
        return found

    block = sum(param.nbytes for param in Tower().blocks[0].parameters())
    for found in on_threads(2, payloads):
        assert found[0] - found[1] == 2 * block
        assert len(set(found[1:])) == 1


def test_a_checkpoint_over_blocks_that_were_left_out_is_refused() -> None:
    model = adapted(Tower(), 2)
    assert isinstance(model, Tower)
    strategy = FSDP(model, trained_by_adamw, SoloGroup())
    loss_of(model, batch(0)).backward()
    model.saves = "all"
    with pytest.raises(InputError, match=r"recomputes blocks\.0.*around each block alone"):
        loss_of(strategy.module, batch(1)).backward()


def peak(group: Group, shares: tuple[float, float]) -> tuple[int, int]:
    """Live bytes of a step, and what may be held at most."""
    torch.manual_seed(0)
    tokens = torch.randint(0, WIDE.vocabulary, (2, WIDE.window))
    whole = adapted(Gpt(WIDE))
    optimizer = trained_by_adamw(whole.parameters())
    _step(whole, optimizer, tokens)
    with LiveBytes() as live:
        before = live._count()
        _step(whole, optimizer, tokens)
    activations = live.peak - before
    model = adapted(Gpt(WIDE))
    del whole, optimizer
    gc.collect()
    params = sum(param.nbytes for param in model.parameters())
    strategy = FSDP(model, trained_by_adamw, group, shares=shares)
    _step(strategy.module, strategy.optimizer, tokens)
    units = [sum(param.nbytes for param in block.parameters()) for block in model.blocks]  # type: ignore[union-attr]
    gc.collect()
    held = LiveBytes()._count()
    with LiveBytes() as live:
        _step(strategy.module, strategy.optimizer, tokens)
    return live.peak - held, 4 * max(units) + (params - sum(units)) + activations


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def uneven_peak(group: Group) -> tuple[int, int]:
    return peak(group, (3.0, 1.0))


def even_peak(group: Group) -> tuple[int, int]:
    return peak(group, (1.0, 1.0))


@pytest.mark.parametrize("what", ["uneven_peak", "even_peak"])
def test_at_most_four_blocks_are_whole_at_a_time(what: str, tmp_path: Path) -> None:
    for found, limit in on_processes(2, f"{__name__}:{what}", tmp_path):
        assert found <= limit
