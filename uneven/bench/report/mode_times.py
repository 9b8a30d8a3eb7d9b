"""How the runs of one mode spent their time, over its seeds, from what each tells of itself (single/run_times.py)."""

import statistics
from collections.abc import Sequence
from typing import Any

from uneven.bench.single.folders import RunRecord
from uneven.timeline.verdict import lost_by_state


def mode_times(runs: Sequence[RunRecord], alone: Sequence[float]) -> dict[str, Any]:
    """Fields of a ModeReport: rounds and their cost, utilisation per device, idle time by cause, calibration."""
    found = [times for run in runs if (times := run.times()) is not None]
    if not found:
        return {"rounds": None, "transfer_ms": None, "wait_ms": None}
    rounds = sum(times.rounds for times in found)

    def of_a_round(name: str) -> float | None:
        return sum((getattr(times, name) or 0.0) * times.rounds for times in found) / rounds if rounds else None

    lost = [lost_by_state(times.accounts, alone) for times in found if len(times.seconds) == len(alone)]
    anchors = [times.anchor for times in found if times.anchor is not None]
    return {
        "rounds": round(rounds / len(found)) if rounds else None,
        "transfer_ms": of_a_round("communication_ms"),
        "wait_ms": of_a_round("wait_ms"),
        "anchor": statistics.mean(anchors) if anchors else None,
        "utilisation": _means([times.utilisation for times in found]),
        "idle_s": {
            cause: sum(times.idle_s.get(cause, 0.0) for times in found) / len(found)
            for cause in dict.fromkeys(cause for times in found for cause in times.idle_s)
        },
        "lost": _means(lost),
        "gpus": _gpus(runs),
        "calibration": found[0].calibration,
    }


def _gpus(runs: Sequence[RunRecord]) -> dict[str, list[float]]:
    """What NVML saw while they trained; of runs on CPUs alone it is what other programs did."""
    used = [run for run in runs if any(str(device).startswith("cuda") for device in run.summary["devices"])]
    found = [times.gpus for run in used if (times := run.times()) is not None]
    names = dict.fromkeys(name for gpus in found for name in gpus)
    return {
        name: [statistics.mean(gpus[name][at] for gpus in found if name in gpus) for at in (0, 1)] for name in names
    }


def _means(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """By name, over those that have it."""
    names = dict.fromkeys(name for one in each for name in one)
    return {name: statistics.mean(one[name] for one in each if name in one) for name in names}
