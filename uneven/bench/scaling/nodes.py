"""Finished runs of 1, 2, ... machines, for `uneven bench scaling --runs`: their speed, and what their timelines say.

A run over machines is started on each of them, by `uneven run --nodes` or another launcher, so this command cannot make
them itself. It reads the folders that they left under `out`, on the machine of rank 0.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.timeline.record import Account
from uneven.timeline.timeline import Timeline


@dataclass(frozen=True)
class Measured:
    """One run: its speed, and communication and waiting over computation where its timeline tells."""

    samples_per_s: float
    overhead: float | None
    is_disturbed: bool = False


def overhead_of(accounts: Sequence[Account]) -> float | None:
    """Communication and waiting over computation, of all ranks together; None where nothing was computed."""
    computed = sum(account.seconds["compute"] for account in accounts)
    exchanged = sum(account.seconds["communication"] + account.seconds["wait"] for account in accounts)
    return exchanged / computed if computed else None


def parse_runs(text: str) -> dict[int, list[Path]]:
    """The folders of each number of nodes, from '1=one,2=two,2=two-again'."""
    found: dict[int, list[Path]] = {}
    for word in text.split(","):
        nodes, is_given, folder = word.strip().partition("=")
        if not is_given or not nodes.isdecimal() or not int(nodes) or not folder:
            raise InputError(
                f"--runs {text!r}: {word.strip()!r} must be a number of nodes and a folder, as in 2=runs/two"
            )
        found.setdefault(int(nodes), []).append(Path(folder))
    if 1 not in found:
        raise InputError(f"--runs {text!r} must have a run of 1 node: speed-ups are against it")
    return dict(sorted(found.items()))


def read_measured(folder: Path) -> Measured:
    """What the run that was saved under `out` in this folder has measured; InputError where it has not ended well."""
    state, timeline = _read(folder / "state.json"), _read(folder / "timeline.json")
    history = [] if state is None else state.get("history", [])
    if state is None or not state.get("finished") or not history:
        raise InputError(f"--runs: no finished run in {folder}: there must be a state.json, as fit(out=...) writes it")
    seconds, samples = history[-1]["train_seconds"], history[-1]["samples"]
    overhead = None if timeline is None else overhead_of(Timeline.from_json(timeline).accounts)
    return Measured(samples / seconds, overhead)


def measure_nodes(text: str) -> Mapping[int, list[Measured]]:
    return {nodes: [read_measured(folder) for folder in folders] for nodes, folders in parse_runs(text).items()}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
