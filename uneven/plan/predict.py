"""From a probe to predictions: every policy on every sensible subset of the devices, by the product's own controllers
on a simulated clock. Pure: the same probe gives the same predictions.

What the probe measured calibrates the simulation: each rank's cost as it was beside sums, and beside rounds; the time
of a sum and of a round; and the speed of one exact and one local policy on all devices. The speeds of exact policies
are scaled to that. In the local ones the difference is a part of every round: slots are timed between rounds, and the
windows of a probe are shorter than those of a run, so a scale would count it several times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import cast

from uneven.config import EXACT_POLICIES
from uneven.hardware.system import CPU_PART
from uneven.plan.probe import Probe, RankProbe
from uneven.simulate.cluster import Cluster, Job, Policy, RankKind
from uneven.simulate.links import Link
from uneven.simulate.simulation import Simulated, simulate

ALONE = "alone"  # in place of a policy, where one device trains
EQUAL = "equal"  # PyTorch's DDP: equal batches, as a comparison
MOST_SLOTS = 600  # of an epoch that is simulated; a longer one is scaled
MOST_EPOCHS = 4
EVERY_SUBSET = 4  # up to so many devices
FAST_MB_S = 1e9  # a link on which bytes take no time
LEAST_MS = 1e-6
EXACT_KIND = (EQUAL, *EXACT_POLICIES)
SHARDED: dict[str, tuple[str, ...]] = {  # what a strategy divides among the ranks
    "ddp": (),
    "zero1": ("state",),
    "zero2": ("gradients", "state"),
    "fsdp": ("params", "gradients", "state"),
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How one policy would train the job on some of the devices. `ranks` are their places in the probe."""

    policy: str  # or ALONE
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    seconds_per_epoch: float
    samples_per_s: float
    efficiency: float  # over the sum of the devices' speeds
    gain: float  # over the fastest device alone
    shares: tuple[float, ...]
    total_s: float  # of the whole run, starting its processes included
    memory_bytes: tuple[int, ...]  # of params, gradients and optimizer state, per rank
    limits: str = ""
    is_candidate: bool = True  # the settings allow it; PyTorch's DDP is a comparison only

    @property
    def is_exact(self) -> bool:
        return self.policy in (ALONE, *EXACT_POLICIES)

    @property
    def name(self) -> str:
        return "torch DDP" if self.policy == EQUAL else self.policy


def predict(probe: Probe) -> list[Prediction]:
    """All predictions, the fastest first."""
    simulation = _Simulation(probe)
    found = [simulation.alone(rank) for rank in _distinct(probe, 1)]
    for size in range(2, len(probe.ranks) + 1):
        for ranks in _distinct(probe, size):
            if probe.job.shares is not None and not any(probe.job.shares[rank] for rank in ranks):
                continue  # nobody would train
            policies = [EQUAL, *probe.job.candidates]
            found += [simulation.together(policy, ranks) for policy in policies]
    return sorted(found, key=lambda one: (one.seconds_per_epoch, len(one.ranks)))


def _distinct(probe: Probe, size: int) -> Iterator[tuple[int, ...]]:
    """Subsets of so many ranks; of many devices the fastest ones, and of equal devices one choice."""
    order = sorted(range(len(probe.ranks)), key=lambda rank: -probe.ranks[rank].at_once)
    is_few = len(order) <= EVERY_SUBSET or size == 1
    subsets = combinations(range(len(order)), size) if is_few else [tuple(sorted(order[:size]))]
    seen = set()
    for ranks in subsets:
        names = tuple(probe.ranks[rank].device for rank in ranks)
        if names not in seen:
            seen.add(names)
            yield ranks


