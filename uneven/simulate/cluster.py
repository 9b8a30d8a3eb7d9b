"""What is simulated: devices and what their steps cost, links, what goes wrong, and the job that is trained.

Plain data, checked when it is made: `uneven simulate` reads it from a file, `uneven plan` fills it in with what it
measured, tests write it down. The simulation changes none of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Literal

from uneven.errors import InputError
from uneven.simulate.links import Link

Policy = Literal["equal", "sync", "balanced", "cadence", "async"]
POLICIES: tuple[Policy, ...] = ("equal", "sync", "balanced", "cadence", "async")
BACKENDS = ("auto", "gloo", "nccl")


def _check_least(owner: object, least: int, names: Sequence[str], of: str = "") -> None:
    """InputError for a number that is smaller, or none; None and text are left to others."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, int | float) and not value >= least:
            raise InputError(f"{name}={value}{of} must be at least {least}")


@dataclass(frozen=True, slots=True)
class RankKind:
    """A kind of device: a step of n samples takes fixed_ms + n * sample_ms, and one of none takes no time.

    `jitter` is the relative standard deviation of a step's time. `round_ms` is what a round of the local policies takes
    of the rank's own time: snapshot and merge.
    """

    name: str
    fixed_ms: float
    sample_ms: float
    jitter: float = 0.0
    memory_bytes: int | None = None
    round_ms: float = 0.0

    def __post_init__(self) -> None:
        _check_least(self, 0, ("fixed_ms", "jitter", "round_ms"), f" of {self.name!r}")
        if not self.sample_ms > 0.0:
            raise InputError(f"sample_ms={self.sample_ms} of {self.name!r} must be above 0: what a sample takes, in ms")
        if self.jitter > 0.5:
            raise InputError(f"jitter={self.jitter} of {self.name!r} must be at most 0.5, as in 0.05 for 5 %")

    def time_ms(self, samples: int) -> float:
        """Of a step with so many samples."""
        return self.fixed_ms + samples * self.sample_ms if samples else 0.0

    def speed(self, batch_size: int) -> float:
        """Samples per second alone, at this batch size."""
        return 1e3 * batch_size / self.time_ms(batch_size)


@dataclass(frozen=True, slots=True)
class Cluster:
    """`machines` has the machine of each rank; `between` joins machines, and is needed where there are several.

    The rates are those of the whole cluster. A rank that fails is lost: the others settle for `settle_s` and go on. A
    join brings back the rank that was lost first, or where none is lost one more of a kind that is there. A slowdown
    makes one rank `slowdown_factor` times slower for `slowdown_s`.
    """

    ranks: tuple[RankKind, ...]
    machines: tuple[int, ...]
    inside: Link
    between: Link | None = None
    failures_per_hour: float = 0.0
    joins_per_hour: float = 0.0
    slowdowns_per_hour: float = 0.0
    slowdown_factor: float = 3.0
    slowdown_s: float = 30.0
    settle_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ranks:
            raise InputError("ranks=() of a cluster: at least one is needed")
        if len(self.machines) != len(self.ranks):
            raise InputError(f"machines={self.machines} must have one entry for each of the {len(self.ranks)} ranks")
        if self.between is None and len(set(self.machines)) > 1:
            raise InputError("between=None: a cluster of several machines needs the link between them")
        _check_least(self, 0, ("failures_per_hour", "joins_per_hour", "slowdowns_per_hour", "slowdown_s", "settle_s"))
        _check_least(self, 1, ("slowdown_factor",))

    def speed(self, batch_size: int) -> float:
        """The sum of all ranks' speeds alone, in samples per second."""
        return fsum(kind.speed(batch_size) for kind in self.ranks)

    def resized(self, ranks: int) -> "Cluster":
        """So many ranks in the same mix of kinds, on machines as full as these are on the mean.

        Failures, joins and slowdowns are as frequent per rank.
        """
        have = len(self.ranks)
        per_machine = max(1, round(have / len(set(self.machines))))
        return replace(
            self,
            ranks=tuple(self.ranks[rank * have // ranks] for rank in range(ranks)),
            machines=tuple(rank // per_machine for rank in range(ranks)),
            between=self.between or (self.inside if ranks > per_machine else None),
            failures_per_hour=self.failures_per_hour * ranks / have,
            joins_per_hour=self.joins_per_hour * ranks / have,
            slowdowns_per_hour=self.slowdowns_per_hour * ranks / have,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained. `global_batch_size`: of a step of the exact policies; None: batch_size times the ranks.

    `param_bytes` is what a step of the exact policies and a round of the local ones sum over all ranks. `overlap` is
    the part of a step's compute during which gradients already travel (0: they are sent after backward). `eval_ms` is
    spent at every epoch's end by all ranks. `max_anchor` bounds the anchor as in a run; None: as where a run leaves it
    out. `shares` and `caps` have an entry for each rank of the cluster: fixed shares of balanced and cadence (None: by
    speed), and the samples of a step that a rank's memory holds, which bound the shares of balanced.
    """

    samples_per_epoch: int
    batch_size: int
    global_batch_size: int | None = None
    epochs: float = 1.0
    param_bytes: int = 0
    anchor: "int | Literal['auto']" = "auto"
    eval_ms: float = 0.0
    backend: str = "auto"
    overlap: float = 0.0
    max_anchor: int | None = None
    shares: tuple[float, ...] | None = None
    caps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_least(self, 1, ("samples_per_epoch", "batch_size", "global_batch_size", "anchor", "max_anchor"))
        _check_least(self, 0, ("param_bytes", "eval_ms"))
        if not self.epochs > 0.0:
            raise InputError(f"epochs={self.epochs} must be above 0")
        if self.shares is not None and not (min(self.shares, default=0.0) >= 0.0 and any(self.shares)):
            raise InputError(f"shares={self.shares} must be 0 or more, and one of them above 0")
        if self.caps is not None and not min(self.caps, default=0) >= 1:
            raise InputError(f"caps={self.caps} must be at least 1 each")
        if not 0.0 <= self.overlap <= 1.0:
            raise InputError(f"overlap={self.overlap} must be between 0 and 1, a part of a step's compute")
        if self.backend not in BACKENDS:
            raise InputError(f"backend={self.backend!r} is not one of {', '.join(BACKENDS)}")
        if self.max_anchor is not None and self.anchor != "auto" and self.anchor > self.max_anchor:
            raise InputError(f"anchor={self.anchor} is above max_anchor={self.max_anchor}, which bounds it")

    def check_ranks(self, cluster: Cluster) -> None:
        """InputError where `shares` or `caps` do not go with the cluster's ranks; one that joins would have none."""
        for name in ("shares", "caps"):
            given = getattr(self, name)
            if given is not None and len(given) != len(cluster.ranks):
                raise InputError(f"{name}={given} must have one entry for each of the {len(cluster.ranks)} ranks")
            if given is not None and cluster.joins_per_hour:
                raise InputError(
                    f"{name}={given} with joins_per_hour: a rank that joins has none; leave one of them out"
                )

    def shares_of(self, ranks: Sequence[int]) -> tuple[float, ...] | None:
        """The fixed shares of those that are left; None where none are fixed, or only ranks without samples remain."""
        left = () if self.shares is None else tuple(self.shares[rank] for rank in ranks)
        return left if any(left) else None

    def slot_samples(self, policy: Policy, ranks: int) -> int:
        """Samples of a slot: one rank's batch in the local policies, a step of all ranks in the exact ones."""
        if policy in ("cadence", "async"):
            return self.batch_size
        return self.global_batch_size or self.batch_size * ranks
