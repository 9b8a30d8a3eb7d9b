"""A run of a policy on a cluster that need not exist: the product's own controllers on a simulated clock.

`simulate` is called by `uneven simulate` and `uneven plan`. Nothing here reads a clock or a file, and the same cluster
with the same seed gives the same numbers on every CPU: uniform random numbers, + - * / and comparisons, in one order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from uneven.errors import InputError
from uneven.policy.axis import Axis
from uneven.simulate.cluster import POLICIES, Cluster, Job, Policy
from uneven.simulate.exact_run import ExactRun
from uneven.simulate.members import Draws, Generation, Member, Members, speed_of
from uneven.simulate.tally import SETTLING, STATES, Span, Tally
from uneven.simulate.window_run import WindowRun

SMALL = 0.02  # of all ranks' time: a loss below it is not worth a sentence


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated run was like. `efficiency`: its samples/s over the sum of the ranks' speeds alone.

    Where ranks fail and join, that sum is of those that were there; evaluation does not count. `kinds`, `shares` and
    `busy` have an entry for every rank that was ever there, those that joined last: the name of its device, its part of
    all samples, and the fraction of its time that it spent in each of STATES; `there_s` has the seconds of that time.
    `counts`: samples per step of the exact policies in the end, slots per window of the local ones. `trained_again`:
    samples that were lost with a rank. `lanes` has the beginning of the run, of some ranks where there are many.
    `seconds_per_epoch` is infinite where no sample counts.
    """

    policy: Policy
    seconds: float
    seconds_per_epoch: float
    samples: int
    samples_per_s: float
    efficiency: float
    kinds: tuple[str, ...]
    shares: tuple[float, ...]
    counts: tuple[int, ...]
    rounds: int
    busy: tuple[dict[str, float], ...]
    there_s: tuple[float, ...]
    limits: str
    lanes: tuple[Span, ...]
    failures: int
    joins: int
    trained_again: int
    over_time: tuple[tuple[float, float], ...]

    def mean(self, state: str, ranks: Sequence[int] | None = None) -> float:
        """The fraction of these ranks' time, otherwise of all ranks', that was spent in a state.

        A rank that was there for a moment counts for a moment.
        """
        chosen = range(len(self.busy)) if ranks is None else ranks
        whole = math.fsum(self.there_s[rank] for rank in chosen)
        return math.fsum(self.busy[rank][state] * self.there_s[rank] for rank in chosen) / whole if whole else 0.0


def simulate(cluster: Cluster, job: Job, policy: Policy, max_hours: float | None = None) -> Simulated:
    """Train the job with this policy, to its end or for so many simulated hours."""
    if policy not in POLICIES:
        raise InputError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
    if max_hours is not None and not max_hours > 0.0:
        raise InputError(f"max_hours={max_hours} must be above 0")
    job.check_ranks(cluster)
    simulation = _Simulation(cluster, job, policy, math.inf if max_hours is None else 3600.0 * max_hours)
    simulation.train()
    return simulation.result()


