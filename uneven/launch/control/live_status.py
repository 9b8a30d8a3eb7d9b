"""Where a run is, from the heartbeats of its ranks: what `uneven status` shows. Pure functions, no torch in this file.

Called about once a second by launch/control/listing.py, with what the launcher hears anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from uneven.files import finite

NAME = "status.json"  # in the private folder of a run
BEFORE_TRAINING = "start"  # the phase of a rank that has not sent a heartbeat
COMMON = ("policy", "out", "epochs", "steps", "total")  # what is said once for all ranks


def describe(
    statuses: Sequence[Mapping[str, Any]],
    devices: Sequence[str],
    hosts: Sequence[str],
    generation: int = 0,
    lost: int = 0,
    why: str = "",
) -> dict[str, Any]:
    """The ranks that are in the run, in rank order: their last heartbeats, devices and machines.

    `lost` is how many processes the run goes on without, `why` the line about the newest generation.
    """
    lead = next((status for status in statuses if "total" in status), statuses[0] if statuses else {})
    trained = sum(int(status.get("own", 0)) for status in statuses)
    found = {name: lead.get(name) for name in COMMON} | {"generation": generation, "lost": lost, "why": why}
    saved = [str(status["saved"]) for status in statuses if status.get("saved")]
    return found | {
        "slot": max((_slot(status) for status in statuses), default=0),
        "epoch": _epoch(lead),
        "samples": max([trained, *(int(status.get("samples", 0)) for status in statuses)]),
        "samples_per_s": sum(_speed(status) for status in statuses),
        "saved": saved[-1] if saved else None,
        "has_begun": any("total" in status for status in statuses),
        "ranks": [
            _describe_rank(rank, status, device, host, trained)
            for rank, (status, device, host) in enumerate(zip(statuses, devices, hosts, strict=True))
        ],
    }


def _describe_rank(rank: int, status: Mapping[str, Any], device: str, host: str, trained: int) -> dict[str, Any]:
    own = int(status.get("own", 0))
    return {
        "rank": rank,
        "device": device,
        "machine": host,
        "slot": _slot(status),
        "phase": str(status.get("phase", BEFORE_TRAINING)),
        "samples": own,
        "share": own / trained if trained else None,
        "samples_per_s": _speed(status),
        "loss": finite(status.get("loss")),
        "round": (status.get("rounds") or {}).get("round"),
    }


def _slot(status: Mapping[str, Any]) -> int:
    """The steps that a rank has trained; once its run is over its heartbeats say how far that came."""
    return int(status.get("slot") or status.get("reached") or 0)


def _epoch(lead: Mapping[str, Any]) -> int | None:
    """The epoch that is being trained, counted from 1."""
    if lead.get("epoch") is None:
        return None
    epoch = int(lead["epoch"]) + 1
    return min(epoch, int(lead["epochs"])) if lead.get("epochs") else epoch


def _speed(status: Mapping[str, Any]) -> float:
    seconds = float(status.get("seconds", 0.0))
    return int(status.get("own", 0)) / seconds if seconds > 0 else 0.0
