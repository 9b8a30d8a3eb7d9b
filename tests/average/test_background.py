"""The round trip of an average, on threads: against a dense computation, and with everything that can go wrong."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.average.sides import Side, on_ranks
from uneven.errors import NotFiniteError

WEIGHTS = {2: (3.0, 1.0), 3: (3.0, 1.0, 7.0), 4: (2.0, 9.0, 5.0, 1.0)}


def dense(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([w * part.double() for w, part in zip(weights, parts, strict=True)]).sum(0) / sum(weights)


# The average itself.


@pytest.mark.parametrize("size", WEIGHTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_average_is_weighted_and_replicas_end_bit_equal(size: int, dtype: torch.dtype, tolerance: float) -> None:
    weights = WEIGHTS[size]

    def body(side: Side) -> tuple[Tensor, Tensor]:
        before = side.params
        side.round(weights[side.rank])
        return before, side.params

    found = on_ranks(size, body, dtype=dtype)
    expected = dense([before for before, _ in found], weights)
    for _, after in found:
        assert after.dtype == dtype
        torch.testing.assert_close(after.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(after, found[0][1])


def test_work_done_while_the_average_travels_is_kept() -> None:
    weights = WEIGHTS[3]

    def body(side: Side) -> tuple[Tensor, Tensor, Tensor]:
        snapshot = side.params
        side.average.start(weights[side.rank], list)
        side.work(10.0 * side.rank + torch.arange(18.0))
        now = side.params
        side.average.finish(is_unchanged=False)
        return snapshot, now, side.params

    found = on_ranks(3, body)
    average = dense([snapshot for snapshot, _, _ in found], weights)
    for snapshot, now, after in found:
        torch.testing.assert_close(after, now + average - snapshot, rtol=1e-12, atol=1e-12)


def test_over_many_rounds_not_a_step_of_any_rank_is_lost() -> None:
    """With equal weights the mean of the replicas moves by the mean of all work, however late averages are merged."""

    def body(side: Side) -> tuple[Tensor, Tensor, Tensor]:
        start, steps = side.params, torch.Generator().manual_seed(100 + side.rank)
        done = torch.zeros_like(start)
        for _ in range(6):
            for in_flight in (False, True):
                change = torch.randn(len(start), generator=steps, dtype=torch.float64)
                side.work(change)
                done += change
                if not in_flight:
                    side.average.start(1.0, list)
            side.average.finish(is_unchanged=False)
        side.round(1.0)
        return start, done, side.params

    found = on_ranks(3, body)
    expected = dense([start + done for start, done, _ in found], (1, 1, 1))
    for _, _, after in found:
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(after, found[0][2])


def test_a_rank_that_trained_nothing_takes_the_average_itself_for_adding_would_round() -> None:
    def body(side: Side, is_unchanged: bool) -> Tensor:
        side.work(1e6 * (side.rank - 1))  # far from an average near 0: average - snapshot loses its last bits
        side.round(1.0, is_unchanged=is_unchanged)
        return side.params

    equal = on_ranks(3, lambda side: body(side, True), dtype=torch.float32)
    assert all(torch.equal(params, equal[0]) for params in equal)
    added = on_ranks(3, lambda side: body(side, False), dtype=torch.float32)
    assert not all(torch.equal(params, added[0]) for params in added), "the case shows nothing"


def test_a_rank_of_weight_zero_counts_for_nothing_and_takes_the_average() -> None:
    def body(side: Side) -> tuple[Tensor, Tensor]:
        before = side.params
        side.round(float(side.rank))
        return before, side.params

    found = on_ranks(3, body)
    expected = dense([before for before, _ in found], (0, 1, 2))
    for _, after in found:
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)


def test_when_nobody_trained_nothing_changes_and_the_rows_arrive_all_the_same() -> None:
    def body(side: Side) -> None:
        side.model.running_mean.fill_(3.0 + side.rank)
        before = side.params
        arrived = side.round(0.0, [5.0 + side.rank])
        assert arrived.rows == [[5.0], [6.0]]
        assert arrived.divergence == 0.0
        assert torch.equal(side.params, before)
        assert side.model.running_mean.tolist() == [3.0 + side.rank] * 2
        assert side.group.traffic.collectives == 1, "params need not travel"

    on_ranks(2, body, make_model=lambda: nn.BatchNorm1d(2))


def test_rows_arrive_in_rank_order_and_may_change_their_length() -> None:
    def body(side: Side) -> list[list[list[float]]]:
        rows = [[side.rank + 0.5, 1e15 + side.rank], [-1.0 * side.rank], []]
        return [side.round(1.0, row).rows for row in rows]

    for found in on_ranks(3, body):
        assert found == [
            [[0.5, 1e15], [1.5, 1e15 + 1], [2.5, 1e15 + 2]],
            [[0.0], [-1.0], [-2.0]],
            [[], [], []],
        ]


def test_divergence_is_each_ranks_own_distance_from_the_average() -> None:
    def body(side: Side) -> tuple[Tensor, float, Tensor]:
        before = side.params
        side.average.start(1.0, list)
        side.work(100.0)  # after the snapshot: it has no part in it
        return before, side.average.finish(is_unchanged=False).divergence, side.params

    found = on_ranks(2, body)
    average = dense([before for before, _, _ in found], (1, 1))
    for before, divergence, _ in found:
        assert divergence == pytest.approx(float((before - average).norm() / average.norm()), rel=1e-12)
        assert divergence > 0.1


def test_a_round_is_two_sums_and_params_travel_once() -> None:
    def body(side: Side) -> None:
        side.round(1.0, [1.0, 2.0])
        assert side.average.traffic.collectives == 2
        row = 2 + 2  # with its weight, and whether it is broken
        assert side.average.traffic.payload_bytes == 8 * 2 * row + 4 * 18

    on_ranks(2, body, dtype=torch.float32)


# Buffers and state travel along.


def test_batchnorm_statistics_are_those_of_the_pooled_samples() -> None:
    own = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 2, generator=own, dtype=torch.float64) * n + 3 * n for n in (7, 2, 12)]

    def body(side: Side) -> tuple[Tensor, Tensor]:
        side.model.running_mean.copy_(parts[side.rank].mean(0))
        side.model.running_var.copy_(parts[side.rank].var(0, correction=0))
        side.average.start(float(len(parts[side.rank])), list)
        side.model.running_mean.add_(1.0)  # buffers are overwritten, what was added in flight is not kept
        side.average.finish(is_unchanged=False)
        return side.model.running_mean, side.model.running_var

    pooled = torch.cat(parts)
    for mean, variance in on_ranks(3, body, make_model=lambda: nn.BatchNorm1d(2)):
        torch.testing.assert_close(mean, pooled.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(variance, pooled.var(0, correction=0), rtol=1e-12, atol=1e-12)


def test_a_buffer_that_first_changed_in_flight_is_averaged_by_the_next_round() -> None:
    def body(side: Side) -> float:
        side.average.start(1.0, list)
        side.model.running_mean.fill_(2.0 * side.rank)  # an observer that calibrates itself once, say
        side.average.finish(is_unchanged=False)
        assert side.model.running_mean.item() == 2.0 * side.rank, "no rank had changed it"
        side.round(1.0)
        return side.model.running_mean.item()

    assert on_ranks(2, body, make_model=lambda: nn.BatchNorm1d(1)) == [1.0, 1.0]


@pytest.mark.parametrize("with_state", [True, False])
def test_momentum_is_averaged_only_when_asked_for(with_state: bool) -> None:
    weights = WEIGHTS[2]

    def body(side: Side) -> tuple[Tensor, Tensor]:
        side.model(torch.full((1, 5), 1.0 + side.rank, dtype=torch.float64)).sum().backward()
        side.optimizer.step()
        buffer = side.optimizer.state[side.model.weight]["momentum_buffer"]
        before = buffer.clone()
        side.round(weights[side.rank])
        return before, buffer

    found = on_ranks(2, body, with_state=with_state)
    average = dense([before for before, _ in found], weights)
    assert not torch.allclose(found[0][0], average), "the case shows nothing"
    for before, after in found:
        torch.testing.assert_close(after, average if with_state else before, rtol=1e-12, atol=1e-12)


# Params that are not finite: steps that would make them so are skipped, so this is the second line of defence.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_params_that_are_not_finite_end_the_run_everywhere(value: float) -> None:
    def body(side: Side) -> None:
        before = side.params
        if side.rank == 1:
            with torch.no_grad():
                side.model.weight[2, 3] = value
        with pytest.raises(NotFiniteError, match=r"rank 1 has params or buffers that are not finite"):
            side.round(1.0)
        assert side.rank == 1 or torch.equal(side.params, before), "nothing wrong was merged"

    on_ranks(3, body, verify=True)


def test_buffers_that_became_no_numbers_end_it_too_but_a_mask_may_be_infinite() -> None:
    def body(side: Side) -> None:
        side.model.running_mean.fill_(4.0 if side.rank else float("nan"))
        with pytest.raises(NotFiniteError, match="rank 0"):
            side.round(1.0)

    on_ranks(2, body, make_model=lambda: nn.BatchNorm1d(1))

    def masked() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        return model

    on_ranks(2, lambda side: side.round(1.0), make_model=masked)


def test_large_params_are_finite_though_their_sum_is_not() -> None:
    def body(side: Side) -> None:
        with torch.no_grad():
            for param in side.model.parameters():
                param.fill_(3e38)
        assert not side.params.sum().isfinite()
        side.round(1.0)

    on_ranks(2, body, dtype=torch.float32)
