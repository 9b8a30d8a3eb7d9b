"""What counts as a step that is not finite, whose fault it is, and that nothing of such a step is left."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import ThreadGroup, on_threads
from uneven.parallel.reducer import Reducer
from uneven.step.eager import BeforeUpdate, EagerStep
from uneven.step.finite import (
    Backup,
    Cause,
    Fault,
    GradientWatch,
    OwnCheck,
    find_fault,
    largest_of,
    largest_unless_finite,
    total_count,
)
from uneven.step.graph import run_on_device
from uneven.step.precision import Precision

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")
GOOD = OwnCheck(loss=3.0, largest=2.0)


@pytest.mark.parametrize(
    ("checks", "fault"),
    [
        ([GOOD, GOOD], None),
        ([OwnCheck(), GOOD], None),
        ([GOOD, OwnCheck(loss=NAN)], Fault(1, Cause.LOSS_NAN)),
        ([OwnCheck(loss=-INF), OwnCheck(loss=NAN)], Fault(0, Cause.LOSS_INF)),
        ([GOOD, GOOD, OwnCheck(loss=1.0, largest=INF)], Fault(2, Cause.GRADIENT_INF)),
        ([OwnCheck(loss=1.0, largest=NAN), OwnCheck(loss=NAN)], Fault(1, Cause.LOSS_NAN)),
        ([OwnCheck(1.0, 4.0, 1.0, 1.0), OwnCheck(1.0, 0.0, 0.0, 0.0)], None),
        ([OwnCheck(0.0, 0.0, 0.0, 0.0), OwnCheck(1.0, 0.5, 0.0, 0.0)], None),
        ([OwnCheck(1.0, 4.0, 1.0, 1.0), OwnCheck(1.0, NAN)], Fault(1, Cause.COUNT)),
        ([OwnCheck(1.0, 4.0, 1.0, 1.0), OwnCheck(1.0, -1.0)], Fault(1, Cause.COUNT)),
        ([OwnCheck(), OwnCheck(1.0, 0.0, 0.0, NAN)], Fault(1, Cause.NO_COUNT)),
        ([OwnCheck(loss=1.0, largest=60.0), OwnCheck(loss=1.0, largest=70.0)], Fault(1, Cause.SUM)),
        ([], None),
    ],
)
def test_the_first_fault_is_named(checks: list[OwnCheck], fault: Fault | None) -> None:
    assert find_fault(checks, 100.0) == fault
    assert fault is None or f"rank {fault.rank}" in str(fault)


def test_a_scaler_judges_gradients_itself_but_not_losses() -> None:
    assert find_fault([OwnCheck(loss=1.0, largest=INF)], 1.0, checks_gradients=False) is None
    assert find_fault([OwnCheck(loss=NAN, largest=INF)], 1.0, checks_gradients=False) == Fault(0, Cause.LOSS_NAN)


def test_without_counts_there_is_no_total() -> None:
    assert total_count([GOOD]) is None
    assert total_count([GOOD, OwnCheck(1.0, 2.5), OwnCheck(1.0, 0.0)]) == 2.5


@pytest.mark.parametrize("value", [NAN, INF, -INF, -9.0])
def test_the_largest_gradient_is_what_it_says(value: float) -> None:
    some = [torch.ones(3), torch.zeros(0), torch.tensor([[1.0, value], [2.0, 3.0]])]
    expected = torch.tensor(abs(value), dtype=torch.float64)
    torch.testing.assert_close(largest_of(some), expected, equal_nan=True)
    assert float(largest_of([])) == 0.0


def test_an_empty_gradient_has_its_number_where_the_others_have_theirs() -> None:
    """A rank's part of a layer may be empty: the watch stacks its number with those of the other params."""
    assert largest_of([torch.zeros(0, 3, device="meta")]).device.type == "meta"


