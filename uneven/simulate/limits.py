"""What limits a simulated run, in words: the largest loss, and where it comes from."""

from collections.abc import Sequence

from uneven.simulate.cluster import Policy

SMALL = 0.02  # of all ranks' time: a loss below it is not worth a sentence


def describe_limit(
    policy: Policy,
    efficiency: float,
    losses: dict[str, float],
    between: float,
    names: Sequence[str],
    computes: Sequence[float],
    settled: int,
) -> str:
    """`losses`: the fraction of all ranks' time by state. `between`: of the sums' time, that between machines.

    `names` and `computes`: every rank's device, and the fraction of its time in which it computes. `settled`: failures
    and joins.
    """
    states = sorted(("communication", "wait", "settling", "idle"), key=lambda state: -losses[state])
    worst = states[0]
    share = f"{100 * losses[worst]:.0f} %"
    is_exact = policy in ("equal", "sync", "balanced")
    if losses[worst] < SMALL:
        return _rest(efficiency)
    if worst == "communication":
        link = "the link between machines" if between > 0.5 else "the links inside machines"
        each = "of each step" if is_exact else "of the time"
        return f"{link}: {share} {each} is communication"
    if worst == "settling":
        return f"failures and joins: {share} of the time is spent settling after {settled} of them"
    if worst == "idle":
        return f"devices that do not help: {share} of the ranks' time is spent without samples"
    slowest = max(range(len(computes)), key=lambda rank: computes[rank])
    return f"waiting for the slowest: {share} of the ranks' time; the busiest is rank {slowest} ({names[slowest]})"


def _rest(efficiency: float) -> str:
    if efficiency > 1.0 - 2.0 * SMALL:
        return "the devices themselves: less than 2 % is lost to anything else"
    return "fixed costs of small steps: no rank waits, but a sample takes longer than in a full batch"
