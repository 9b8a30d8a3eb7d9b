"""The exact policies: how a slot's samples are shared out when every step sums gradients over all ranks.

`sync` divides evenly, `balanced` by speed. Both are pure and replicated: every rank passes the same numbers to its own
copy in slot order and gets the same shares, so no message is needed to agree on them. They use only + - * / and
comparisons, and `fingerprint()` travels with the gradients to prove that the copies agree. train/gradient_sync.py
drives them.
"""

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import mul, truediv
from typing import Any, Protocol, TypeVar

from uneven.policy.finish import Cost, by_ratio, earliest_ms, equal_finish, finish_ms

MEMORY = 5  # slots in the median of a rank's factor: two outliers change nothing
MOVE_GAIN = 0.025  # a predicted gain below this is noise
LARGE_GAIN = 1.0  # a step that would be twice as fast: no noise, so the move is not damped
STRAGGLES = 5.0  # a rank that became so many times slower (or faster again) is followed beyond `reach` ...
FAR_GAIN = 0.25  # ... for no less than this
PROBE_EVERY = 50  # slots after which a rank without samples is tried again, at the earliest
PROBE_COST = 0.1  # of the time between two probes: a rank that is far too slow is tried less often
PROBE_DOUBLINGS = 6  # of PROBE_EVERY, at most


@dataclass(frozen=True, slots=True)
class Move:
    """A decision: from this slot on, these shares; `gain` is the predicted speed-up of the step."""

    slot: int
    shares: tuple[int, ...]
    gain: float