class _Simulation:
    """The clusters and jobs of one probe, for all of its predictions."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._all = tuple(range(len(probe.ranks)))
        self._best = max(probe.speed_alone(rank) for rank in probe.ranks)

    def alone(self, ranks: tuple[int, ...]) -> Prediction:
        (rank,) = ranks
        row, job = self._probe.ranks[rank], self._probe.job
        speed = self._probe.speed_alone(row)
        seconds = job.samples_per_epoch / speed
        return Prediction(
            policy=ALONE,
            ranks=ranks,
            devices=(row.device,),
            seconds_per_epoch=seconds,
            samples_per_s=speed,
            efficiency=1.0,
            gain=speed / self._best,
            shares=(1.0,),
            total_s=seconds * self._epochs(job.global_batch_size or job.batch_size),
            memory_bytes=(job.param_bytes + job.gradient_bytes + job.state_bytes,),
            is_candidate=job.min_ranks <= 1,
        )

    def together(self, policy: str, ranks: tuple[int, ...]) -> Prediction:
        probe, job = self._probe, self._probe.job
        found, seconds = self.calibrated(policy, ranks)
        speed = job.samples_per_epoch / seconds
        rows = self._ranks(ranks)
        slot = job.global_batch_size or job.batch_size * len(ranks)
        held = job.param_bytes + job.gradient_bytes + job.state_bytes
        is_exact = policy in EXACT_KIND
        return Prediction(
            policy=policy,
            ranks=ranks,
            devices=tuple(row.device for row in rows),
            seconds_per_epoch=seconds,
            samples_per_s=speed,
            efficiency=speed / sum(row.at_once for row in rows),
            gain=speed / self._best,
            shares=found.shares,
            total_s=probe.start_s + seconds * self._epochs(slot if is_exact else job.batch_size),
            memory_bytes=(held if is_exact else held + 2 * job.param_bytes,) * len(ranks),
            limits=found.limits,
            is_candidate=policy != EQUAL and len(ranks) >= job.min_ranks,
        )

    def _epochs(self, slot_samples: int) -> float:
        """Of the run, where max_steps may end it earlier."""
        job = self._probe.job
        if job.steps is None:
            return float(job.epochs)
        return min(float(job.epochs), job.steps * slot_samples / job.samples_per_epoch)

    def calibrated(self, policy: str, ranks: tuple[int, ...], moved: float = 1.0) -> tuple[Simulated, float]:
        """The simulated run, and the seconds of an epoch as they would be measured.

        `moved`: its sums move so many times as many bytes.
        """
        found, scale = self._simulated(policy, ranks, moved=moved)
        return found, found.seconds_per_epoch * scale * (self._exact_scale if policy in EXACT_KIND else 1.0)

    @cached_property
    def _exact_scale(self) -> float:
        """Of the seconds of exact policies: simulated over measured speed."""
        measured = self._probe.exact
        if measured is None or not measured.speed:
            return 1.0
        return self._simulated(measured.policy, self._all, is_long=True)[0].samples_per_s / measured.speed

    @cached_property
    def _more_round_ms(self) -> float:
        """Of a round of the local policies, beyond what was timed of it."""
        measured = self._probe.local
        if measured is None or not measured.speed:
            return 0.0
        found, _ = self._simulated(measured.policy, self._all, is_long=True)
        return 1e3 * (found.samples / measured.speed - found.seconds) / found.rounds if found.rounds else 0.0

    def _simulated(
        self, policy: str, ranks: tuple[int, ...], *, is_long: bool = False, moved: float = 1.0
    ) -> tuple[Simulated, float]:
        """The simulated run, and how many times longer an epoch is than the simulated one. `is_long`: one without
        an epoch's end, as those of a probe are, and with its windows."""
        job, is_exact = self._probe.job, policy in EXACT_KIND
        slot = (job.global_batch_size or job.batch_size * len(ranks)) if is_exact else job.batch_size
        slots = MOST_SLOTS if is_exact else MOST_SLOTS * len(ranks)
        probed = None if self._probe.local is None or not is_long else self._probe.local.anchor
        samples = slots * slot if is_long else min(job.samples_per_epoch, slots * slot)
        epochs = 1 if is_long else max(1, min(MOST_EPOCHS, job.epochs, slots * slot // (2 * samples)))
        simulated = Job(
            samples_per_epoch=samples,
            batch_size=min(job.batch_size, samples),
            global_batch_size=job.global_batch_size,
            epochs=float(epochs),
            param_bytes=int(moved * job.gradient_bytes) if is_exact else job.param_bytes,
            anchor=probed or job.anchor or "auto",
            max_anchor=probed or job.max_anchor,
            shares=None if job.shares is None else tuple(job.shares[rank] for rank in ranks),
            caps=self._caps(ranks, slot),
        )
        more_ms = 0.0 if is_exact or is_long else self._more_round_ms
        kinds = tuple(self._kind(row, policy, more_ms) for row in self._ranks(ranks))
        cluster = Cluster(kinds, (0,) * len(kinds), self._link(is_exact))
        return simulate(cluster, simulated, cast("Policy", policy)), job.samples_per_epoch / samples

    def _caps(self, ranks: Sequence[int], slot: int) -> tuple[int, ...] | None:
        """Samples of a step that each rank's memory holds; the whole step where that is not known."""
        found = [self._probe.ranks[rank].cap for rank in ranks]
        if not any(found):
            return None
        return tuple(slot if cap is None else max(1, cap * self._probe.job.accumulate) for cap in found)

    def _kind(self, row: RankProbe, policy: str, more_ms: float) -> RankKind:
        """The rank's costs as they were beside what the policy does; a round of it takes so much more."""
        factor, round_ms = 1.0, row.round_ms + more_ms
        if policy not in EXACT_KIND and row.slot_ms:
            factor = row.slot_ms / row.cost.time_ms(self._probe.job.batch_size)
        if policy == "async" and row.device.startswith("cpu") and row.threads == 1 and self._probe.local is not None:
            round_ms += self._probe.local.average_ms  # the background thread has no core of its own
        return RankKind(
            row.device,
            row.fixed_ms * factor,
            row.sample_ms * factor,
            memory_bytes=row.memory_bytes,
            round_ms=max(0.0, round_ms),
        )

    def _link(self, is_exact: bool) -> Link:
        """A link on which a sum of all ranks takes what was measured."""
        probe, ranks = self._probe, len(self._probe.ranks)
        total_ms, nbytes = (0.0 if probe.local is None else probe.local.average_ms), probe.job.param_bytes
        if is_exact:
            total_ms, nbytes = (0.0 if probe.exact is None else probe.exact.overhead_ms), probe.job.gradient_bytes
        moved = 2.0 * (ranks - 1) / ranks * nbytes
        rate = FAST_MB_S if total_ms < LEAST_MS or not moved else min(FAST_MB_S, moved / (1e3 * total_ms))
        return Link(rate, 0.0)

    def _ranks(self, ranks: Sequence[int]) -> list[RankProbe]:
        """Their costs; fewer CPU ranks have more cores each."""
        chosen = [self._probe.ranks[rank] for rank in ranks]
        cpus = sum(row.device.startswith("cpu") for row in chosen)
        return [self._with_cores(row, cpus) for row in chosen]

    def _with_cores(self, row: RankProbe, cpus: int) -> RankProbe:
        solo = self._probe.solo(row.device)
        if solo is None or not row.device.startswith("cpu") or solo.threads <= row.threads:
            return row
        threads = max(row.threads, solo.threads // cpus)
        part = (threads - row.threads) / (solo.threads - row.threads)
        if part <= 0.0:
            return row
        faster = (row.at_once + part * (self._probe.speed_alone(row) - row.at_once)) / row.at_once
        times = {name: getattr(row, name) / faster for name in ("fixed_ms", "sample_ms", "slot_ms")}
        return replace(row, threads=threads, at_once=row.at_once * faster, **times)


@dataclass(frozen=True, kw_only=True)
class StrategyPrediction:
    """An exact policy on all devices with a strategy: bytes of params, gradients and optimizer state per rank.

    The time is an estimate from the bytes that it moves; no strategy was run.
    """

    strategy: str
    policy: str
    seconds_per_epoch: float
    memory_bytes: tuple[int, ...]


def strategies(probe: Probe) -> list[StrategyPrediction]:
    """What each rank would hold, divided by the devices' memory where it is known, else equally."""
    job, ranks = probe.job, probe.ranks
    known = [_counted_memory(rank, ranks) for rank in ranks]
    parts = known if all(known) else [1.0] * len(ranks)
    shares = [part / sum(parts) for part in parts]
    if len(ranks) < 2 or not set(job.candidates) & set(EXACT_POLICIES):
        return []
    simulation, everyone = _Simulation(probe), tuple(range(len(ranks)))
    policy = "balanced" if "balanced" in job.candidates else "sync"
    sizes = {"params": job.param_bytes, "gradients": job.gradient_bytes, "state": job.state_bytes}
    # Over the bytes of a sum, which moves gradients twice: zero1 and zero2 scatter them and gather the params that were
    # trained, fsdp scatters them and gathers all params for forward and for backward.
    moved = {"fsdp": (job.gradient_bytes + 2 * job.param_bytes) / (2 * job.gradient_bytes) if job.gradient_bytes else 1}
    return [
        StrategyPrediction(
            strategy=name,
            policy=policy,
            seconds_per_epoch=simulation.calibrated(policy, everyone, moved.get(name, 1.0))[1],
            memory_bytes=tuple(
                int(sum(size * (share if what in sharded else 1.0) for what, size in sizes.items())) for share in shares
            ),
        )
        for name, sharded in SHARDED.items()
    ]


def _counted_memory(rank: RankProbe, ranks: Sequence[RankProbe]) -> float:
    """What a rank counts with where bytes are divided by memory; ranks on one device share it."""
    part = CPU_PART if rank.device.startswith("cpu") else 1.0
    sharing = sum(_place(other.device) == _place(rank.device) for other in ranks)
    return part * (rank.memory_bytes or 0) / sharing


def _place(device: str) -> str:
    """A device without its simulated speed, as in cpu@0.4."""
    return device.partition("@")[0]
