"""Steps of the exact policies on a simulated clock: every step ends when the slowest rank has, and with one sum.

Drives the policies of policy/exact.py as train/gradient_sync.py does: shares for a slot, then every rank's own time.
What is left out: see docs/simulate.md. With many ranks and steps one simulated step stands for several alike, so
that a run of any size takes about MOST_RANK_STEPS draws; the policy then sees fewer of them.
"""

from uneven.policy.exact import Balanced, ExactPolicy, Fixed
from uneven.policy.finish import Cost
from uneven.simulate.cluster import Policy
from uneven.simulate.members import Generation
from uneven.simulate.tally import COMMUNICATION, COMPUTE, IDLE, WAIT

MOST_RANK_STEPS = 2_000_000
FIRST_STEPS = 64  # are simulated one by one, whatever their number


class ExactRun:
    """One generation: the same ranks from slot `position` on. `advance` takes a step, or several alike."""

    def __init__(
        self, generation: Generation, policy: Policy, most_steps: float, before: "ExactRun | None" = None
    ) -> None:
        """`before`: the generation before it, whose measured costs its ranks keep."""
        self.generation = generation
        self.axis = generation.axis
        self.ranks = generation.ranks
        self._tally = generation.tally
        self.position: int = 0 if before is None else before.position
        self._sum = generation.links.all_reduce(generation.job.param_bytes)
        self._speed = generation.speed
        ranks = self.ranks
        self.policy: ExactPolicy = self._balanced(before) if policy == "balanced" else Fixed.even(len(ranks))
        self._is_jittery = any(member.kind.jitter for member in ranks)
        self._stride = max(1, int(most_steps * len(ranks) / MOST_RANK_STEPS))
        self._number = 0  # simulated steps: what the policy counts
        self._counts: tuple[int, ...] = ()
        self._factors: list[float] = []
        self._base_ms: list[float] = []
        self.last_samples: list[int] = []

    def _balanced(self, before: "ExactRun | None") -> ExactPolicy:
        """As train/policies.py makes it: shares as they are given, or by speed within what memory holds."""
        job, slot = self.generation.job, self.axis.slot_size
        shares = job.shares_of(self.generation.numbers)
        if shares is not None:
            return Fixed(shares)
        known = {} if before is None else before.costs()
        costs = [known.get(member.number, Cost(member.kind.fixed_ms, member.kind.sample_ms)) for member in self.ranks]
        caps = None if job.caps is None else tuple(min(slot, job.caps[member.number]) for member in self.ranks)
        return Balanced(tuple(costs), slot, caps)

    @property
    def is_over(self) -> bool:
        return self.position >= self.axis.total

    @property
    def counts(self) -> tuple[int, ...]:
        return self.policy.shares(self._number, self.axis.slot_size)

    def costs(self) -> dict[int, Cost]:
        """What each member's steps cost by now, as far as the policy has measured it."""
        if not isinstance(self.policy, Balanced):
            return {}
        return {member.number: cost for member, cost in zip(self.ranks, self.policy.current_costs(), strict=True)}

    def advance(self, until_s: float) -> None:
        """A step; or several alike, as far as they are over by then."""
        slot = self.axis.slot(self.position)
        shares = self.policy.shares(self._number, slot.samples)
        times_ms = self._times_ms(shares)
        slowest_ms = max(times_ms)
        hidden_ms = self.generation.job.overlap * slowest_ms
        sum_ms = max(min(self._sum.ms, self._sum.delay_ms), self._sum.ms - hidden_ms)
        step_s = (slowest_ms + sum_ms) / 1e3
        many = self._many(slot.samples, step_s, until_s)
        scale, sum_s = many / 1e3, sum_ms * many / 1e3
        for member, share, ms in zip(self.ranks, shares, times_ms, strict=True):
            self._tally.trained[member.number] += share * many
            waits = (WAIT if ms else IDLE, (slowest_ms - ms) * scale)
            parts = ((COMPUTE, ms * scale), waits, (COMMUNICATION, sum_s))
            self._tally.spend(member.number, self._tally.now_s, *parts, is_drawn=many == 1)
        self._tally.samples += slot.samples * many
        self._tally.rounds += many
        self._tally.sums_s += sum_s
        self._tally.sums_between_s += sum_s * (self._sum.between_ms / self._sum.ms if sum_ms else 0.0)
        self.last_samples = list(shares)
        self._tally.pass_time(self._tally.now_s + step_s * many, self._speed)
        self.position += many
        self.policy.note(self._number, slot.samples, times_ms)
        self._number += 1
        self._end_epoch()
        self._tally.mark()

    def go_back(self, position: int) -> None:
        self.position = max(0, position)

    def _times_ms(self, shares: tuple[int, ...]) -> list[float]:
        factors = [member.factor for member in self.ranks]
        if shares != self._counts or factors != self._factors:
            self._counts, self._factors = shares, factors
            self._base_ms = [
                member.kind.time_ms(share) * member.factor for member, share in zip(self.ranks, shares, strict=True)
            ]
        if not self._is_jittery:
            return self._base_ms
        drawn = self.generation.draws.normals(len(self.ranks))
        return [
            ms * max(0.1, 1.0 + member.kind.jitter * normal)
            for ms, member, normal in zip(self._base_ms, self.ranks, drawn, strict=True)
        ]

    def _many(self, samples: int, step_s: float, until_s: float) -> int:
        """How many steps this one stands for: none of another size, no other epoch, nothing past what happens next."""
        if self._stride == 1 or samples < self.axis.slot_size or self._number < FIRST_STEPS:
            return 1
        per_epoch = self.axis.slots_per_epoch
        full = per_epoch if self.axis.samples % self.axis.slot_size == 0 else per_epoch - 1
        left = min(full - self.position % per_epoch, self.axis.total - self.position)
        in_time = (until_s - self._tally.now_s) / step_s if until_s < float("inf") else left
        return max(1, min(self._stride, left, int(in_time)))

    def _end_epoch(self) -> None:
        if not self.axis.ends_epoch(self.position):
            return
        if isinstance(self.policy, Balanced):
            self.policy.recenter()
        self._tally.save()
        self._tally.evaluate(self.generation.numbers, self.generation.job.eval_ms / 1e3)