class _Simulation:
    """Generation after generation: a failure or a join begins the next."""

    def __init__(self, cluster: Cluster, job: Job, policy: Policy, max_s: float) -> None:
        self._cluster = cluster
        self._job = job
        self._policy: Policy = policy
        self._max_s = max_s
        self._members = Members(cluster)
        self._tally = Tally(len(cluster.ranks))
        self._draws = Draws(cluster.seed, "times")
        slot = job.slot_samples(policy, len(cluster.ranks))
        per_epoch = -(-job.samples_per_epoch // slot)
        slots = max(1, round(job.epochs * per_epoch))
        self._axis = Axis(job.samples_per_epoch, slot, math.ceil(job.epochs), max_slots=slots)
        self._part = self._generation(None)

    def train(self) -> None:
        part, tally = self._part, self._tally
        members = self._members
        while not part.is_over and tally.now_s < self._max_s:
            before_s = tally.now_s
            part.advance(min(members.next_s, self._max_s))
            # Settling takes time in which more happens: only the bound ends a run that never gets to train.
            while members.next_s <= tally.now_s < self._max_s and not part.is_over:
                at_s = members.next_s
                what, member = members.take()
                if member is None or what in ("slowdown", "recovery"):
                    continue
                if what == "join" and isinstance(part, WindowRun):
                    self._go_back(part, part.ranks[0], 0, 0.0)  # slots that were handed back are trained by all
                if what == "failure":
                    self._lose(part, member, (at_s - before_s) / max(1e-9, tally.now_s - before_s))
                self._settle()
                self._part = part = self._generation(part)

    def result(self) -> Simulated:
        tally, members = self._tally, self._members
        busy = tuple(_fractions(spent) for spent in tally.spent)
        there_s = tuple(math.fsum(spent) for spent in tally.spent)
        all_s = max(1e-9, math.fsum(there_s))
        losses = {state: math.fsum(spent[at] for spent in tally.spent) / all_s for at, state in enumerate(STATES)}
        losses["idle"] -= tally.eval_s / all_s  # no loss: it is part of the job
        efficiency = tally.samples / tally.possible if tally.possible else 0.0
        kinds = tuple(member.kind.name for member in members.all)
        return Simulated(
            policy=self._policy,
            seconds=tally.now_s,
            seconds_per_epoch=(
                self._job.samples_per_epoch * tally.now_s / tally.samples if tally.samples else math.inf
            ),
            samples=tally.samples,
            samples_per_s=tally.samples / tally.now_s if tally.now_s else 0.0,
            efficiency=efficiency,
            kinds=kinds,
            shares=tuple(samples / max(1, tally.samples) for samples in tally.trained),
            counts=self._part.counts,
            rounds=tally.rounds,
            busy=busy,
            there_s=there_s,
            limits=self._limit(efficiency, losses, busy),
            lanes=tuple(tally.lanes),
            failures=members.failures,
            joins=members.joins,
            trained_again=tally.again,
            over_time=tally.over_time(),
        )

    def _generation(self, before: "ExactRun | WindowRun | None") -> "ExactRun | WindowRun":
        """Of those who are there now."""
        job, there = self._job, self._members.there
        self._tally.grow(len(self._members.all))
        # Plain DDP sums in one ring of all ranks, over Gloo or NCCL.
        backend = "gloo" if self._policy == "equal" and job.backend == "auto" else job.backend
        links = self._members.links(backend)
        generation = Generation(job, self._axis, there, links, self._draws, self._tally)
        if self._policy in ("cadence", "async"):
            assert not isinstance(before, ExactRun)
            return WindowRun(generation, self._policy == "async", before)
        assert not isinstance(before, WindowRun)
        return ExactRun(generation, self._policy, self._most_steps(there), before)

    def _most_steps(self, there: list[Member]) -> float:
        """How many steps there will be, at most: the rest of the job, or what fits into the time."""
        ideal_s = self._axis.slot_size / speed_of(there, self._job)
        return min(float(self._axis.total), self._max_s / ideal_s)

    def _lose(self, part: "ExactRun | WindowRun", member: Member, passed: float) -> None:
        """What is lost with a member: the step in progress, or what it trained since its last round.

        `passed`: the part of that step or window that was over. Plain DDP starts again from its last checkpoint, which
        is taken to be that of the epoch's beginning.
        """
        if isinstance(part, WindowRun):
            places = {rank.number: place for place, rank in enumerate(part.ranks)}
            samples = part.last_samples[places[member.number]] if member.number in places else 0
            self._go_back(part, member, samples, passed)
        elif self._policy == "equal":
            self._tally.go_back()
            per_epoch = self._axis.slots_per_epoch
            part.go_back(per_epoch * (part.position // per_epoch))
        elif part.last_samples:
            for rank, share in zip(part.ranks, part.last_samples, strict=True):
                self._tally.lose(rank.number, share, int(share * passed))
            part.go_back(part.position - 1)

    def _go_back(self, part: WindowRun, member: Member, samples: int, passed: float) -> None:
        """To the slot before which as many samples lie as are trained without these; a part of a slot is lost, too."""
        axis, tally = self._axis, self._tally
        epoch, rest = divmod(tally.samples - samples, axis.samples)
        position = epoch * axis.slots_per_epoch + rest // axis.slot_size
        lost = tally.samples - axis.samples_before(position)
        tally.lose(member.number, lost, int(lost * passed))
        part.go_back(position)

    def _settle(self) -> None:
        """Those who are there find each other again; the bound of the run ends that, too."""
        end_s = min(self._tally.now_s + self._cluster.settle_s, self._max_s)
        there = self._members.there
        self._tally.grow(len(self._members.all))
        for member in there:
            self._tally.spend(member.number, self._tally.now_s, (SETTLING, end_s - self._tally.now_s))
        self._tally.pass_time(end_s, speed_of(there, self._job))

    def _limit(self, efficiency: float, losses: dict[str, float], busy: Sequence[dict[str, float]]) -> str:
        """In words: the largest loss, and where it comes from. `losses`: fractions of all ranks' time by state."""
        worst = max(("communication", "wait", "settling", "idle"), key=lambda state: losses[state])
        share = f"{100 * losses[worst]:.0f} %"
        if losses[worst] < SMALL:
            if efficiency > 1.0 - 2.0 * SMALL:
                return "the devices themselves: less than 2 % is lost to anything else"
            return "fixed costs of small steps: no rank waits, but a sample takes longer than in a full batch"
        if worst == "communication":
            is_between = self._tally.sums_between_s > 0.5 * self._tally.sums_s
            link = "the link between machines" if is_between else "the links inside machines"
            each = "of the time" if self._policy in ("cadence", "async") else "of each step"
            return f"{link}: {share} {each} is communication"
        if worst == "settling":
            changes = self._members.failures + self._members.joins
            return f"failures and joins: {share} of the time is spent settling after {changes} of them"
        if worst == "idle":
            return f"devices that do not help: {share} of the ranks' time is spent without samples"
        slowest = max(range(len(busy)), key=lambda rank: busy[rank]["compute"])
        name = self._members.all[slowest].kind.name
        return f"waiting for the slowest: {share} of the ranks' time; the busiest is rank {slowest} ({name})"


def _fractions(spent: list[float]) -> dict[str, float]:
    whole = math.fsum(spent)
    return {state: seconds / whole if whole else 0.0 for state, seconds in zip(STATES, spent, strict=True)}
