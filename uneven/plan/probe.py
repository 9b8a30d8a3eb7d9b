"""What some seconds of probing found out about the devices, the links and the job: plain data, as JSON and back.

Made by measure.py, read by predict.py. Recorded probes are the input of most tests.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from uneven.config import LOCAL_POLICIES, POLICIES, SHARDED, RunConfig
from uneven.errors import InputError
from uneven.files import read_as
from uneven.policy.finish import Cost

VERSION = 2
# In place of settings that read or write a run's files: what is planned touches none.
NO_FILES: Mapping[str, Any] = {
    "overwrite": False,
    "resume": None,
    "replay": None,
    "save_every": None,
    "keep_last": None,
    "keep_best": None,
    "monitor_mode": "auto",
    "checkpoint_copies": 1,
}


def with_values(config: RunConfig, **values: Any) -> RunConfig:
    """The settings with other values, checked again; names and values may be known only when it runs."""
    return replace(config, **values)


def check_seconds(seconds: float) -> None:
    """InputError for a time in which nothing can be measured, or that never ends."""
    if not 1.0 <= seconds < math.inf:
        raise InputError(
            f"seconds={seconds} must be a number of at least 1: how long all devices together are measured"
        )


def allowed_policies(config: RunConfig) -> tuple[str, ...]:
    """The policies that go with the other settings; InputError where none does."""
    allowed = []
    for policy in POLICIES:
        try:
            replace(config, policy=policy)
        except InputError:
            continue
        if config.shares is not None and policy not in ("balanced", "cadence"):
            continue
        if config.sync_batchnorm and policy in LOCAL_POLICIES:
            continue
        allowed.append(policy)
    if not allowed:
        raise InputError("policy='auto': no policy goes with all of the other settings; leave out those of one policy")
    return tuple(allowed)


@dataclass(frozen=True, kw_only=True)
class JobProbe:
    """What is trained, as far as it decides how long an epoch takes."""

    samples_per_epoch: int
    batch_size: int  # per device and step of its own, accumulated micro-batches included
    global_batch_size: int | None = None  # as the user set it; None: batch_size times the devices
    epochs: int = 1
    steps: int | None = None  # max_steps
    candidates: tuple[str, ...] = ("sync", "balanced", "cadence", "async")  # policies that the settings allow
    anchor: int | None = None
    max_anchor: int | None = None
    min_ranks: int = 1  # devices that the run needs at least; 2 where a strategy divides something among them
    param_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0  # of the optimizer
    shares: tuple[float, ...] | None = None  # fixed ones, an entry for each rank of the probe
    accumulate: int = 1  # micro-batches of a step, each of which may fill a device's memory

    @classmethod
    def of(cls, config: RunConfig, samples: int, candidates: tuple[str, ...]) -> "JobProbe":
        """From the settings; `samples` of an epoch. Bytes are measured later."""
        size = config.global_batch_size
        return cls(
            samples_per_epoch=samples,
            batch_size=config.batch_size * config.accumulate,
            global_batch_size=size if isinstance(size, int) else None,
            epochs=config.epochs,
            steps=config.max_steps,
            candidates=candidates,
            anchor=config.anchor,
            max_anchor=config.max_anchor,
            min_ranks=max(config.min_ranks, 2 if config.strategy in SHARDED else 1),
            shares=config.shares,
            accumulate=config.accumulate,
        )


@dataclass(frozen=True, kw_only=True)
class RankProbe:
    """One device as a rank among all of them. Times are in ms, the speed in samples/s at the job's batch size."""

    device: str
    threads: int
    fixed_ms: float  # of a step, while all ranks compute at the same time
    sample_ms: float
    at_once: float  # speed while all ranks compute, each by itself
    slot_ms: float = 0.0  # of a batch between two rounds; 0: not measured
    round_ms: float = 0.0  # its own time for a round: snapshot and merge
    cap: int | None = None  # samples of a micro-batch that its memory holds, where that is known
    memory_bytes: int | None = None

    @property
    def cost(self) -> Cost:
        return Cost(self.fixed_ms, self.sample_ms)


@dataclass(frozen=True, kw_only=True)
class SoloProbe:
    """A device alone, with all cores that it would have then."""

    device: str
    threads: int
    speed: float  # samples/s at the job's batch size


@dataclass(frozen=True, kw_only=True)
class ExactProbe:
    """Some seconds of joint steps by `policy` on all ranks."""

    policy: str
    speed: float  # samples/s of all ranks together
    overhead_ms: float  # of a step beyond the work of the slowest rank in it: sums, and what the host does around them
    shares: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LocalProbe:
    """Some seconds of windows and rounds by `policy` on all ranks."""

    policy: str
    speed: float
    average_ms: float  # from the moment at which all ranks have entered a round until its average is there
    anchor: int | None = None  # of the windows that were timed; None: as in the job


@dataclass(frozen=True, kw_only=True)
class Probe:
    """All that was measured."""

    job: JobProbe
    ranks: tuple[RankProbe, ...]
    solos: tuple[SoloProbe, ...] = ()
    exact: ExactProbe | None = None
    local: LocalProbe | None = None
    start_s: float = 0.0  # until the rank processes begin to train
    seconds: float = 0.0  # that probing took
    is_disturbed: bool = False  # other programs took time of the cores meanwhile
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(rank.device for rank in self.ranks)

    def solo(self, device: str) -> SoloProbe | None:
        return next((found for found in self.solos if found.device == device), None)

    def speed_alone(self, rank: RankProbe) -> float:
        """Of its device by itself, at least as fast as among others: the machine's speed drifts between the two."""
        solo = self.solo(rank.device)
        return max(rank.at_once, 0.0 if solo is None else solo.speed)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Probe":
        """Of `to_json`; KeyError, TypeError or ValueError for anything else."""
        if found["version"] != VERSION:
            raise ValueError("a probe of another version")
        probe: Probe = read_as(cls, found)
        return probe
