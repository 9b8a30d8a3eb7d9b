"""`uneven bench sweep`: downloads the data, then makes every run of the plan that is missing, in fresh processes.

Called by cli/bench.py. Invariant: a finished run is kept, and never mixed with runs of other settings; a failed run is
recorded in its folder, and the sweep continues. Interference is handled inside `uneven bench run`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.orders import SweepOrder
from uneven.bench.single.folders import FAILURE, SWEEP, BrokenRun, RunRecord, folder_of, read_run, read_runs, write_file
from uneven.bench.single.process import Ended, run_many
from uneven.bench.single.run import write_summary
from uneven.bench.sweep.plan import Cell, Skipped, plan_equal_time, plan_sweep
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

Tell = Callable[[str], None]


@dataclass
class Outcome:
    """The runs of a sweep, grouped by how they ended."""

    skipped: list[Skipped]
    done: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # cell -> reason
    disturbed: list[str] = field(default_factory=list)  # those of `done` whose speeds are marked


def provide(order: SweepOrder, tell: Tell) -> None:
    """Download missing data sets.

    A data set that cannot be downloaded is reported; the runs that need it will fail with that reason. InputError or
    MachineError for a device that is not here, if there is a run to make: all of them would fail.
    """
    cells = plan_sweep(order)[0]
    if order.is_forced or not all(cell.is_done for cell in cells):
        for device in parse_devices(order.devices):
            check_device(device)

    def show(event: Event) -> None:
        if event.done is None:  # a message, not a count of bytes
            tell(event.text)

    here = {known.name for known in datasets.presence() if known.is_here}
    for name in sorted({cell.data for cell in cells} - here):
        try:
            datasets.get(name, progress=show)
        except (InputError, MachineError) as error:  # noqa: PERF203, a few sets
            tell(str(error))


def planned(order: SweepOrder) -> tuple[list[Cell], list[Cell], list[Skipped]]:
    """All runs, those that are missing, and the modes that are left out."""
    cells, skipped = plan_sweep(order)
    longer = plan_equal_time(order, cells)
    return [*cells, *longer], [*find_missing(order, cells), *find_missing(order, longer)], skipped


def sweep(order: SweepOrder, tell: Tell) -> Outcome:
    """Make the missing runs. After Ctrl-C the finished runs are kept, and the same command continues."""
    cells, skipped = plan_sweep(order)
    missing, outcome = find_missing(order, cells), Outcome(skipped)
    _write_record(order, skipped)
    _run_all(order, cells, missing, outcome, tell)
    longer = plan_equal_time(order, cells)
    _run_all(order, longer, find_missing(order, longer), outcome, tell)
    return outcome


def _run_all(order: SweepOrder, cells: Sequence[Cell], missing: Sequence[Cell], outcome: Outcome, tell: Tell) -> None:
    """Each in a fresh process: first those that run alone, then several at once ([Note: several runs at once])."""
    outcome.kept += [cell.name for cell in cells if cell not in missing]
    began = time.monotonic()
    beside = [cell for cell in missing if order.jobs > 1 and cell.is_for_quality]
    alone = [cell for cell in missing if cell not in beside]
    numbers = iter(range(len(missing)))

    def start(cell: Cell) -> list[str]:
        number = next(numbers)
        left_s = (time.monotonic() - began) / max(1, number) * (len(missing) - number)
        tell(f"{number + 1}/{len(missing)} {cell.name}{f' about {left_s / 60:.0f} min left' if number else ''}")
        return _arguments(cell, cell in beside)

    for position, ended in run_many(map(start, alone)):
        _record(alone[position], ended, outcome)
    with shared_daemon(parse_devices(order.devices) if beside else []) as variables:
        for position, ended in run_many(map(start, beside), order.jobs, variables=variables):
            _record(beside[position], ended, outcome, order.jobs)


def _arguments(cell: Cell, is_beside: bool) -> list[str]:
    return ["bench", *cell.arguments, *(["--no-repeat"] if is_beside else []), "--json"]


def _record(cell: Cell, ended: Ended, outcome: Outcome, at_once: int = 1) -> None:
    """Add a run that has ended to the outcome; a failure is recorded in its folder."""
    if ended.code == 0 and cell.result is not None:
        write_file(cell.result, ended.stdout)
    if ended.code != 0 or not cell.is_done:
        reason = outcome.failed[cell.name] = ended.message if ended.code else _why_broken(cell)
        cell.folder.mkdir(parents=True, exist_ok=True)
        mark_as_run(cell.folder)  # or the next attempt would take it for a folder of somebody else's
        command = _arguments(cell, at_once > 1)
        record = {"reason": reason, "exit_code": ended.code, "command": command, "stderr": ended.stderr[-TAIL:]}
        write_file(cell.folder / FAILURE, json.dumps(record, indent=1))
        return
    (cell.folder / FAILURE).unlink(missing_ok=True)
    if at_once > 1:
        summary = _finished(cell).summary
        write_summary(cell.folder, replace(summary, is_disturbed=True, runs_at_once=at_once))
    elif read_json(cell.result or cell.folder / "summary.json").get("is_disturbed"):
        outcome.disturbed.append(cell.name)
    outcome.done.append(cell.name)


def _why_broken(cell: Cell) -> str:
    run = read_run(cell.folder)
    return run.reason if isinstance(run, BrokenRun) else "left no result"


def _finished(cell: Cell) -> RunRecord:
    record = read_run(cell.folder)
    assert isinstance(record, RunRecord), "only of finished runs"
    return record


def find_missing(order: SweepOrder, cells: Sequence[Cell]) -> list[Cell]:
    """The runs that are not finished; InputError if a finished one was made with other settings.

    Figures of both must not share a table. So must none of other modes or seeds that stay in the folder.
    """
    missing = [cell for cell in cells if order.is_forced or not cell.is_done]
    for cell in cells:
        if cell in missing:
            continue
        if cell.result is not None:
            before = read_json(cell.result)
            _compare(cell, cell.result, before if isinstance(before, dict) else {}, OF_EFFICIENCY)
        else:
            own = ("epochs", "eval_every") if cell.is_equal_time else ()  # which follow from measured times
            _compare_run(cell, _finished(cell), [key for key in cell.settings if key not in own])
    if any(cell.is_equal_time for cell in cells) or not order.out.is_dir():
        return missing
    folders = {cell.folder for cell in cells if cell.result is None}
    whole = {cell.model: cell for cell in reversed(cells) if cell.result is None and cell.is_whole}
    for run in read_runs(order.out)[0]:
        if run.model in whole and folder_of(run.folder) not in folders and not run.is_for_speed:
            _compare_run(whole[run.model], run, SHARED)
    return missing


def _compare_run(cell: Cell, run: RunRecord, keys: Sequence[str]) -> None:
    _compare(cell, run.folder, run.summary.asked, keys)


def _compare(cell: Cell, place: Path, before: Mapping[str, Any], keys: Sequence[str]) -> None:
    recipe = models.get(cell.model)
    defaults = {"data": recipe.data, "batch_size": recipe.batch_size}  # for None
    for key in keys:
        was, is_now = (defaults.get(key) if one is None else one for one in (before.get(key), cell.settings.get(key)))
        if was != is_now:
            raise InputError(
                f"{place} holds a run with {key} {was!r}, this sweep has {is_now!r}: "
                "choose another --out, or repeat all by --force"
            )


def _write_record(order: SweepOrder, skipped: Sequence[Skipped]) -> None:
    """Write the sweep's command and skipped modes to its folder, for the report."""
    before = read_json(order.out / SWEEP)
    record = before if isinstance(before, dict) else {}  # with checksums of published runs, which stay as they are
    commands = list(dict.fromkeys([*record.get("commands", []), *([order.command] if order.command else [])]))
    record |= {"version": 1, "commands": commands, "skipped": {skip.mode: skip.reason for skip in skipped}}
    write_file(order.out / SWEEP, json.dumps(record, indent=1))
