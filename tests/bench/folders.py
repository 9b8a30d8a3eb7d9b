"""Run folders made by hand, as bench/single/ writes them, and published files of runs, as in docs/results."""

import json
from pathlib import Path
from typing import Any

from uneven.timeline.record import STATES, Account, Event
from uneven.timeline.timeline import Lane, Timeline

SECOND = 10**9


def make_run(
    root: Path, model: str, mode: str, seed: int, quality: float, samples_per_s: float = 1000.0, **summary: Any
) -> Path:
    """A finished run with two evaluated epochs, whose quality rises to `quality`."""
    folder = root / model / mode / f"seed-{seed}"
    folder.mkdir(parents=True)
    metric = "loss" if model == "gpt-nano" else "accuracy"
    devices = summary.pop("devices", ["cpu", "cpu@0.4"] if not mode.startswith("solo") else ["cpu"])
    samples = 2000
    seconds = samples / samples_per_s
    record = {
        "version": 1,
        "model": model,
        "mode": mode,
        "seed": seed,
        "devices": devices,
        "data": "mnist",
        "epochs": 2,
        "batch_size": 64,
        "precision": "fp32",
        "compile": "off",
        "metric": metric,
        "quality": {metric: quality},
        "samples": samples,
        "train_seconds": seconds,
        "samples_per_s": samples_per_s,
        "peak_memory_bytes": 10**8,
        "machine": {"processor": "a processor", "torch": "2.13.0", "uneven": "0.1.0"},
        **summary,
    }
    lines = [
        {"epoch": epoch, "samples": 1000 * n, "train_loss": 1.0 / n, "train_seconds": seconds * n / 2, metric: q}
        for n, epoch, q in ((1, 1, quality * (0.9 if metric == "accuracy" else 1.2)), (2, record["epochs"], quality))
    ]
    (folder / "summary.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline.json").write_text(json.dumps(make_timeline(devices, seconds).to_json()))
    return folder


def make_timeline(devices: list[str], seconds: float) -> Timeline:
    """Each device computes three quarters of the time and waits for the rest; two rounds on each."""
    end = int(seconds * SECOND)
    three = 3 * end // 4
    lanes = [Lane(rank, name, [("compute", 0, three), ("wait", three, end)]) for rank, name in enumerate(devices)]
    times = dict.fromkeys(STATES, 0.0) | {"compute": 0.75 * seconds, "wait": 0.25 * seconds}
    events = [
        Event(three + number, rank, "round", {"round": number, "transfer_ms": 2.0, "wait_ms": 4.0})
        for number in range(2)
        for rank in range(len(devices))
    ]
    return Timeline(lanes, [Account(rank, times) for rank in range(len(devices))], events, [])
