"""`uneven bench sweep`: get the data, then do every run of the plan that is missing, one fresh process each.

Called by cli/sweep.py. Invariant: a finished run is kept and never repeated with other settings; a failing one is
recorded in its folder, and the sweep goes on. Runs know their own interference: `uneven bench run` repeats and marks.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from uneven.bench import models
from uneven.bench.single.folders import FAILURE, SWEEP, BrokenRun, RunRecord, read_json, read_run
from uneven.bench.single.process import run_uneven
from uneven.bench.sweep.plan import Cell, Skipped, SweepOrder, plan_sweep
from uneven.bench.undisturbed import is_disturbed
from uneven.data import datasets
from uneven.data.datasets import Event
from uneven.errors import InputError, MachineError
from uneven.files import write_atomically

TAIL = 2000  # characters of a failing run's stderr that are kept
STAND_IN = {"shakespeare": "shakespeare-plays"}  # for a quick sweep: another text, which registries have


@dataclass
class Outcome:
    """The runs of a sweep by how they ended."""

    done: list[str]
    kept: list[str]
    failed: dict[str, str]  # cell -> reason
    skipped: list[Skipped]
    disturbed: list[str] = field(default_factory=list)  # of the runs done: their speeds are marked

    def to_json(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "kept": self.kept,
            "failed": self.failed,
            "disturbed": self.disturbed,
            "skipped": {left_out.mode: left_out.reason for left_out in self.skipped},
        }


def provide(order: SweepOrder, report: Callable[[str], None]) -> SweepOrder:
    """Download the data sets that are not on this machine; a quick sweep takes another text where the first fails.

    A set that cannot be had is reported; the runs that need it will fail with that reason, the others will not.
    """
    for name in sorted({cell.data for cell in plan_sweep(order)[0]}):
        if _is_here(name, report):
            continue
        other = STAND_IN.get(name) if order.is_quick else None
        if other is not None and _is_here(other, report):
            report(f"{other} takes the place of {name}")
            order = replace(order, text=other)
    return order


def _is_here(name: str, report: Callable[[str], None]) -> bool:
    """Whether the set is on this machine, after a download where it was not."""
    if any(found.name == name and found.is_here for found in datasets.presence()):
        return True

    def show(event: Event) -> None:
        if event.done is None:  # a message, not a count of bytes
            report(event.text)

    try:
        datasets.get(name, progress=show)
    except (InputError, MachineError) as error:
        report(str(error))
        return False
    return True


def sweep(order: SweepOrder, tell: Callable[[str, int, int, float], None]) -> Outcome:
    """Do what is missing; tell(cell, number, of all, seconds so far) before each run. Ctrl-C loses nothing."""
    cells, skipped = plan_sweep(order)
    missing = find_missing(order, cells)
    outcome = Outcome([], [cell.name for cell in cells if cell not in missing], {}, skipped)
    _write_record(order, skipped)
    began = time.monotonic()
    for number, cell in enumerate(missing):
        tell(cell.name, number, len(missing), time.monotonic() - began)
        reason = _run(cell)
        if reason is None:
            outcome.done.append(cell.name)
            if is_disturbed(read_json(cell.result or cell.folder / "summary.json")):
                outcome.disturbed.append(cell.name)
        else:
            outcome.failed[cell.name] = reason
    return outcome


def find_missing(order: SweepOrder, cells: Sequence[Cell]) -> list[Cell]:
    """What is to run; InputError where a run that would be kept was made with other settings."""
    missing = [cell for cell in cells if order.is_forced or not cell.is_done]
    for cell in cells:
        if cell not in missing:
            _check_same(cell)
    return missing


def _write_record(order: SweepOrder, skipped: Sequence[Skipped]) -> None:
    """For the report: how the runs were made, and which modes were left out."""
    order.out.mkdir(parents=True, exist_ok=True)
    before = read_json(order.out / SWEEP)
    known = before.get("commands", []) if isinstance(before, dict) else []
    commands = [*known, order.command] if order.command and order.command not in known else known
    record = {"version": 1, "commands": commands, "skipped": {left_out.mode: left_out.reason for left_out in skipped}}
    write_atomically(order.out / SWEEP, json.dumps(record, indent=1).encode())


def _check_same(cell: Cell) -> None:
    """InputError where a kept run was made with other settings: a table of both would mean nothing."""
    if cell.result is not None:
        return
    record = read_run(cell.folder)
    assert isinstance(record, RunRecord), "only finished runs are kept"
    recipe = models.get(cell.model)
    own = {"data": recipe.data, "batch_size": recipe.batch_size}  # what None means
    before = record.summary.get("asked", {})
    for key, value in cell.asked.items():
        was, is_now = (own.get(key) if given is None else given for given in (before.get(key), value))
        if was != is_now:
            raise InputError(
                f"{cell.folder} holds a run with {key} {was!r}, this sweep has {is_now!r}: "
                "choose another --out, or repeat all by --force"
            )


def _run(cell: Cell) -> str | None:
    """One run in a process of its own; the reason where it failed, else None."""
    arguments = ["bench", *cell.arguments, "--json"]
    ended = run_uneven(arguments)
    if ended.code == 0 and cell.result is not None:
        cell.result.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cell.result, ended.stdout.encode())
    if ended.code == 0 and cell.is_done:
        (cell.folder / FAILURE).unlink(missing_ok=True)
        return None
    reason = ended.message if ended.code else _broken(cell)
    cell.folder.mkdir(parents=True, exist_ok=True)
    record = {"reason": reason, "exit_code": ended.code, "command": arguments, "stderr": ended.stderr[-TAIL:]}
    write_atomically(cell.folder / FAILURE, json.dumps(record, indent=1).encode())
    return reason


def _broken(cell: Cell) -> str:
    found = read_run(cell.folder)
    return found.reason if isinstance(found, BrokenRun) else "left no result"
