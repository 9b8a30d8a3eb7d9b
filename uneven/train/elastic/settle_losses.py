"""The losses of a lost rank count in its epoch: those who are left agree on what every rank's loss meter held.

For exact policies, in which ranks tell each other with every step what their meters hold (`LossMeter.known`). In the
local ones the losses are in the sums of the rounds. Called by settler.py.

Invariant: `known` is that of the last step that counts, on every rank that has applied it. So the furthest one's is
right for all; whoever is left takes its own entry from there, and the furthest one those of the lost as well.
"""

from collections.abc import Sequence

import torch

from uneven.comm.gather import gather_rows
from uneven.comm.group import Group
from uneven.step.loss import LossMeter

Losses = list[tuple[float, float]]  # sum and count, of every rank's meter


def exchange_losses(meter: LossMeter, group: Group) -> None:
    """Before the first step, when a checkpoint may have left something in the meters; a collective."""
    meter.known = [(loss_sum, count) for loss_sum, count in gather_rows(group, meter.totals.tolist())]


def settled_losses(meter: LossMeter, before: Sequence[str], own: str, members: Sequence[str]) -> Losses:
    """By the furthest one, `own`: every member's, where `before` were those of the lost group. Newcomers have none."""
    known = dict(zip(before, meter.known, strict=False))  # a rank that was alone is told nothing
    known[own] = tuple(meter.totals.tolist())
    lost = [losses for member, losses in known.items() if member not in members]
    known[own] = (sum(each for each, _ in (known[own], *lost)), sum(each for _, each in (known[own], *lost)))
    return [known.get(member, (0.0, 0.0)) for member in members]


def take_losses(meter: LossMeter, settled: Losses, rank: int, *, are_taken: bool) -> None:
    """Go on with them. `are_taken`: they are in an epoch's mean already, though the furthest one may not know it."""
    meter.known = [(0.0, 0.0)] * len(settled) if are_taken else [(loss_sum, count) for loss_sum, count in settled]
    meter.totals.copy_(torch.tensor(meter.known[rank], dtype=torch.float64))
