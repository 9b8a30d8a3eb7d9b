"""`uneven bench sweep`: downloads the data, then makes every run of the plan that is missing, in fresh processes.

Called by cli/sweep.py. Invariant: a finished run is kept, and never mixed with runs of other settings; a failed run is
recorded in its folder, and the sweep continues. Interference is handled inside `uneven bench run`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.single.folders import (
    FAILURE,
    SWEEP,
    BrokenRun,
    RunRecord,
    folder_of,
    read_run,
    read_runs,
    write_file,
)
from uneven.bench.single.process import Ended, run_many
from uneven.bench.single.run import write_summary
from uneven.bench.sweep.plan import Cell, Skipped, SweepOrder, plan_equal_time, plan_sweep
from uneven.bench.undisturbed import is_disturbed
from uneven.data import datasets
from uneven.data.datasets import Event
from uneven.errors import InputError, MachineError
from uneven.files import mark_as_run, read_json
from uneven.hardware.device import parse_devices
from uneven.hardware.mps import shared_daemon
from uneven.hardware.preflight import check_device

TAIL = 2000  # characters of a failing run's stderr that are kept
# Settings of all runs of a model in a folder.
SHARED = ("epochs", "samples", "eval_samples", "data", "devices", "precision")
OF_EFFICIENCY = ("devices", "batch_size", "precision", "compile")


@dataclass
class Outcome:
    """The runs of a sweep, grouped by how they ended."""

    done: list[str]
    kept: list[str]
    failed: dict[str, str]  # cell -> reason
    skipped: list[Skipped]
    disturbed: list[str] = field(default_factory=list)  # those of `done` whose speeds are marked


def provide(order: SweepOrder, report: Callable[[str], None]) -> None:
    """Download missing data sets.

    A data set that cannot be downloaded is reported; the runs that need it will fail with that reason. InputError or
    MachineError for a device that is not here, if there is a run to make: all of them would fail.
    """
    cells = plan_sweep(order)[0]
    if order.is_forced or not all(cell.is_done for cell in cells):
        for device in parse_devices(order.devices):
            check_device(device)
    for name in sorted({cell.data for cell in cells}):
        _ensure_data(name, report)


def _ensure_data(name: str, report: Callable[[str], None]) -> None:
    if any(known.name == name and known.is_here for known in datasets.presence()):
        return

    def show(event: Event) -> None:
        if event.done is None:  # a message, not a count of bytes
            report(event.text)

    try:
        datasets.get(name, progress=show)
    except (InputError, MachineError) as error:
        report(str(error))


def sweep(order: SweepOrder, report: Callable[[str, int, int, float], None]) -> Outcome:
    """Make the missing runs; `report` gets (run, number, number of runs, seconds so far) before each.

    After Ctrl-C the finished runs are kept, and the same command continues.
    """
    cells, skipped = plan_sweep(order)
    missing = find_missing(order, cells)
    outcome = Outcome([], [cell.name for cell in cells if cell not in missing], {}, skipped)
    _write_record(order, skipped)
    _run_all(order, missing, outcome, report)
    longer = plan_equal_time(order, cells)
    missing = find_missing(order, longer)
    outcome.kept += [cell.name for cell in longer if cell not in missing]
    _run_all(order, missing, outcome, report)
    return outcome


def _run_all(
    order: SweepOrder, missing: Sequence[Cell], outcome: Outcome, report: Callable[[str, int, int, float], None]
) -> None:
    """Each in a fresh process: first those that run alone, then several at once ([Note: several runs at once])."""
    began = time.monotonic()
    beside = [cell for cell in missing if order.jobs > 1 and cell.is_for_quality]
    alone = [cell for cell in missing if cell not in beside]
    numbers = iter(range(len(missing)))

    def start(cell: Cell) -> list[str]:
        report(cell.name, next(numbers), len(missing), time.monotonic() - began)
        return _arguments(cell, cell in beside)

    for position, ended in run_many(map(start, alone)):
        _record(alone[position], ended, outcome)
    with shared_daemon(parse_devices(order.devices) if beside else []) as variables:
        for position, ended in run_many(map(start, beside), order.jobs, variables=variables):
            _record(beside[position], ended, outcome, order.jobs)


def _arguments(cell: Cell, is_beside: bool) -> list[str]:
    return ["bench", *cell.arguments, *(["--no-repeat"] if is_beside else []), "--json"]


def _record(cell: Cell, ended: Ended, outcome: Outcome, at_once: int = 1) -> None:
    """Add a run that has ended to the outcome."""
    reason = _failure(cell, ended, at_once > 1)
    if reason is not None:
        outcome.failed[cell.name] = reason
        return
    if at_once > 1:
        summary = read_json(cell.folder / "summary.json")
        write_summary(cell.folder, {**summary, "is_disturbed": True, "runs_at_once": at_once})
    outcome.done.append(cell.name)
    if at_once == 1 and is_disturbed(read_json(cell.result or cell.folder / "summary.json")):
        outcome.disturbed.append(cell.name)


def find_missing(order: SweepOrder, cells: Sequence[Cell]) -> list[Cell]:
    """The runs that are not finished; InputError if a finished one was made with other settings."""
    missing = [cell for cell in cells if order.is_forced or not cell.is_done]
    for cell in cells:
        if cell not in missing:
            _check_same(cell)
    if not any(cell.is_equal_time for cell in cells):
        _check_others(order, cells)
    return missing


def _check_others(order: SweepOrder, cells: Sequence[Cell]) -> None:
    """InputError if the folder has runs of other modes or seeds that stay, and were made with other epochs or data."""
    folders = {cell.folder for cell in cells if cell.result is None}
    records = read_runs(order.out)[0] if order.out.is_dir() else []
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model and cell.result is None and cell.is_whole]
        for run in (run for run in records if own and run.model == model):
            if folder_of(run.folder) not in folders and not run.is_for_speed:
                _compare(own[0], run, SHARED)


def _write_record(order: SweepOrder, skipped: Sequence[Skipped]) -> None:
    """Write the sweep's command and skipped modes to its folder, for the report."""
    before = read_json(order.out / SWEEP)
    known = before.get("commands", []) if isinstance(before, dict) else []
    commands = [*known, order.command] if order.command and order.command not in known else known
    record: dict[str, Any] = {
        "version": 1,
        "commands": commands,
        "skipped": {skip.mode: skip.reason for skip in skipped},
    }
    if isinstance(before, dict) and "files" in before:  # checksums of published runs, which stay as they are
        record["files"] = before["files"]
    write_file(order.out / SWEEP, json.dumps(record, indent=1))


