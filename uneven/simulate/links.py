"""Links, and how long a sum over all ranks takes: the formulas of the simulation, after what comm/ does.

With B bytes, n ranks, m machines, k ranks on a machine, rate r and delay d of a link:

- one machine (comm/exchange.py): every piece goes to its owner and its sum back: 2 (n-1)/n B/r + 2 d. Two ranks
  exchange their values, which is the same.
- several machines (comm/hierarchy.py), one stage after the other: up, the first rank of each machine reads the values
  of its others, (k-1) B/r + d; then Gloo's ring of these first ranks, 2 (m-1)/m B/r + 2 (m-1) d; down, all of a machine
  read the sum, B/r + d.
- "gloo" is one ring of all ranks, 2 (n-1)/n B/r + 2 (n-1) d, whose slowest link sets the pace of every step. Where k
  ranks of a machine stand one after the other in the ring, one stream enters the machine and one leaves it.
- "nccl" takes the better of that ring and a tree, 2 B/r + 2 log2(n) d, the logarithm rounded up.
"""

from collections import Counter
from dataclasses import dataclass

from uneven.errors import InputError

ROW_BYTES = 8 * 22  # a rank's report in a round, see policy/round_report.py
CLAIM_MS = 0.1  # a claim at a counter on the same machine


@dataclass(frozen=True, slots=True)
class Link:
    """What one end sends at the same time as it receives: MB per second (1e6 bytes), and the delay of a message."""

    rate_mb_s: float
    delay_ms: float

    def __post_init__(self) -> None:
        if not self.rate_mb_s > 0.0:
            raise InputError(f"rate_mb_s={self.rate_mb_s} of a link must be above 0")
        if not self.delay_ms >= 0.0:
            raise InputError(f"delay_ms={self.delay_ms} of a link must be 0 or more")


NO_LINK = Link(1e9, 0.0)


@dataclass(frozen=True, slots=True)
class Sum:
    """The time of a sum in ms: the part that grows with the bytes, the delays, and the part between machines."""

    bytes_ms: float = 0.0
    delay_ms: float = 0.0
    between_ms: float = 0.0

    @property
    def ms(self) -> float:
        return self.bytes_ms + self.delay_ms

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.bytes_ms + other.bytes_ms, self.delay_ms + other.delay_ms, self.between_ms + other.between_ms)


@dataclass(frozen=True, slots=True)
class Links:
    """The links among these ranks, whose machines are given in rank order."""

    machines: tuple[int, ...]
    inside: Link
    between: Link | None
    backend: str = "auto"

    def all_reduce(self, size: int) -> Sum:
        """Of so many bytes."""
        ranks = len(self.machines)
        if ranks == 1:
            return Sum()
        sizes = Counter(self.machines).values()  # ranks of each machine
        if self.backend != "auto":
            return self._flat(size, ranks, len(sizes))
        if len(sizes) == 1:
            return _ring(size, ranks, self.inside, 2)
        among = self._up_and_down(size, max(sizes))
        network = _ring(size, len(sizes), self.between or NO_LINK, 2 * (len(sizes) - 1))
        return among + Sum(network.bytes_ms, network.delay_ms, network.ms)

    def round(self, size: int) -> Sum:
        """Of a round: the reports of all ranks, then their params."""
        return self.all_reduce(ROW_BYTES * len(self.machines)) + self.all_reduce(size)

    def claim_ms(self, rank: int) -> float:
        """A claim's round trip: the counter is on the machine of rank 0."""
        if self.machines[rank] == self.machines[0] or self.between is None:
            return CLAIM_MS
        return CLAIM_MS + 2.0 * self.between.delay_ms

    def _up_and_down(self, size: int, most: int) -> Sum:
        if most == 1:
            return Sum()
        moved_ms = most * size / (1e3 * self.inside.rate_mb_s)
        return Sum(moved_ms, 2.0 * self.inside.delay_ms)

    def _flat(self, size: int, ranks: int, machines: int) -> Sum:
        link = self.inside if machines == 1 else self._slowest
        ring = _ring(size, ranks, link, 2 * (ranks - 1))
        if self.backend == "nccl":
            depth = (ranks - 1).bit_length()
            tree = Sum(2.0 * size / (1e3 * link.rate_mb_s), 2.0 * depth * link.delay_ms)
            ring = min(ring, tree, key=lambda one: one.ms)
        return Sum(ring.bytes_ms, ring.delay_ms, ring.ms if machines > 1 else 0.0)

    @property
    def _slowest(self) -> Link:
        between = self.between or NO_LINK
        return Link(min(between.rate_mb_s, self.inside.rate_mb_s), max(between.delay_ms, self.inside.delay_ms))


def _ring(size: int, members: int, link: Link, messages: int) -> Sum:
    moved = 2.0 * (members - 1) / members * size
    return Sum(moved / (1e3 * link.rate_mb_s), messages * link.delay_ms)
