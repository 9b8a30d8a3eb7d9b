"""What the network between machines carried: bytes per round or step, and how fast the rounds were.

The page, timeline.json and the summary of a run show it. A round's bytes are those of the tensors that are summed, on
the first rank of a machine, which speaks for it; its time is that from the last rank's joining to the finished sum.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from uneven.timeline.clock import Machine
from uneven.timeline.timeline import RankRound, Timeline, rank_rounds


@dataclass(frozen=True)
class Link:
    """One machine's. Per round with the local policies, per step with the exact ones; None where it was not recorded.

    `mb_per_s` is of a typical round. Gradients are summed while the devices compute, so steps have no speed: what can
    be said of them is `step_ms`, the communication that a step still waited for.
    """

    machine: Machine
    ranks: tuple[int, ...]
    rounds: int = 0
    round_bytes: int | None = None
    round_ms: float | None = None
    mb_per_s: float | None = None
    steps: int = 0
    step_bytes: int | None = None
    step_ms: float | None = None

    @property
    def total_bytes(self) -> int:
        return self.rounds * (self.round_bytes or 0) + self.steps * (self.step_bytes or 0)

    def to_json(self) -> dict[str, Any]:
        own = asdict(self)
        del own["machine"]
        place = {"machine": self.machine.number, "host": self.machine.host}
        return {**place, **own, "ranks": list(self.ranks), "total_bytes": self.total_bytes}


def machine_links(timeline: Timeline) -> list[Link]:
    """One per machine, in their order; none for a run on one machine, which has no network."""
    if timeline.is_one_machine:
        return []
    rounds = rank_rounds(timeline.events)
    traffic = {event.rank: event.fields for event in timeline.events if event.kind == "traffic"}
    seconds = {account.rank: account.seconds for account in timeline.accounts}
    found = []
    for machine in timeline.machines:
        ranks = tuple(lane.rank for lane in timeline.lanes_of(machine))
        own = [round_ for round_ in rounds if ranks and round_.rank == ranks[0] and round_.wire_bytes]
        sent = traffic.get(ranks[0], {}) if ranks else {}
        if own:
            found.append(_of_rounds(machine, ranks, own))
        elif sent.get("steps"):
            steps = int(sent["steps"])
            step_ms = 1e3 * seconds[ranks[0]]["communication"] / steps
            found.append(
                Link(machine, ranks, steps=steps, step_bytes=int(sent["payload_bytes"]) // steps, step_ms=step_ms)
            )
        else:
            found.append(Link(machine, ranks))
    return found


def _of_rounds(machine: Machine, ranks: tuple[int, ...], rounds: Sequence[RankRound]) -> Link:
    speeds = [speed for round_ in rounds if (speed := round_.mb_per_s) is not None]
    return Link(
        machine,
        ranks,
        rounds=len(rounds),
        round_bytes=sum(round_.wire_bytes for round_ in rounds) // len(rounds),
        round_ms=median((round_.averaged_ns - round_.joined_ns) / 1e6 for round_ in rounds),
        mb_per_s=median(speeds) if speeds else None,
    )


def describe_links(links: Sequence[Link]) -> list[str]:
    """A line for the end of a run: what went over the network, on the slowest machine; none for one machine."""
    rounds = [link for link in links if link.mb_per_s is not None and link.round_bytes is not None]
    if rounds:
        slowest = min(rounds, key=lambda link: link.mb_per_s or 0.0)
        size, speed = (slowest.round_bytes or 0) / 1e6, slowest.mb_per_s or 0.0
        return [f"  network: {short(size)} MB a round, {short(speed)} MB/s (slowest: {slowest.machine.host})"]
    steps = [link for link in links if link.step_bytes is not None]
    if not steps:
        return []
    slowest = max(steps, key=lambda link: link.step_ms or 0.0)
    size, waited_ms = (slowest.step_bytes or 0) / 1e6, slowest.step_ms or 0.0
    return [
        f"  network: {short(size)} MB a step, {short(waited_ms)} ms of it not hidden (most: {slowest.machine.host})"
    ]


def short(value: float) -> str:
    """Three digits, or all before the point; never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-3 else f"{value:.3f}"
