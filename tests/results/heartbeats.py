"""What ranks of a run in progress say of themselves."""

from typing import Any

TOTAL = 10_000
ENTRY = {"epoch": 1, "samples": TOTAL, "train_loss": 0.5, "lr": 0.1, "train_seconds": 4.0, "samples_per_s": 2500.0}


def status(own: int, device: str, **more: Any) -> dict[str, Any]:
    plain = {"phase": "compute", "slot": 3, "total": TOTAL, "epochs": 1, "seconds": 4.0, "loss": 0.25, "rounds": {}}
    return {**plain, "own": own, "device": device, **more}


def pair(fast: int, slow: int, **more: Any) -> list[dict[str, Any]]:
    return [status(fast, "cpu", **more), status(slow, "cpu@0.4", **more)]
