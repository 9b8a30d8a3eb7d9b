"""Rounds of the local policies on a simulated clock, a whole window at a time.

Drives Windows as train/local_sgd.py does. What a rank trains in a window is one number of slots that take one drawn
time; the jitter of a sum of n slots is that of one, divided by the root of n. So the cost of a simulated run grows with
rounds times ranks and not with slots. Claims are not made one by one: `async` is taken as what they bring about,
every rank trains until all slots of the window are claimed. tests/policy/simulation.py simulates slots one by one, for
few ranks; tests/simulate/test_windows_against_slots.py compares the two.
"""

import heapq
from collections.abc import Sequence
from math import fsum, sqrt

from uneven.policy.claims import HANDOVER_MS, Claiming
from uneven.policy.late import ENOUGH, is_late
from uneven.policy.round_report import RoundReport
from uneven.policy.windows import LocalSGDConfig, Windows
from uneven.simulate.cluster import Job
from uneven.simulate.members import Generation
from uneven.simulate.tally import COMMUNICATION, COMPUTE, IDLE, WAIT


def local_config(job: Job, is_async: bool, shares: tuple[float, ...] | None = None) -> LocalSGDConfig:
    """The window settings of a job, as train/policies.py has those of a run."""
    anchor, max_anchor = LocalSGDConfig.anchors(None if job.anchor == "auto" else job.anchor, job.max_anchor)
    return LocalSGDConfig(is_async=is_async, anchor=anchor, max_anchor=max_anchor, shares=shares)


