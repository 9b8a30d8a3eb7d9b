"""Which of the predictions to take, and why, in one or two sentences. Pure.

The rule: the least time for the whole run. One device is preferred where several gain less than a prediction can tell;
an exact policy is preferred to a local one within a few percent, since its params are those of one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from uneven.plan.predict import ALONE, EQUAL, Prediction
from uneven.plan.probe import Probe

WORTH_IT = 1.05  # several devices must be predicted so much faster than one
EXACT_WITHIN = 0.03  # an exact policy may take so much longer than a local one
FEWER_WITHIN = 0.02  # and fewer devices than more of them
DISTURBED = "other programs used the same cores meanwhile: plan again when the machine is idle"


@dataclass(frozen=True)
class Advice:
    """What to do: a policy on some devices, or one device."""

    policy: str  # ALONE where one device is enough
    devices: tuple[str, ...]
    ranks: tuple[int, ...]
    reason: str

    @property
    def is_one_device(self) -> bool:
        return self.policy == ALONE


def advise(probe: Probe, predictions: Sequence[Prediction]) -> Advice:
    """The choice among what the settings allow."""
    allowed = [one for one in predictions if one.is_candidate]
    solos = [one for one in allowed if one.policy == ALONE]
    joint = [one for one in allowed if one.policy != ALONE]
    alone = min(solos or [one for one in predictions if one.policy == ALONE], key=lambda one: one.total_s)
    if not joint:
        return _take(alone, f"one device, {alone.devices[0]}: it is the only one")
    best = min(joint, key=lambda one: one.total_s)
    if solos and alone.total_s <= WORTH_IT * best.total_s:
        return _take(alone, _why_one(probe, alone, best))
    near = [one for one in joint if one.is_exact and one.total_s <= (1.0 + EXACT_WITHIN) * best.total_s] or [
        one for one in joint if one.total_s <= (1.0 + FEWER_WITHIN) * best.total_s
    ]
    fewest = min(len(one.devices) for one in near)
    quick = [one for one in near if one.total_s <= (1.0 + FEWER_WITHIN) * min(n.total_s for n in near)]
    pool = [one for one in quick if len(one.devices) == fewest] or quick
    chosen = min(pool, key=lambda one: one.total_s)
    return _take(chosen, _why_several(probe, chosen, best, alone, joint))


def _take(chosen: Prediction, reason: str) -> Advice:
    return Advice(chosen.policy, chosen.devices, chosen.ranks, reason)


def _why_one(probe: Probe, alone: Prediction, best: Prediction) -> str:
    """By the speed of training, or by what else decides: the start of the processes, or more samples in each step."""
    ratio = best.gain / alone.gain
    trained_s = best.total_s - probe.start_s
    if alone.total_s / max(trained_s, 1e-9) > WORTH_IT:
        return (
            f"one device, {alone.devices[0]}: the whole run takes {alone.total_s:.1f} s on it, and on "
            f"{','.join(best.devices)} starting the processes alone takes {probe.start_s:.1f} s"
        )
    if ratio > WORTH_IT:  # as many steps, but larger ones
        return (
            f"one device, {alone.devices[0]}: the whole run takes {alone.total_s:.1f} s on it, and {best.total_s:.1f} "
            f"s with {best.name} on {','.join(best.devices)}, where a step has more samples"
        )
    cause = f" ({best.limits})" if best.limits else ""
    return (
        f"one device, {alone.devices[0]}: {best.name} on {','.join(best.devices)} would be {ratio:.2f}x as fast{cause}"
    )


def _why_several(
    probe: Probe, chosen: Prediction, best: Prediction, alone: Prediction, joint: Sequence[Prediction]
) -> str:
    taken, there = len(chosen.devices), len(probe.ranks)
    where = f"{taken} of {there} devices" if taken < there else "both" if taken == 2 else f"{taken} devices"
    text = f"{chosen.name} on {where}: {chosen.gain:.2f}x the fastest device alone ({alone.devices[0]})"
    same = [one for one in joint if one.ranks == chosen.ranks and one.policy != chosen.policy]
    if chosen.is_exact and best.policy != chosen.policy:
        return f"{text}, with exact steps; {best.name} would give {best.gain:.2f}x, too little more to give those up"
    others = [one for one in same if one.is_exact != chosen.is_exact]
    if not others:
        return text
    other = max(others, key=lambda one: one.gain)
    exact = " and exact steps" if other.is_exact else ""
    return f"{text}; {other.name} would give {other.gain:.2f}x{exact}"


def notes(probe: Probe, predictions: Sequence[Prediction]) -> list[str]:
    """What the reader should know beside the table."""
    lines = list(probe.notes)
    if probe.is_disturbed:
        lines.append(DISTURBED)
    equal = [one for one in predictions if one.policy == EQUAL and len(one.ranks) == len(probe.ranks)]
    if equal:
        lines.append(f"equal batches as in PyTorch's DDP: {equal[0].gain:.2f}x the fastest device alone")
    return lines
