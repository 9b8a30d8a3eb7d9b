"""Whether ranks still agree: each one's status in every gradient sum or round, and the checks on what others reported.

A rank that leaves its own loop early reports so in one last collective that carries no gradients. Every rank that
reads it raises, so no rank waits for one that will not come (tests/api/test_loop.py).

[Note: code per batch] In a slot a rank may have no samples: it gets no batch then, runs none of the user's code for it,
and still takes part in the step. So what a script does per batch beside its loss (a scheduler of its own, a clamp of
weights, a second optimizer step) happens less often on some ranks, and they drift apart. Devices round differently, but
apply the same sum of gradients, so that drift does not grow: a difference far beyond rounding is none of theirs.
GradientSync compares params and rates wherever ranks are made equal: before an evaluation, a checkpoint and the end.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from uneven.comm.collectives import broadcast_params
from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.errors import InputError, LeftLoopError, RankError
from uneven.parallel.batchnorm import synced_buffers
from uneven.step.schedule import RATE, read_setting


class RankStatus(IntEnum):
    """A small number, because it travels in the same tensor as the other statistics."""

    TRAINING = 0  # the rank goes on
    STOP_REQUESTED = 1  # Ctrl-C or a stop request reached this rank; all ranks stop after the same slot
    LEFT_EPOCH = 2  # the user's loop was left in the middle of an epoch
    FINISHED = 3  # the user's loop called finish()
    NOT_FINITE = 4  # the rank has had max_bad_steps bad steps in a row (local policies)
    SKIPS_REST = 5  # the user's loop leaves out the rest of the epoch: all ranks do


def check_status(statuses: Sequence[RankStatus], slot: int) -> None:
    """LeftLoopError naming the first rank that left before this slot."""
    for rank, status in enumerate(statuses):
        if status == RankStatus.LEFT_EPOCH:
            raise LeftLoopError(
                f"rank {rank} left its epoch at slot {slot}: every rank must train every batch that "
                "ddp.batches(epoch) yields, by one ddp.step(loss) each"
            )
        if status == RankStatus.FINISHED:
            raise LeftLoopError(f"rank {rank} called ddp.finish() before slot {slot} while other ranks still train")


def check_agreement(fingerprints: Sequence[int], when: str) -> None:
    """RankError naming a rank whose replicated state (policy, params) is not the same as rank 0's."""
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise RankError(f"rank {rank} differs from rank 0 {when}: {list(fingerprints)}")


TOLERANCE = 1e-4  # of a param's size; fp32 rounds by 6e-8 a step, in either direction
ROUNDINGS = 8  # that a type with fewer digits may be apart, in its own precision
ADVICE = (
    "a rank without samples in a step has no batch, so what a script does for every batch beside its loss does not "
    "happen there: give the scheduler to Ddp.setup or fit, change weights in a callback's on_step, which runs on every "
    "rank, and step the optimizer by ddp.step alone; an optimizer that draws random numbers draws others on each rank"
)


def check_replicas(group: Group, model: nn.Module, optimizer: Optimizer, *, has_own_rates: bool = True) -> None:
    """InputError on every rank where one differs from rank 0; a collective.

    Without `has_own_rates` this rank's are not compared: a schedule sets them before every step, and ranks may have
    begun another number of steps than they have taken.
    """
    named = [
        (name, p) for name, p in model.named_parameters() if p.numel() and (p.is_floating_point() or p.is_complex())
    ]
    rates = [rate if has_own_rates else math.nan for rate in read_setting(optimizer, RATE)]
    params = [param.detach() for _, param in named]
    rows = gather_rows(group, [*rates, *_sizes(params)])
    for rank, row in enumerate(rows):
        for first, own in zip(rows[0][: len(rates)], row[: len(rates)], strict=True):
            if math.isfinite(first + own) and not math.isclose(first, own, rel_tol=1e-9):
                raise InputError(f"rank {rank} has the learning rate {own:.6g}, rank 0 has {first:.6g}: {ADVICE}")
        if (place := _difference(rows[0][len(rates) :], row[len(rates) :], params)) is not None:
            raise InputError(f"rank {rank} has other values in {named[place][0]} than rank 0: {ADVICE}")


def take_first(group: Group, model: nn.Module) -> None:
    """Rank 0's params on every rank, and its buffers that are not averaged; a collective.

    A GPU and a CPU, or two kinds of GPU, round differently: one model is evaluated and saved.
    """
    equal = synced_buffers(model)
    buffers = (buffer for name, buffer in model.named_buffers() if name in equal)
    broadcast_params(group, (*model.parameters(), *buffers))


@torch.no_grad()
def _sizes(params: Sequence[Tensor]) -> list[float]:
    """The sums of all params, then of their absolute values; one copy to the host."""
    if not params:
        return []
    real = [torch.view_as_real(param) if param.is_complex() else param for param in params]
    device = real[0].device
    sums = [param.sum(dtype=torch.float64).to(device) for param in real]
    sizes = [param.abs().sum(dtype=torch.float64).to(device) for param in real]
    found: list[float] = torch.stack([*sums, *sizes]).tolist()
    return found


def _difference(first: Sequence[float], own: Sequence[float], params: Sequence[Tensor]) -> int | None:
    """The first param whose sums differ by more than rounding."""
    count = len(params)
    sizes = first[count:]
    # A param that swings around zero has roundings of where it has been, so the typical size of the model counts, too.
    typical = sum(sizes) / max(1, sum(param.numel() for param in params))
    for place, param in enumerate(params):
        precise = max(TOLERANCE, ROUNDINGS * torch.finfo(param.dtype).eps)
        allowed = precise * (sizes[place] + typical * param.numel())
        for mine, theirs in ((first[place], own[place]), (first[count + place], own[count + place])):
            if math.isfinite(mine) and not abs(mine - theirs) <= allowed:
                return place
    return None