def test_a_watch_sees_the_gradients_of_every_backward_and_goes() -> None:
    model = nn.Linear(2, 1)
    watch = GradientWatch(model.parameters())
    (model(torch.tensor([[3.0, -5.0]])).sum()).backward()
    model.zero_grad()
    (2 * model(torch.tensor([[1.0, 1.0]])).sum()).backward()
    assert float(watch.take()) == 5.0
    assert float(watch.take()) == 0.0
    watch.close()
    model(torch.ones(1, 2)).sum().backward()
    assert float(watch.take()) == 0.0


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_each_rank_knows_its_own_largest_gradient_though_buckets_are_summed(max_bytes: int) -> None:
    def rank(group: ThreadGroup) -> list[list[float]]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
        reducer = Reducer(model.parameters(), group, max_bytes, num_stats=2)
        reducer.prepare()
        loss = model(torch.ones(1, 2).double()).sum()
        (loss * (0.0 if group.rank == 0 else NAN if group.rank == 1 else 1.0)).backward()
        own = reducer.finalize(lambda: [float(group.rank), 0.0], lambda: reducer.largest_gradient().unsqueeze(0))
        assert not all(param.grad.isfinite().all() for param in model.parameters()), "the sum is spoilt everywhere"
        return own

    for rows in on_threads(3, rank):
        assert [row[0] for row in rows] == [0.0, 1.0, 2.0]
        assert rows[0][1] == 0.0
        assert math.isnan(rows[1][1])
        assert rows[2][1] >= 1.0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.BatchNorm1d(6)
        self.net = nn.Linear(6, 4)
        self.register_buffer("table", torch.zeros((1 << 20) + 1), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


def step_of(optimizer: Any, train_step: Any, max_grad_norm: float | None = None) -> EagerStep:
    model = Normed()
    own = optimizer(model.parameters())
    return EagerStep(model, own, train_step, Precision("fp32", CPU), BeforeUpdate(max_grad_norm=max_grad_norm))


def mean_loss(model: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss * batch[2]


def loss_and_count(model: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return loss * batch[2], batch[3]


def batch_of(seed: int, factor: float = 1.0, count: float = 4.0) -> list[tuple[Any, int]]:
    own = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4, 6, generator=own, dtype=torch.float64), torch.randint(0, 4, (4,), generator=own)
    return [((x, y, factor, torch.tensor(count)), 4)]


def tensors_of(step: EagerStep) -> list[torch.Tensor]:
    state = [value for values in step.optimizer.state.values() for value in values.values()]
    buffers = [b for name, b in step.model.named_buffers() if name != "table"]
    return [t.detach().clone() for t in [*step.model.parameters(), *buffers, step.meter.totals, *state]
            if isinstance(t, torch.Tensor)]  # fmt: skip


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("train_step", "bad", "cause"),
    [
        (mean_loss, {"factor": NAN}, Cause.LOSS_NAN),
        (mean_loss, {"factor": INF}, Cause.LOSS_INF),
        (loss_and_count, {"factor": NAN}, Cause.LOSS_NAN),
        (loss_and_count, {"count": 0.0}, Cause.NO_COUNT),
        (loss_and_count, {"count": NAN}, Cause.COUNT),
    ],
)
def test_a_skipped_step_leaves_no_bit_of_itself(
    optimizer: str, max_grad_norm: float | None, train_step: Any, bad: dict[str, float], cause: Cause
) -> None:
    """Decided on the host, and on the device as in a captured step: both equal a loop without the bad batch."""
    on_host, on_device, without = (step_of(OPTIMIZERS[optimizer], train_step, max_grad_norm) for _ in range(3))
    for seed, changes in enumerate([{}, bad, {}, bad, bad, {}]):
        before = tensors_of(on_host)
        fault = on_host(batch_of(seed, **changes), 4)
        check = OwnCheck(*run_on_device(on_device, batch_of(seed, **changes), 4).tolist())
        assert on_device.fault_of([check]) == fault == (Fault(0, cause) if changes else None)
        if not changes:
            without(batch_of(seed), 4)
        elif seed:
            assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(on_host), strict=True))
    for other in (on_host, on_device):
        for mine, right in zip(tensors_of(other), tensors_of(without), strict=True):
            assert torch.equal(mine, right)


def test_one_bad_micro_batch_spoils_the_step() -> None:
    step = step_of(OPTIMIZERS["adamw"], mean_loss)
    before = tensors_of(step)
    assert step([*batch_of(0), *batch_of(1, NAN), *batch_of(2)], 12) == Fault(0, Cause.LOSS_NAN)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(step), strict=True))


def test_a_norm_that_overflows_is_no_fault_of_the_gradients() -> None:
    """As in torch: gradients whose norm is infinite are clipped to 0, and the step is taken."""
    step = step_of(OPTIMIZERS["adamw"], mean_loss, 0.5)
    step.model.float()
    step.optimizer = OPTIMIZERS["adamw"](step.model.parameters())
    (((x, y, _, count), samples),) = batch_of(0)
    assert step([((x.float(), y, 1e25, count), samples)], 4) is None
    assert step.optimizer.state


def test_large_and_expanded_buffers_are_not_copied_in_every_step() -> None:
    model = Normed()
    model.register_buffer("places", torch.arange(300).expand(40, -1))
    backup = Backup(model, torch.zeros(2))
    assert sum(t.numel() for t in backup._saved) < 100
    backup.save()
    backup.restore()


@pytest.mark.parametrize("factor", [1.0, NAN])
def test_sparse_and_complex_gradients_are_checked_too(factor: float) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 2, sparse=True)
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words(x).sum() + (self.phase * (1 + 1j)).abs().sum()

    model = Odd()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = EagerStep(model, optimizer, lambda m, x: m(x).nan_to_num() * factor, Precision("fp32", CPU))
    fault = step([(torch.tensor([1, 1, 3]), 3)], 3)
    assert (fault is None) == (factor == 1.0)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [fault is None] * 2


def test_with_a_loss_scaler_only_the_loss_decides() -> None:
    """Gradients that overflow are the scaler's: it skips the step and halves its scale. A bad loss it never sees."""
    model = nn.Linear(6, 4)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = EagerStep(model, optimizer, mean_loss, Precision("fp16", CPU), BeforeUpdate(max_grad_norm=0.5))
    ((x, y, _, count), _), = batch_of(0)  # fmt: skip
    scaler = step.precision.scaler
    scale = scaler.get_scale()
    assert step([((x.float(), y, NAN, count), 4)], 4) == Fault(0, Cause.LOSS_NAN)
    assert scaler.get_scale() == scale
    assert not optimizer.state
    assert step([((x.float(), y, 1e36, count), 4)], 4) is None
    assert scaler.get_scale() == scale / 2
    assert not optimizer.state
    assert step([((x.float(), y, 1.0, count), 4)], 4) is None
    assert optimizer.state
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, -2.0], [3.0]], 0.0),
        ([], 0.0),
        ([[3e38, 3e38], [1.0]], 3e38),  # finite, though their sum is not: the largest decides
        ([[1.0, NAN], [1.0]], NAN),
        ([[1.0], [INF, 1.0]], INF),
        ([[INF, -INF]], INF),
    ],
)
def test_a_finite_sum_proves_gradients_finite_and_another_proves_nothing(
    values: list[list[float]], expected: float
) -> None:
    found = float(largest_unless_finite([torch.tensor(one) for one in values]))
    assert found == pytest.approx(expected, nan_ok=True)