def _check_same(cell: Cell) -> None:
    """InputError if a finished run was made with other settings: figures of both must not share a table."""
    if cell.result is not None:
        before = read_json(cell.result)
        _compare_settings(cell, cell.result, before if isinstance(before, dict) else {}, OF_EFFICIENCY)
        return
    record = read_run(cell.folder)
    assert isinstance(record, RunRecord), "only finished runs are kept"
    own = ("epochs", "eval_every") if cell.is_equal_time else ()  # which follow from measured times
    _compare(cell, record, [key for key in cell.settings if key not in own])


def _compare(cell: Cell, record: RunRecord, keys: Sequence[str]) -> None:
    _compare_settings(cell, record.folder, record.summary.get("asked") or {}, keys)


def _compare_settings(cell: Cell, place: Path, before: Mapping[str, Any], keys: Sequence[str]) -> None:
    recipe = models.get(cell.model)
    defaults = {"data": recipe.data, "batch_size": recipe.batch_size}  # for None
    for key in keys:
        was, is_now = (defaults.get(key) if one is None else one for one in (before.get(key), cell.settings.get(key)))
        if was != is_now:
            raise InputError(
                f"{place} holds a run with {key} {was!r}, this sweep has {is_now!r}: "
                "choose another --out, or repeat all by --force"
            )


def _failure(cell: Cell, ended: Ended, is_beside: bool) -> str | None:
    """The reason if the run failed, which is recorded in its folder; None if its result is there."""
    if ended.code == 0 and cell.result is not None:
        write_file(cell.result, ended.stdout)
    if ended.code == 0 and cell.is_done:
        (cell.folder / FAILURE).unlink(missing_ok=True)
        return None
    reason = ended.message if ended.code else _why_broken(cell)
    cell.folder.mkdir(parents=True, exist_ok=True)
    mark_as_run(cell.folder)  # or the next attempt would take it for a folder of somebody else's
    command = _arguments(cell, is_beside)
    record = {"reason": reason, "exit_code": ended.code, "command": command, "stderr": ended.stderr[-TAIL:]}
    write_file(cell.folder / FAILURE, json.dumps(record, indent=1))
    return reason


def _why_broken(cell: Cell) -> str:
    run = read_run(cell.folder)
    return run.reason if isinstance(run, BrokenRun) else "left no result"
