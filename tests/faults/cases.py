"""What a run of the storm trains and what happens to it: drawn from (seed, number) alone, before anything starts.

A case is plain data, so that any run of a storm can be repeated: `python -m tests.faults.storm --seed S --only N`.
Moments are parts of the run's own progress, with some milliseconds more, so that they mean the same on a busy machine.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

POLICIES = ("sync", "balanced", "cadence", "async")
EXACT = ("sync", "balanced")
# kill: SIGKILL. stop: SIGSTOP for good. wake: SIGSTOP, and SIGCONT before or after its silence counts. delay: the
# leader, which holds the store, is stopped for a moment.
FAULTS = ("kill", "stop", "wake", "delay")
SILENT_S = 2.0  # after which a silent rank is lost in the storm
MODELS = ("rows", "mlp", "norm", "dropout")
BATCH = 4


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one process of a run."""

    kind: str
    victim: int  # the number of its process; any for a delay, which is the launcher's
    at: float  # when this part of the run's samples is trained
    later_ms: float  # and so much later: anywhere inside a step, a sum or what lies between
    for_s: float = 0.0  # until it is woken

    @property
    def is_loss(self) -> bool:
        """Whether the others must go on without it. Near the limit either may happen, so no case is drawn there."""
        return self.kind in ("kill", "stop") or (self.kind == "wake" and self.for_s > SILENT_S)


@dataclass(frozen=True)
class Case:
    """One run: settings, model and faults."""

    seed: int
    number: int
    policy: str
    devices: tuple[str, ...]
    model: str
    optimizer: str
    epochs: int
    slots: int  # of an epoch; the last one may be short
    samples: int
    pause_ms: float  # that a step takes
    eval_every: str | None
    save_every: str | None
    verify: bool
    backend: str
    anchor: int
    faults: tuple[Fault, ...]

    @property
    def is_exact(self) -> bool:
        return self.policy in EXACT

    @property
    def slot_size(self) -> int:
        return BATCH * len(self.devices) if self.is_exact else BATCH

    @property
    def total_slots(self) -> int:
        return self.slots * self.epochs

    @property
    def losses(self) -> int:
        """How many processes the run has to go on without."""
        return len({fault.victim for fault in self.faults if fault.is_loss})

    @property
    def kind(self) -> str:
        """The fault that the case was drawn for."""
        return self.faults[0].kind if self.faults else "none"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Case":
        faults = tuple(Fault(**fault) for fault in found["faults"])
        return cls(**{**found, "devices": tuple(found["devices"]), "faults": faults})

    def __str__(self) -> str:
        faults = " ".join(
            f"{fault.kind}:{fault.victim}@{fault.at:.2f}" + (f"+{fault.for_s:.1f}s" if fault.for_s else "")
            for fault in self.faults
        )
        beside = [word for word, is_on in (("eval", self.eval_every), ("save", self.save_every)) if is_on]
        words = [self.policy, ",".join(self.devices), self.model, self.optimizer, self.backend, *beside, faults]
        return " ".join(words)


def draw_case(
    seed: int,
    number: int,
    policies: Sequence[str] = POLICIES,
    faults: Sequence[str] = FAULTS,
    *,
    is_small: bool = False,
) -> Case:
    """Policies and kinds of faults take turns, so that every pair occurs; everything else is chance."""
    chance = random.Random(f"{seed}/{number}")
    policy = policies[number % len(policies)]
    kind = faults[number // len(policies) % len(faults)]
    ranks = chance.choice([2, 2, 3]) if is_small else chance.randint(2, 5)
    model = chance.choice(MODELS)
    epochs = 1 if model == "rows" else chance.randint(1, 3)
    slots = chance.randint(*((24, 36) if is_small else (60, 120))) // epochs
    if policy not in EXACT:
        slots *= ranks  # each rank trains slots of its own
    size = BATCH * ranks if policy in EXACT else BATCH
    rest = 0 if model == "rows" else chance.choice([0, 0, 1, size // 2])  # a short slot ends an epoch
    devices = tuple(chance.choice(["cpu", "cpu", "cpu@0.5"]) if rank else "cpu" for rank in range(ranks))
    return Case(
        seed=seed,
        number=number,
        policy=policy,
        devices=devices,
        model=model,
        optimizer="sgd" if model == "rows" else chance.choice(["adam", "momentum"]),
        epochs=epochs,
        slots=slots + (rest > 0),
        samples=slots * size + rest,
        pause_ms=chance.uniform(2.0, 6.0),
        eval_every=chance.choice([None, None, "1", f"{slots // 3 + 1} steps"]),
        save_every=chance.choice([None, None, "1", f"{slots // 4 + 1} steps"]),
        verify=policy not in EXACT and chance.random() < 0.5,
        backend=chance.choice(["auto", "auto", "gloo"]),
        anchor=chance.choice([1, 2, 4]),
        faults=_draw_faults(chance, kind, faults, ranks, is_small),
    )


def _draw_faults(
    chance: random.Random, kind: str, allowed: Sequence[str], ranks: int, is_small: bool
) -> tuple[Fault, ...]:
    """The fault of the case first, then up to two more; one rank at least is never lost."""
    victims = chance.sample(range(ranks), ranks)
    found: list[Fault] = []
    for place in range(1 if is_small else chance.randint(1, 3)):
        one = kind if place == 0 else chance.choice(list(allowed))
        if one == "delay":
            found.append(_at_some_moment(chance, one, 0, chance.uniform(0.1, 1.0)))
            continue
        if len(victims) == 1:
            break
        # Clearly before or clearly after its silence counts: what happens in between is the scheduler's choice.
        sleeps_s = chance.choice([chance.uniform(0.05, 0.5 * SILENT_S), chance.uniform(1.5, 2.0) * SILENT_S])
        found.append(_at_some_moment(chance, one, victims.pop(), sleeps_s if one == "wake" else 0.0))
    return tuple(found)


def _at_some_moment(chance: random.Random, kind: str, victim: int, for_s: float) -> Fault:
    return Fault(kind, victim, chance.uniform(0.03, 0.95), chance.uniform(0.0, 20.0), for_s)