class ExactPolicy(Protocol):
    """How many samples of a slot each rank trains. Call `note` once per slot, in slot order."""

    def shares(self, slot: int, samples: int) -> tuple[int, ...]:
        """Samples per rank, in rank order; they sum to `samples`."""
        ...

    def note(self, slot: int, samples: int, busy_ms: Sequence[float]) -> Move | None:
        """Take in every rank's own compute time of this slot; returns the change of shares, if any."""
        ...

    def fingerprint(self) -> int:
        """24 bits of the state: equal on all ranks, exact in fp32."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON, for a run with as many ranks that goes on from here; empty where there is none."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Fixed:
    """Constant shares in a ratio, one number per rank. `sync` is the ratio 1:1, as in DDP."""

    ratio: tuple[float, ...]
    least: int = 1

    @classmethod
    def even(cls, ranks: int) -> "Fixed":
        """As equal as whole samples allow, the first ranks one more."""
        return cls((1.0,) * ranks)

    def shares(self, slot: int, samples: int) -> tuple[int, ...]:
        del slot
        return _by_fixed_ratio(self.ratio, samples, self.least)

    def note(self, slot: int, samples: int, busy_ms: Sequence[float]) -> Move | None:
        del slot, samples, busy_ms
        return None

    def fingerprint(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


@lru_cache(maxsize=64)
def _by_fixed_ratio(ratio: tuple[float, ...], samples: int, least: int) -> tuple[int, ...]:
    return by_ratio(ratio, samples, least)


@dataclass
class Balanced:
    """Shares by measured speed, so that all ranks finish a step together.

    Each rank's cost has the form measured in warm-up (fixed + per sample) and one factor that follows its measured
    step times. Shares move only for a predicted gain above MOVE_GAIN, at most doubling a share, and by
    half when the direction reverses. The slot size never changes. A rank whose best share is 0 is left out and tried
    again with a few samples now and then; one such probe that finds it fast again brings it back. With `keeps_all` it
    has those few samples in every slot: where a rank must run a backward pass anyway, nothing is gained without it.

    With `reach` shares move no farther than this from where they were when `recenter` was last called: a captured step
    has graphs for the sizes around them, and all ranks would wait for another one. A rank that straggles costs more
    than that (tests/policy/test_stragglers.py), so then they move as far as they must.
    """

    costs: tuple[Cost, ...]
    slot_size: int
    caps: tuple[int, ...] | None = None
    least: int = 1
    lookahead: int = 0  # slots whose batches may already be loading when shares change
    grid: int = 1  # shares are multiples of it, as far as the slot size allows
    _plan: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (from this slot on, shares)
    _factors: list[float] = field(default_factory=list)
    _seen: list[list[float]] = field(default_factory=list)
    _directions: list[int] = field(default_factory=list)
    _damping: float = 1.0
    _probes: list[tuple[int, int]] = field(default_factory=list)  # (from this slot on, slots between two probes)
    reach: int | None = None
    keeps_all: bool = False
    _homes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list, compare=False)  # planned too; see `reach`
    _home_factors: tuple[float, ...] = field(default=(), compare=False)  # when `recenter` was last called
    # Of `costs`, kept because they are needed in every slot.
    _predicted_for: tuple[int, ...] = field(default=(), compare=False)
    _predicted_ms: list[float] = field(default_factory=list, compare=False)
    _fixed_ms: list[float] = field(default_factory=list, compare=False)
    _speeds: list[float] = field(default_factory=list, compare=False)
    _fixed_samples: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        self._factors = [1.0] * len(self.costs)
        self._seen = [[] for _ in self.costs]
        self._directions = [0] * len(self.costs)
        self._plan = [(0, self._best(self.costs))]
        self._probes = [(0, PROBE_EVERY)]
        self.recenter()

    def recenter(self) -> None:
        """Shares may move anew, from where they are now. Called on all ranks after the same slot."""
        self._homes = [(0, self._plan[-1][1])]
        self._home_factors = tuple(self._factors)

    def shares(self, slot: int, samples: int) -> tuple[int, ...]:
        planned = self._planned(slot)
        if samples != self.slot_size:  # an epoch's short last slot
            return by_ratio(planned if self.reach is None else _in_force(self._homes, slot), samples, self.least)
        every = _in_force(self._probes, slot)
        if slot % every < every - 1:
            return planned
        idle = self._idle(planned)
        return self._with_probe(planned, idle[(slot // every) % len(idle)]) if idle else planned

    def note(self, slot: int, samples: int, busy_ms: Sequence[float]) -> Move | None:
        shares = self.shares(slot, samples)
        self._update_factors(slot, shares, busy_ms)
        move = self._move(slot)
        if 0 in self._plan[-1][1]:
            self._space_probes(slot, [rank for rank, share in enumerate(shares) if share and busy_ms[rank] > 0.0])
        return move

    def _move(self, slot: int) -> Move | None:
        if self._plan[-1][0] > slot + 1:
            return None  # the last move has not taken effect yet
        del self._plan[:-1]
        current = self._plan[-1][1]
        now_ms = max(map(mul, self._predicted(current), self._factors))
        if now_ms <= (1.0 + MOVE_GAIN) * self._earliest_ms():
            return None  # no split at all could gain enough: most steps end here
        costs = self.current_costs()
        target = self._best(costs)
        gain = now_ms / finish_ms(costs, target) - 1.0
        if gain <= MOVE_GAIN:
            return None
        is_far = self._straggles(gain)
        shares = self._limited(current, target, gain, None if is_far else self.reach)
        if shares == current:
            return None
        self._plan.append((slot + 1 + self.lookahead, shares))
        if is_far:
            self._homes.append(self._plan[-1])
        return Move(slot + 1 + self.lookahead, shares, gain)

    def fingerprint(self) -> int:
        numbers = [*self._factors, self._damping, *chain.from_iterable(self._seen)]
        state = struct.pack(f"<{len(numbers)}d", *numbers)
        rest = (self._plan, self._directions, list(map(len, self._seen)), self._probes)
        return zlib.crc32(state + repr(rest).encode()) & 0xFFFFFF

    def state_dict(self) -> dict[str, Any]:
        return {
            "costs": [
                [cost.fixed_ms, cost.sample_ms, cost.cap if cost.cap < math.inf else None] for cost in self.costs
            ],
            "plan": [[start, list(shares)] for start, shares in self._plan],
            "factors": list(self._factors),
            "seen": [list(seen) for seen in self._seen],
            "directions": list(self._directions),
            "damping": self._damping,
            "probes": [list(spacing) for spacing in self._probes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Shares and costs as they were, whatever was measured since; the memory caps are those of this run."""
        if len(state["costs"]) != len(self.costs):
            raise ValueError(f"the state of {len(state['costs'])} ranks does not fit {len(self.costs)}")
        self.costs = tuple(Cost(fixed, each, math.inf if cap is None else cap) for fixed, each, cap in state["costs"])
        self._predicted_for, self._fixed_ms = (), []
        self._factors = list(state["factors"])
        self._seen = [list(seen) for seen in state["seen"]]
        self._directions, self._damping = list(state["directions"]), state["damping"]
        self._plan = [(start, tuple(shares)) for start, shares in state["plan"]]
        self._probes = [(start, every) for start, every in state.get("probes", [(0, PROBE_EVERY)])]
        is_too_much = [share > self._cap(rank) for _, shares in self._plan for rank, share in enumerate(shares)]
        if any(is_too_much) or any(sum(shares) != self.slot_size for _, shares in self._plan):
            self._plan = [(0, self._best(self.current_costs()))]
        self.recenter()

    def _planned(self, slot: int) -> tuple[int, ...]:
        """The shares in force at a slot: a lookup without side effects, since a feed may ask ahead."""
        return _in_force(self._plan, slot)

    def _update_factors(self, slot: int, shares: tuple[int, ...], busy_ms: Sequence[float]) -> None:
        """Move each rank's factor towards measured / predicted; the median of five ignores two outliers.

        A probe stands for itself: what was seen of the rank before is old, and the next probe is far away.
        """
        planned, factors = self._planned(slot), self._factors
        measured = zip(busy_ms, self._predicted(shares), self._seen, factors, strict=True)
        for rank, (ms, predicted_ms, seen, factor) in enumerate(measured):
            if ms <= 0.0 or predicted_ms <= 0.0:
                continue
            if planned[rank] == 0:
                seen.clear()
            seen.append(ms / predicted_ms)
            if len(seen) > MEMORY:
                del seen[0]
            error = sorted(seen)[len(seen) // 2] / factor - 1.0
            pull = min(0.8, max(0.1, abs(error))) if -0.5 < error < 1.0 else 1.0
            factors[rank] = factor * (1.0 + pull * error)

    def _predicted(self, shares: tuple[int, ...]) -> list[float]:
        """Each rank's ms for its share, by the costs of the start; 0.0 for none. Shares seldom change."""
        if shares != self._predicted_for:
            self._predicted_for = shares
            self._predicted_ms = [cost.time_ms(samples) for cost, samples in zip(self.costs, shares, strict=True)]
        return self._predicted_ms

    def _earliest_ms(self) -> float:
        """When divisible samples would be finished, by the present costs; quick where all ranks help, as nearly always.

        A factor changes how long a rank's fixed part takes, but not how many samples it could train instead.
        """
        if not self._fixed_ms:
            self._fixed_ms = [cost.fixed_ms for cost in self.costs]
            self._speeds = [1.0 / cost.sample_ms for cost in self.costs]
            self._fixed_samples = math.fsum(map(mul, self._fixed_ms, self._speeds))
        at_ms = (self.slot_size + self._fixed_samples) / math.fsum(map(truediv, self._speeds, self._factors))
        if max(map(mul, self._fixed_ms, self._factors)) < at_ms:
            return at_ms
        return earliest_ms(self.current_costs(), self.slot_size)

    def _best(self, costs: Sequence[Cost]) -> tuple[int, ...]:
        shares = equal_finish(costs, self.slot_size, self.caps, self.least, self.grid)
        if self.keeps_all:
            for rank in self._idle(shares):
                shares = self._with_probe(shares, rank)
        return shares

    def _idle(self, shares: Sequence[int]) -> list[int]:
        """The ranks that are left out, and need not be."""
        return [rank for rank, share in enumerate(shares) if share == 0 and self._cap(rank) >= self._smallest]

    @property
    def _smallest(self) -> int:
        """The smallest share above 0."""
        return max(self.least, self.grid)

    def current_costs(self) -> list[Cost]:
        """Every rank's cost, by its measured step times."""
        return [cost.scaled(factor) for cost, factor in zip(self.costs, self._factors, strict=True)]

    def _cap(self, rank: int) -> int:
        return self.slot_size if self.caps is None else self.caps[rank]

    def _with_probe(self, planned: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The planned shares with a few samples moved from the largest share to an idle rank, to measure it again."""
        shares = list(planned)
        giver = shares.index(max(shares))
        if shares[giver] >= 2 * self._smallest:
            shares[giver] -= self._smallest
            shares[rank] += self._smallest
        return tuple(shares)

    def _space_probes(self, slot: int, measured: Sequence[int]) -> None:
        """After a rank that is left out was measured: when to try again, so that probes cost PROBE_COST at most."""
        last = self._probes[-1]
        if last[0] > slot + 1:
            return  # not in force yet
        del self._probes[:-1]
        planned = self._plan[-1][1]
        idle = [rank for rank in measured if planned[rank] == 0]
        if not idle:
            return
        costs = self.current_costs()
        probe_ms = max(costs[rank].time_ms(self._smallest) for rank in idle)
        allowed_ms, every = PROBE_COST * finish_ms(costs, planned), PROBE_EVERY
        while every * allowed_ms < probe_ms and every < PROBE_EVERY * 2**PROBE_DOUBLINGS:
            every *= 2
        if every != last[1]:
            self._probes.append((slot + 1 + self.lookahead, every))

    def _straggles(self, gain: float) -> bool:
        """Whether a rank became so much slower or faster since `recenter` that shares leave their reach for it."""
        if gain <= FAR_GAIN:
            return False
        changes = [now / before for now, before in zip(self._factors, self._home_factors, strict=True)]
        return max(changes) >= STRAGGLES or min(changes) <= 1.0 / STRAGGLES

    def _growth(self, old: int, step: int) -> float:
        """How much a share may grow in one move: it doubles, more often where a move takes many slots to take effect.

        A rank that was left out begins with half of what it deserves: to double one sample again and again takes long.
        """
        if old == 0:
            return max(self._smallest, step / 2)
        return old * (2.0 ** (1 + min(3, self.lookahead // 4)) - 1.0)

    def _limited(
        self, current: tuple[int, ...], target: tuple[int, ...], gain: float, reach: int | None
    ) -> tuple[int, ...]:
        """As far towards the target as doubling, damping and reach allow, on the grid and with the same sum."""
        steps = [new - old for old, new in zip(current, target, strict=True)]
        largest = max(range(len(steps)), key=lambda rank: abs(steps[rank]))
        direction = 1 if steps[largest] > 0 else -1
        reversed_ = self._directions[largest] == -direction
        self._damping = max(0.125, self._damping / 2) if reversed_ else min(1.0, self._damping * 2)
        if gain > LARGE_GAIN:
            self._damping = 1.0
        self._directions[largest] = direction
        fraction = self._damping  # of the step from the current shares to the target
        for old, step, home in zip(current, steps, self._homes[-1][1], strict=True):
            if step > 0:
                fraction = min(fraction, self._growth(old, step) / step)
            if step and reach is not None:
                room = reach + (home - old if step > 0 else old - home)
                fraction = min(fraction, room / abs(step))
        if fraction <= 0.0:  # a share is out of reach already, and would move farther: none moves
            return current
        return target if fraction >= 1.0 else self._part_way(current, target, fraction)

    def _part_way(self, current: tuple[int, ...], target: tuple[int, ...], fraction: float) -> tuple[int, ...]:
        """This fraction of the way to the target."""
        steps = [new - old for old, new in zip(current, target, strict=True)]
        real = [old + fraction * step for old, step in zip(current, steps, strict=True)]
        shares = [self.grid * int(share / self.grid) for share in real]
        # Multiples of the grid, largest remainders rounded up. A share must not lie between 0 and `least`.
        order = sorted(range(len(real)), key=lambda rank: shares[rank] - real[rank])
        left = self.slot_size - sum(shares)
        for rank in order:
            more = min(self.grid, left)
            shares[rank] += more
            left -= more
        return target if any(0 < share < self.least for share in shares) else tuple(shares)


Planned = TypeVar("Planned")


def _in_force(plan: Sequence[tuple[int, Planned]], slot: int) -> Planned:
    """What a plan of (from this slot on, what) has for a slot."""
    for start, what in reversed(plan):
        if start <= slot:
            return what
    return plan[0][1]
