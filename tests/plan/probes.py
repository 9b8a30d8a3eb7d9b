"""Probes as a machine would have given them: LeNet on a CPU and one slowed down to 0.4, and what differs from it."""

from dataclasses import replace
from typing import Any

from uneven.plan.probe import ExactProbe, JobProbe, LocalProbe, Probe, RankProbe, SoloProbe

JOB = JobProbe(
    samples_per_epoch=64_000,
    batch_size=64,
    epochs=20,
    param_bytes=180_000,
    gradient_bytes=180_000,
    state_bytes=360_000,
)


def rank(device: str, sample_ms: float, fixed_ms: float = 4.0, **others: Any) -> RankProbe:
    slot_ms = fixed_ms + 64 * sample_ms
    speed = 64e3 / slot_ms
    known = {"threads": 1, "at_once": speed, "slot_ms": slot_ms, "round_ms": 0.5}
    return RankProbe(device=device, fixed_ms=fixed_ms, sample_ms=sample_ms, **{**known, **others})


def pair(**changes: Any) -> Probe:
    """40 and 100 ms a batch; a step's sum takes 1 ms, a round's 1 ms. Nothing was calibrated by a measured speed."""
    found = Probe(
        job=JOB,
        ranks=(rank("cpu", 0.5625), rank("cpu@0.4", 1.40625, 10.0)),
        solos=(SoloProbe(device="cpu", threads=2, speed=1700.0), SoloProbe(device="cpu@0.4", threads=2, speed=680.0)),
        exact=ExactProbe(policy="balanced", speed=0.0, overhead_ms=1.0, shares=(92, 36)),
        local=LocalProbe(policy="cadence", speed=0.0, average_ms=1.0, anchor=4),
        start_s=4.0,
    )
    return replace(found, **changes)


def several(count: int) -> Probe:
    """So many devices, each different."""
    ranks = tuple(rank(f"cuda:{place}", 0.5 + 0.1 * place) for place in range(count))
    return pair(ranks=ranks, solos=())
