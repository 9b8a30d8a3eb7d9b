"""A simulated cluster, one average over its ranks, and what a finished run leaves: data for simulation.py."""

from dataclasses import dataclass, field
from typing import Any

from uneven.policy.round_report import RoundReport
from uneven.policy.windows import Decision

NEVER = float("inf")


@dataclass
class Cluster:
    """The truth, which the controller sees only through measured times. All times in ms."""

    slot_ms: list[float]
    total: int
    seed: int = 0
    jitter: float = 0.05  # of every slot and transfer, uniform, either way
    spikes: float = 0.0  # how often a slot takes three times as long
    wander: float = 0.0  # a factor that holds for some dozen slots: noise that a window does not average out
    stop: tuple[int, int, float] | None = None  # (rank, from this slot on, ms): stands still, once
    freeze: tuple[int, float, float] | None = None  # (rank, probability, ms): stands still before it asks for a slot
    change: tuple[int, int, float] | None = None  # (rank, from this slot on, factor of its time) ...
    recovers: int | None = None  # ... until this slot
    lies: list[float] | None = None  # factors of the times that ranks tell the others
    transfer_ms: float = 1.0
    touch_ms: float = 0.1  # a snapshot or a merge, of the rank's own time
    claim_ms: float = 0.1
    trip_ms: float | None = None  # of a claim, where ranks ask ahead; `claim_ms` is not used then
    trip_jitter: float = 0.0  # of every round trip, uniform, either way
    late: float = 0.0  # how often a reply takes 50 times as long
    lookahead: int = 0
    epoch: int | None = None  # slots, where every epoch's end is an event
    slot_size: int = 64
    short: int = 64  # samples of an epoch's last slot
    hides_ends: bool = False  # a stream without length: a rank is told of an epoch's end when it asks for a slot there

    @property
    def ranks(self) -> int:
        return len(self.slot_ms)

    def next_event(self, slot: int) -> int:
        epoch = self.epoch or self.total
        return min((slot // epoch + 1) * epoch, self.total)

    @property
    def epochs(self) -> int:
        return -(-self.total // (self.epoch or self.total))

    def epoch_samples(self, epoch: int) -> int:
        length = self.epoch or self.total
        return sum(self.samples(slot) for slot in range(epoch * length, min((epoch + 1) * length, self.total)))

    def samples(self, slot: int) -> int:
        is_last = (slot + 1) % (self.epoch or self.total) == 0
        return self.short if is_last else self.slot_size


@dataclass
class Round:
    """One average: on its way when all ranks have come, and there some time later."""

    due: int
    rows: dict[int, RoundReport] = field(default_factory=dict)
    entered_ms: dict[int, float] = field(default_factory=dict)
    merged_ms: dict[int, float] = field(default_factory=dict)
    met_ms: float = NEVER
    arrival_ms: float = NEVER
    waiting: list[int] = field(default_factory=list)
    handed: dict[int, int] = field(default_factory=dict)  # by each rank before it merged: the end of its slots
    free: int = 0  # first_free_slot
    print: int | None = None  # of the controller that has noted it
    anchor: float = 0.0
    counts: tuple[int, ...] = ()


@dataclass
class Outcome:
    """A finished run."""

    cluster: Cluster
    makespan_ms: float = 0.0
    useful_ms: float = 0.0
    claims: int = 0
    claims_ms: float = 0.0  # that ranks waited for claims
    most_lead: int = 0
    rounds: list[Round] = field(default_factory=list)
    work: list[tuple[int, float, float]] = field(default_factory=list)  # (slot, start, end)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)  # with the number of their round
    slots: dict[int, list[int]] = field(default_factory=dict)  # every rank's, in order
    state: dict[str, Any] = field(default_factory=dict)  # of the controller in the end
    start: int = 0
    stop: int = 0
    requested: set[int] = field(default_factory=set)  # slots that became events for a wish

    def next_event(self, slot: int) -> int:
        """As it was in the end."""
        event = self.cluster.next_event(slot)
        return min([event, *(one for one in self.requested if one > slot)])

    @property
    def efficiency(self) -> float:
        return self.useful_ms / (self.cluster.ranks * self.makespan_ms)

    @property
    def delays(self) -> list[float]:
        """From each rank's snapshot to its merge, in slots of the slowest rank."""
        slowest_ms = max(self.cluster.slot_ms)
        return [
            (one.merged_ms[rank] - at_ms) / slowest_ms for one in self.rounds for rank, at_ms in one.entered_ms.items()
        ]

    @property
    def periods_ms(self) -> list[float]:
        """Between the arrivals of two averages."""
        return [later.arrival_ms - one.arrival_ms for one, later in zip(self.rounds, self.rounds[1:], strict=False)]
