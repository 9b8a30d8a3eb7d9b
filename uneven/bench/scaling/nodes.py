"""Finished runs of 1, 2, ... machines, for `uneven bench scaling --runs`: their speed, and what their timelines say.

A run over machines is started on each of them, by `uneven run --nodes` or another launcher, so this command cannot make
them itself. It reads the folders that they left under `out`, on the machine of rank 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from uneven.bench.single.shape import is_number
from uneven.errors import InputError
from uneven.files import read_json
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
        if any(Path(folder).resolve() == one.resolve() for known in found.values() for one in known):
            raise InputError(f"--runs {text!r}: {folder} is there twice, and a run counts once")
        found.setdefault(int(nodes), []).append(Path(folder))
    if 1 not in found:
        raise InputError(f"--runs {text!r} must have a run of 1 node: speed-ups are against it")
    return dict(sorted(found.items()))


def read_measured(folder: Path, nodes: int) -> Measured:
    """What the run that was saved under `out` in this folder has measured.

    InputError where it has not ended well, or was not on so many machines as far as its timeline tells.
    """
    state, timeline = read_json(folder / "state.json"), _timeline(folder)
    ends = state["history"][-1:] if isinstance(state, dict) and isinstance(state.get("history"), list) else []
    if not ends or not state.get("finished"):
        raise InputError(f"--runs: no finished run in {folder}: there must be a state.json, as fit(out=...) writes it")
    end = ends[0] if isinstance(ends[0], dict) else {}
    samples, seconds = end.get("samples", math.nan), end.get("train_seconds", math.nan)
    if not is_number(samples) or not is_number(seconds) or not seconds > 0.0:
        raise InputError(f"--runs: state.json in {folder} does not tell how many samples were trained in which time")
    if timeline is None:
        return Measured(samples / seconds, None)
    if timeline.machines and len(timeline.machines) != nodes:
        many = f"{len(timeline.machines)} machine{'s' * (len(timeline.machines) > 1)}"
        raise InputError(f"--runs {nodes}={folder}: that run was on {many}, as its timeline tells")
    return Measured(samples / seconds, overhead_of(timeline.accounts))


def measure_nodes(text: str) -> Mapping[int, list[Measured]]:
    return {nodes: [read_measured(folder, nodes) for folder in folders] for nodes, folders in parse_runs(text).items()}


def _timeline(folder: Path) -> Timeline | None:
    """None where there is none, or one that cannot be read: speeds are known without it."""
    try:
        return Timeline.from_json(read_json(folder / "timeline.json"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
