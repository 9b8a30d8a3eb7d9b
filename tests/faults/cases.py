"""What a run of the storm trains and what happens to it: drawn from (seed, number) alone, before anything starts.

A case is plain data, so that any run of a storm can be repeated: `python -m tests.faults.storm --seed S --only N`.
Moments are parts of the run's own progress, with some milliseconds more, so that they mean the same on a busy machine.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.fault import SILENT_S, Fault, draw_faults

POLICIES = ("sync", "balanced", "cadence", "async")
EXACT = ("sync", "balanced")
# kill: SIGKILL. stop: SIGSTOP for good. wake: SIGSTOP, and SIGCONT before or after its silence counts. delay: the
# leader, which holds the store, is stopped for a moment. cut: a machine's cable is pulled, for good or for a moment, or
# its launcher is killed. join: a machine joins, or a killed rank is started again. flip: a bit of what a rank averages
# changes (local policies). shards: a rank with a part of the state is lost (exact policies). full: the disk is full
# while checkpoints are written. hold: a healthy rank holds Python's lock for ten seconds, and is not dropped.
FAULTS = ("kill", "stop", "wake", "delay", "cut", "join", "flip", "shards", "full", "hold")
NEEDS_MACHINES, NEEDS_MOUNT = ("cut",), ("full",)
DEFAULT_SILENT_S = 15.0
MODELS = ("rows", "mlp", "norm", "dropout")
STRATEGIES = ("zero1", "zero2", "fsdp")
BATCH = 4
# Whether a run without copies of its shards must go on from its last checkpoint where there is one; else a loss may end
# it in words.
ROLLS_BACK = True


@dataclass(frozen=True)
class Case:
    """One run: settings, model and faults."""

    seed: int
    number: int
    kind: str  # the fault that the case was drawn for
    policy: str
    devices: tuple[str, ...]
    machines: tuple[int, ...]  # how many of the devices are on each; of one alone it has no network
    joins: int  # machines that join later, with one device each
    restarts: int
    strategy: str | None
    redundancy: int
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
    def has_network(self) -> bool:
        return len(self.machines) + self.joins > 1

    @property
    def slot_size(self) -> int:
        return BATCH * len(self.devices) if self.is_exact else BATCH

    @property
    def total_slots(self) -> int:
        return self.slots * self.epochs

    @property
    def silent_s(self) -> float:
        """After which a silent rank is lost."""
        return DEFAULT_SILENT_S if any(fault.kind == "hold" for fault in self.faults) else SILENT_S

    @property
    def may_end(self) -> bool:
        """Whether a loss may end the run in words: shards without copies, and no checkpoint yet."""
        return self.strategy is not None and not self.redundancy

    def devices_on(self, machine: int) -> tuple[str, ...]:
        if machine >= len(self.machines):
            return ("cpu",)
        first = sum(self.machines[:machine])
        return self.devices[first : first + self.machines[machine]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Case":
        faults = tuple(Fault(**fault) for fault in found["faults"])
        lists = {name: tuple(found[name]) for name in ("devices", "machines")}
        return cls(**{**found, **lists, "faults": faults})

    def __str__(self) -> str:
        beside = [word for word, is_on in (("eval", self.eval_every), ("save", self.save_every)) if is_on]
        if self.strategy is not None:
            beside.append(f"{self.strategy}/{self.redundancy}")
        if self.verify:
            beside.append("verify")
        if self.restarts:
            beside.append(f"restarts={self.restarts}")
        places = [",".join(self.devices_on(machine)) for machine in range(len(self.machines) + self.joins)]
        words = [self.policy, "|".join(places), self.model, self.optimizer, self.backend, *beside]
        return " ".join([*words, *map(str, self.faults)])


def kinds_of(policy: str, faults: Sequence[str]) -> list[str]:
    """Those that can happen to it: a checksum of averages, or shards."""
    return [kind for kind in faults if kind != ("flip" if policy in EXACT else "shards")]


def draw_case(
    seed: int,
    number: int,
    policies: Sequence[str] = POLICIES,
    faults: Sequence[str] = FAULTS,
    *,
    is_small: bool = False,
    has_machines: bool = True,
) -> Case:
    """Policies and kinds of faults take turns, so that every pair occurs; everything else is chance."""
    chance = random.Random(f"{seed}/{number}")
    policy = policies[number % len(policies)]
    kinds = kinds_of(policy, faults)
    kind = kinds[number // len(policies) % len(kinds)]
    is_exact = policy in EXACT
    ranks = chance.choice([2, 2, 3]) if is_small else chance.randint(2, 5)
    is_sharded = is_exact and (kind == "shards" or (kind not in ("join", "cut") and chance.random() < 0.3))
    machines = _split(chance, ranks, kind) if has_machines and not is_small else (ranks,)
    joins = int(kind == "join" and has_machines and not is_small and chance.random() < 0.5)
    machines = (ranks,) if kind == "join" else machines
    model = chance.choice(["mlp", "mlp", "dropout"] if is_sharded else MODELS)
    epochs = 1 if model == "rows" else chance.randint(1, 3)
    slots = chance.randint(*((24, 36) if is_small else (60, 120))) // epochs
    if not is_exact:
        slots *= ranks  # each rank trains slots of its own
    size = BATCH * ranks if is_exact else BATCH
    rest = 0 if model == "rows" else chance.choice([0, 0, 1, size // 2])  # a short slot ends an epoch
    rest += model == "norm" and rest == 1  # BatchNorm has no variance of one sample
    redundancy, strategy = int(is_sharded), chance.choice(STRATEGIES) if is_sharded else None
    if kind == "shards":  # all strategies with and without copies, in turn
        turn = number // (len(policies) * len(kinds))
        strategy = STRATEGIES[(turn + number % len(policies)) % len(STRATEGIES)]
        redundancy = int(turn % 2 == 0)
    saves = [None, None, "1", f"{slots // 4 + 1} steps"]
    if kind == "full" or (is_sharded and not redundancy):
        saves = [f"{slots // 8 + 1} steps"]
    return Case(
        seed=seed,
        number=number,
        kind=kind,
        policy=policy,
        devices=tuple(chance.choice(["cpu", "cpu", "cpu@0.5"]) if rank else "cpu" for rank in range(ranks)),
        machines=machines,
        joins=joins,
        restarts=2 if kind == "join" and not joins else 0,
        strategy=strategy,
        redundancy=redundancy,
        model=model,
        optimizer="sgd" if model == "rows" else chance.choice(["adam", "momentum"]),
        epochs=epochs,
        slots=slots + (rest > 0),
        samples=slots * size + rest,
        pause_ms=chance.uniform(2.0, 6.0) * (3.0 if kind == "full" else 1.0),
        eval_every=chance.choice([None, None, "1", f"{slots // 3 + 1} steps"]),
        save_every=chance.choice(saves),
        verify=not is_exact and (kind == "flip" or chance.random() < 0.5),
        backend=chance.choice(["auto", "auto", "gloo"]),
        anchor=chance.choice([1, 2, 4]),
        faults=draw_faults(chance, kind, faults, machines, most=1 if is_small or is_sharded else 3, joins=joins),
    )


def _split(chance: random.Random, ranks: int, kind: str) -> tuple[int, ...]:
    """How many ranks are on each of one to three machines; those whose cable is pulled are two at least."""
    count = min(ranks, chance.choice([2, 3] if kind == "cut" else [1, 1, 1, 2, 3]))
    found = [1] * count
    for _ in range(ranks - count):
        found[chance.randrange(count)] += 1
    return tuple(found)
