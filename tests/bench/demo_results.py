"""Results of a demo, made up: what each mode did on a fast and a slow device."""

from dataclasses import replace
from typing import Any

from uneven.bench.demo import Results
from uneven.bench.single.folders import Summary

PAIR = ("cpu", "cpu@0.4")
SPEEDS = {
    "solo-0": 2500.0,
    "solo-1": 1000.0,
    "torch-ddp": 1925.0,
    "cpu-sync": 1950.0,
    "cpu-balanced": 3400.0,
    "cpu-async": 3430.0,
}


def summary(mode: str, speed: float, shares: tuple[float, ...] = (0.72, 0.28), **changes: Any) -> Summary:
    made = Summary(
        model="lenet",
        mode=mode,
        devices=["cpu"],
        seed=0,
        epochs=3,
        metric="accuracy",
        quality={"accuracy": 0.97},
        samples=30_000,
        train_seconds=30_000 / speed,
        samples_per_s=speed,
        sample_shares=[1.0] if mode.startswith("solo") else list(shares),
    )
    return replace(made, **changes)


def make_results(*modes: str) -> Results:
    return Results(PAIR, modes, {mode: summary(mode, SPEEDS[mode]) for mode in modes})