class WindowRun:
    """One generation: the same ranks from slot `position` on. `advance` trains a window and ends with its round."""

    def __init__(self, generation: Generation, is_async: bool, before: "WindowRun | None" = None) -> None:
        """`before`: the generation before it, whose controller its ranks go on with."""
        job, ranks = generation.job, generation.ranks
        self.generation = generation
        self.axis = generation.axis
        self.ranks = ranks
        self._tally = generation.tally
        self._is_async = is_async
        self._sum = generation.links.round(job.param_bytes)
        self._speed = generation.speed
        slot_ms = [member.kind.time_ms(job.batch_size) for member in ranks]
        self._slot_ms = slot_ms
        config = local_config(job, is_async, None if is_async else job.shares_of(generation.numbers))
        self.windows = Windows(config, len(ranks), self.axis.slot_size, self._next_event, list(slot_ms))
        if before is not None:
            places = {member.number: place for place, member in enumerate(before.ranks)}
            self.windows.go_on(before.windows.state_dict(), [places.get(number) for number in generation.numbers])
        self.windows.resume_at(0 if before is None else before.position)
        self._position: int | None = None
        self._free_ms = [1e3 * generation.tally.now_s] * len(ranks)
        self._arrival_ms = 0.0  # of the last round
        self._latency_ms = [0.0] * len(ranks)
        self.last_samples = [0] * len(ranks)
        self._trips_ms = [generation.links.claim_ms(rank) for rank in range(len(ranks))]
        self._claims_ms: dict[tuple[float, float, int], float] = {}
        self._half_ms = [0.5 * member.kind.round_ms for member in ranks]

    @property
    def is_over(self) -> bool:
        return self.windows.is_over

    @property
    def position(self) -> int:
        return self.windows.start if self._position is None else self._position

    @property
    def counts(self) -> tuple[int, ...]:
        return self.windows.counts

    def go_back(self, position: int) -> None:
        """Slots that are lost are trained again by the next generation."""
        self._position = max(0, position)

    def advance(self, until_s: float) -> None:
        """Until the next round; the window in which something happens is trained to its end."""
        del until_s
        last_event, slots_ms = self.windows.last_event, self._drawn_slots_ms()
        self.last_samples, reports = self._async_window(slots_ms) if self._is_async else self._cadence_window(slots_ms)
        for member, samples in zip(self.ranks, self.last_samples, strict=True):
            self._tally.train(member.number, samples)
        self.windows.note(reports)
        self._tally.rounds += 1
        if self.windows.last_event != last_event and self.axis.ends_epoch(self.windows.last_event):
            eval_ms = self.generation.job.eval_ms
            self._tally.evaluate(self.generation.numbers, eval_ms / 1e3)
            self._free_ms = [ms + eval_ms for ms in self._free_ms]
        self._tally.mark()

    def _next_event(self, slot: int) -> int:
        return self.axis.epoch_end(self.axis.epochs_before(slot))

    def _drawn_slots_ms(self) -> list[float]:
        """What a slot takes each rank in this window, on the mean of its slots.

        Their number is that of this very window, which is shorter than `counts` where an epoch ends. Of async it is
        what the window's slots divided by speed would be: how many a rank claims follows from the times drawn here.
        """
        drawn = self.generation.draws.normals(len(self.ranks))
        return [
            ms * member.factor * max(0.1, 1.0 + member.kind.jitter * normal / sqrt(max(1, count)))
            for ms, member, normal, count in zip(self._slot_ms, self.ranks, drawn, self.windows.cut(), strict=True)
        ]

    # cadence

    def _cadence_window(self, slots_ms: list[float]) -> tuple[list[int], list[RoundReport]]:
        windows, size = self.windows, self.axis.slot_size
        cut = list(windows.cut())
        last = max((rank for rank, count in enumerate(cut) if count), default=0)
        returned = self._late(cut, slots_ms)
        samples = [count * size for count in cut]
        busy_ms = [count * ms for count, ms in zip(cut, slots_ms, strict=True)]
        has_last = windows.start < windows.due or windows.back[-1:] == [windows.due - 1]
        if windows.due == windows.event and has_last and last not in returned:
            busy_ms[last] -= self._shorten(samples, slots_ms, last)
        entered_ms = [free + busy for free, busy in zip(self._free_ms, busy_ms, strict=True)]
        reports = [
            RoundReport(
                next_slot=float(returned.get(rank, (windows.due, 0))[0]),
                samples=float(samples[rank]),
                busy_ms=busy_ms[rank],
                transfer_ms=2.0 * self._half_ms[rank],
                latency_ms=self._latency_ms[rank],
                returned=float(returned.get(rank, (0, 0))[1]),
                recent_ms=slots_ms[rank] if rank in returned and cut[rank] >= ENOUGH else 0.0,
            )
            for rank in range(len(cut))
        ]
        self._await_average(busy_ms, entered_ms)
        return samples, reports

    def _late(self, cut: list[int], slots_ms: Sequence[float]) -> dict[int, tuple[int, int]]:
        """Ranks that enter the round late and hand slots back: their first such slot, and how many. Changes `cut`."""
        planned_ms = self.windows.planned_ms if self.windows.hands_back else 0.0
        if not planned_ms:
            return {}
        found: dict[int, tuple[int, int]] = {}
        for rank, (count, ms) in enumerate(zip(cut, slots_ms, strict=True)):
            done = -int(-planned_ms // ms)  # slots after which its time is over
            if done < count and is_late(done * ms, planned_ms, count - done, ms):
                found[rank] = (self.windows.slots_of(rank)[done], count - done)
        for rank, (_, back) in found.items():
            cut[rank] -= back
        return found

    def _await_average(self, busy_ms: Sequence[float], entered_ms: Sequence[float]) -> None:
        """All ranks wait for the average: cadence, and async at an event."""
        halves = self._half_ms
        met_ms = max([self._arrival_ms, *(at + half for at, half in zip(entered_ms, halves, strict=True))])
        self._arrival_ms = met_ms + self._sum.ms
        for rank, member in enumerate(self.ranks):
            waited_ms = met_ms - entered_ms[rank] - halves[rank]
            self._tally.spend(
                member.number,
                (entered_ms[rank] - busy_ms[rank]) / 1e3,
                (COMPUTE, busy_ms[rank] / 1e3),
                (COMMUNICATION, halves[rank] / 1e3),
                (WAIT if busy_ms[rank] else IDLE, waited_ms / 1e3),
                (COMMUNICATION, (self._sum.ms + halves[rank]) / 1e3),
            )
        self._latency_ms = [self._arrival_ms - at for at in entered_ms]
        self._free_ms = [self._arrival_ms + half for half in halves]
        self._tally.sums_s += self._sum.ms / 1e3
        self._tally.sums_between_s += self._sum.between_ms / 1e3
        self._tally.pass_time((self._arrival_ms + max(halves)) / 1e3, self._speed)

    # async

    def _async_window(self, slots_ms: list[float]) -> tuple[list[int], list[RoundReport]]:
        windows, size = self.windows, self.axis.slot_size
        claimed_ms = [ms + self._claim_ms(rank) for rank, ms in enumerate(slots_ms)]
        is_event = windows.due == windows.event
        counts = self._claimed(windows.due - windows.start, claimed_ms, is_event)
        samples = [count * size for count in counts]
        trained_ms = [count * ms for count, ms in zip(counts, slots_ms, strict=True)]
        busy_ms = [count * ms for count, ms in zip(counts, claimed_ms, strict=True)]
        next_slot = windows.start + sum(counts)
        if windows.start < next_slot == windows.event:
            last = max(range(len(counts)), key=lambda rank: counts[rank])
            missing_ms = self._shorten(samples, slots_ms, last)
            trained_ms[last] -= missing_ms
            busy_ms[last] -= missing_ms
        entered_ms = [free + busy for free, busy in zip(self._free_ms, busy_ms, strict=True)]
        reports = [
            RoundReport(
                next_slot=float(next_slot),
                samples=float(done),
                busy_ms=ms,
                transfer_ms=2.0 * half,
                latency_ms=latency,
            )
            for done, ms, half, latency in zip(samples, trained_ms, self._half_ms, self._latency_ms, strict=True)
        ]
        if is_event:
            self._await_average(busy_ms, entered_ms)
        else:
            self._go_on(claimed_ms, busy_ms, entered_ms)
        return samples, reports

    def _claim_ms(self, rank: int) -> float:
        """What claims add to a slot."""
        member, count = self.ranks[rank], max(1, self.windows.counts[rank])
        key = (self._trips_ms[rank], self._slot_ms[rank] * member.factor, count)
        if key not in self._claims_ms:
            trip_ms, slot_ms, _ = key
            claiming = Claiming(trip_ms, slot_ms, count, left=1e9)
            self._claims_ms[key] = (HANDOVER_MS if claiming.is_ahead else trip_ms) / claiming.size
        return self._claims_ms[key]

    def _claimed(self, slots: int, slots_ms: Sequence[float], is_event: bool) -> list[int]:
        """How many slots each rank trains until all of them are claimed; before an event exactly these.

        A rank enters the round with the slot in which the last one was claimed: half a slot each is claimed ahead.
        """
        takes = [not self.windows.is_left_out(rank) or self.windows.is_probed(rank) for rank in range(len(self.ranks))]
        claimants = [rank for rank, does in enumerate(takes) if does]
        until_ms = self._front_ms(max(0.5, slots - 0.5 * len(claimants)), slots_ms, claimants)
        counts = [0] * len(self.ranks)
        for rank in claimants:
            span_ms = max(until_ms, 0.0 if is_event else self._arrival_ms) - self._free_ms[rank]
            counts[rank] = max(0, -int(-span_ms // slots_ms[rank]))
            if self.windows.is_probed(rank):
                counts[rank] = min(1, counts[rank])
        most = slots if is_event else self.windows.event - self.windows.start
        if not slots <= sum(counts) <= most:
            self._trim(counts, min(most, max(slots, sum(counts))), slots_ms, claimants)
        return counts

    def _front_ms(self, slots: float, slots_ms: Sequence[float], claimants: Sequence[int]) -> float:
        """When ranks that begin at their own times have trained so many slots together."""
        waiting = sorted(claimants, key=lambda rank: self._free_ms[rank])
        speed = done = 0.0
        at_ms = self._free_ms[waiting[0]]
        for place, rank in enumerate(waiting):
            speed += 1.0 / slots_ms[rank]
            done += self._free_ms[rank] / slots_ms[rank]
            at_ms = (slots + done) / speed
            if place + 1 == len(waiting) or at_ms <= self._free_ms[waiting[place + 1]]:
                break
        return at_ms

    def _trim(self, counts: list[int], slots: int, slots_ms: Sequence[float], claimants: Sequence[int]) -> None:
        """Exactly so many: the last ones to finish give up slots, the first ones take more. In place."""
        more = slots - sum(counts)
        ends = [(self._free_ms[rank] + counts[rank] * slots_ms[rank], rank) for rank in claimants]
        heap = [(at + slots_ms[rank], rank) for at, rank in ends] if more > 0 else [(-at, rank) for at, rank in ends]
        heapq.heapify(heap)
        while more:
            at_ms, rank = heapq.heappop(heap)
            if more < 0 and not counts[rank]:
                continue
            counts[rank] += 1 if more > 0 else -1
            heapq.heappush(heap, (at_ms + slots_ms[rank], rank))
            more += -1 if more > 0 else 1

    def _go_on(self, slots_ms: Sequence[float], busy_ms: Sequence[float], entered_ms: Sequence[float]) -> None:
        """Nobody waits for the average, but for a rank that has trained as far ahead of it as staleness allows."""
        met_ms = max(at + half for at, half in zip(entered_ms, self._half_ms, strict=True))
        self._arrival_ms = met_ms + self._sum.ms
        for rank, member in enumerate(self.ranks):
            ahead_ms = 2 * max(1, self.windows.counts[rank]) * slots_ms[rank]
            waits_ms = max(0.0, self._arrival_ms - entered_ms[rank] - ahead_ms)
            own_ms = 2.0 * self._half_ms[rank]
            parts = ((COMPUTE, busy_ms[rank]), (COMMUNICATION, own_ms), (WAIT, waits_ms))
            began_s = self._free_ms[rank] / 1e3
            self._tally.spend(member.number, began_s, *((state, ms / 1e3) for state, ms in parts))
            self._free_ms[rank] = entered_ms[rank] + own_ms + waits_ms
        self._latency_ms = [self._arrival_ms - at for at in entered_ms]
        self._tally.pass_time(fsum(self._free_ms) / len(self._free_ms) / 1e3, self._speed)

    def _shorten(self, samples: list[int], slots_ms: Sequence[float], rank: int) -> float:
        """The last slot of an epoch may be short; this rank has the window's last slot. Returns the ms that it saves.

        The time of the missing samples is drawn with that of their slot: an undrawn one may be longer than all of it
        (tests/simulate/test_simulation.py::test_a_slot_that_is_mostly_missing_takes_the_time_of_its_samples).
        """
        missing = self.axis.slot_size - self.axis.slot(self.windows.event - 1).samples
        samples[rank] -= missing
        return missing * self.ranks[rank].kind.sample_ms * (slots_ms[rank] / self._slot_ms[rank])
