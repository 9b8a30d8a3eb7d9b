"""`uneven bench sweep`: every model in every mode that the hardware allows, one fresh process per run.

What to run is arithmetic on the order; `sweep` then does what is missing. A finished run is kept, a failing one is
recorded in its folder and the sweep goes on. A slow device that is simulated trains the same as the fast one, so it
runs alone for its speed only: one seed, one epoch.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.single.folders import FAILURE, SWEEP, BrokenRun, RunRecord, read_json, read_run
from uneven.bench.single.modes import OWN_LOOP, PAIR, TOGETHER, resolve_mode
from uneven.bench.single.process import flags, run_uneven
from uneven.errors import InputError
from uneven.files import write_atomically
from uneven.hardware.device import Device, parse_devices

QUICK_MODELS = ("lenet", "gpt-nano")
QUICK = {"gpt-nano": {"samples": 256, "batch": 8, "eval": 128}}  # what two cores can do in half a minute
QUICK_EPOCHS = 2
TAIL = 2000  # characters of a failing run's last words that are kept


@dataclass(frozen=True, kw_only=True)
class SweepOrder:
    """What to run. None means: all models, all modes, each model's own data, batch and epochs."""

    models: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    seeds: int = 5
    devices: str = PAIR
    is_quick: bool = False
    data: str | None = None  # in the place of MNIST
    text: str | None = None  # in the place of Shakespeare
    samples: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None  # of the exact modes and torch-ddp
    precision: str = "fp32"
    compile: str = "off"
    has_efficiency: bool = False  # measure it by pairs, once per model and mode
    out: Path = Path("runs")
    is_forced: bool = False
    command: str = ""  # as it was typed, for the report


@dataclass(frozen=True)
class Cell:
    """One run: its folder, and what `uneven bench run` (or `efficiency`) is told."""

    model: str
    mode: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    asked: dict[str, Any]  # the same by name; a finished run counts only if it was asked for so
    result: Path | None = None  # where the printed JSON goes, for a measurement that writes no folder

    @property
    def name(self) -> str:
        return f"{self.model} {self.mode} " + ("efficiency" if self.result else f"seed {self.seed}")

    @property
    def data(self) -> str:
        """The set that it trains on."""
        return str(self.asked["data"] or models.get(self.model).data)

    @property
    def is_done(self) -> bool:
        if self.result is not None:
            return self.result.is_file()
        return isinstance(read_run(self.folder), RunRecord)


@dataclass(frozen=True)
class Skipped:
    """A mode that these devices, or the order, do not allow."""

    mode: str
    reason: str


@dataclass
class Outcome:
    """What became of a sweep."""

    done: list[str]
    kept: list[str]
    failed: dict[str, str]  # cell -> reason
    skipped: list[Skipped]

    def to_json(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "kept": self.kept,
            "failed": self.failed,
            "skipped": {one.mode: one.reason for one in self.skipped},
        }


def plan_sweep(order: SweepOrder) -> tuple[list[Cell], list[Skipped]]:
    """All runs of the order, and the modes it cannot have; InputError for what is no model or mode."""
    devices = parse_devices(order.devices)
    names = order.models or (QUICK_MODELS if order.is_quick else models.NAMES)
    for name in names:
        models.get(name)
    wanted = order.modes or _all_modes(devices)
    skipped = [Skipped(mode, reason) for mode in wanted if (reason := _why_not(mode, devices, order)) is not None]
    if order.modes and skipped:
        raise InputError(f"mode {skipped[0].mode!r} on {order.devices!r}: {skipped[0].reason}")
    allowed = [mode for mode in wanted if mode not in {one.mode for one in skipped}]
    return list(_cells(order, names, allowed, devices)), skipped


def _all_modes(devices: Sequence[Device]) -> tuple[str, ...]:
    return (*(f"solo-{place}" for place in range(len(devices))), *OWN_LOOP, *TOGETHER)


def _why_not(mode: str, devices: Sequence[Device], order: SweepOrder) -> str | None:
    kinds = {device.kind for device in devices}
    if mode.startswith("nccl") and kinds != {"cuda"}:
        return "NCCL joins CUDA devices only"
    if mode.startswith("nccl") and any(device.percent for device in devices):
        return "NCCL does not run between slices of one GPU under MPS; use devices cuda:0,cuda:0 for its quality"
    if mode == "torch-ddp" and len(kinds) > 1:
        return "PyTorch's DDP does not train a GPU and a CPU together"
    if mode == "torch-ddp" and order.precision != "fp32":
        return "PyTorch's DDP is run in fp32"
    if mode.startswith("solo-") and not mode[5:].isdigit():
        return f"solo-N means the N-th device, from 0 to {len(devices) - 1}"
    if mode.startswith("solo-") and int(mode[5:]) >= len(devices):
        return f"there are {len(devices)} devices, solo-0 to solo-{len(devices) - 1}"
    if not mode.startswith("solo-"):
        resolve_mode(mode, order.devices)
    return None


def _cells(order: SweepOrder, names: Sequence[str], wanted: Sequence[str], devices: Sequence[Device]) -> Iterator[Cell]:
    for model in names:
        for mode in wanted:
            is_for_speed = mode.startswith("solo-") and int(mode[5:]) > 0 and devices[int(mode[5:])].speed < 1.0
            for seed in range(1 if is_for_speed or order.is_quick else order.seeds):
                yield _cell(order, model, mode, seed, is_for_speed)
            if order.has_efficiency and not mode.startswith(("solo-", "nccl-", "sync")):
                yield _efficiency_cell(order, model, mode)


def _cell(order: SweepOrder, model: str, mode: str, seed: int, is_for_speed: bool) -> Cell:
    recipe = models.get(model)
    epochs = 1 if is_for_speed else order.epochs or (QUICK_EPOCHS if order.is_quick else recipe.epochs)
    quick = QUICK.get(model, {}) if order.is_quick else {}
    batch, is_whole = _batch(order, mode)
    given = {
        "model": model,
        "mode": mode,
        "devices": order.devices,
        "seed": seed,
        "epochs": epochs,
        "samples": order.samples or quick.get("samples"),
        "eval_samples": quick.get("eval"),
        "data": _data(order, recipe.data),
        "batch_size": None if is_whole else batch or quick.get("batch"),
        "global_batch_size": batch if is_whole else None,
        "precision": order.precision,
        "compile": "off" if mode == "torch-ddp" else order.compile,
        "eval_every": None if mode in OWN_LOOP else epochs if order.is_quick else max(1, epochs // 10),
    }
    folder = order.out / model / mode / f"seed-{seed}"
    return Cell(model, mode, seed, folder, ("run", *flags({**given, "out": order.out})), given)


def _efficiency_cell(order: SweepOrder, model: str, mode: str) -> Cell:
    recipe = models.get(model)
    given = {
        "model": model,
        "policy": mode.removeprefix("cpu-"),
        "devices": order.devices,
        "data": _data(order, recipe.data),
        "batch_size": order.batch_size,
        "compile": "off" if mode == "torch-ddp" else order.compile,
    }
    place = order.out / model / mode
    return Cell(model, mode, 0, place, ("efficiency", *flags(given)), given, place / "efficiency.json")


def _batch(order: SweepOrder, mode: str) -> tuple[int | None, bool]:
    """The batch size to ask for, and whether it is that of all devices."""
    is_exact = mode in OWN_LOOP or mode == "torch-ddp" or mode.endswith(("-sync", "-balanced"))
    if order.global_batch_size is not None and is_exact:
        if mode == "torch-ddp":  # it knows equal batches only
            return max(1, order.global_batch_size // len(parse_devices(order.devices))), False
        return order.global_batch_size, True
    return order.batch_size, False


def _data(order: SweepOrder, own: str) -> str | None:
    if own == "shakespeare":
        return order.text
    if own != "mnist":
        return None
    return order.data or ("mnist-mini" if order.is_quick else None)


def sweep(order: SweepOrder, tell: Callable[[str, int, int, float], None]) -> Outcome:
    """Do what is missing; tell(cell, number, of all, seconds so far) before each run. Ctrl-C loses nothing."""
    cells, skipped = plan_sweep(order)
    missing = find_missing(order, cells)
    outcome = Outcome([], [cell.name for cell in cells if cell not in missing], {}, skipped)
    _leave_word(order, skipped)
    began = time.monotonic()
    for number, cell in enumerate(missing):
        tell(cell.name, number, len(missing), time.monotonic() - began)
        reason = _run(cell)
        if reason is None:
            outcome.done.append(cell.name)
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


def _leave_word(order: SweepOrder, skipped: Sequence[Skipped]) -> None:
    """For the report: how the runs were made, and which modes could not be."""
    order.out.mkdir(parents=True, exist_ok=True)
    before = read_json(order.out / SWEEP)
    known = before.get("commands", []) if isinstance(before, dict) else []
    commands = [*known, order.command] if order.command and order.command not in known else known
    record = {"version": 1, "commands": commands, "skipped": {one.mode: one.reason for one in skipped}}
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
        was, is_now = (own.get(key) if one is None else one for one in (before.get(key), value))
        if was != is_now:
            raise InputError(
                f"{cell.folder} holds a run with {key} {was!r}, this sweep has {is_now!r}: "
                "choose another --out, or repeat all by --force"
            )


def _run(cell: Cell) -> str | None:
    """One run in a process of its own; what went wrong, or None."""
    words = ["bench", *cell.arguments, "--json"]
    ended = run_uneven(words)
    if ended.code == 0 and cell.result is not None:
        cell.result.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cell.result, ended.stdout.encode())
    if ended.code == 0 and cell.is_done:
        (cell.folder / FAILURE).unlink(missing_ok=True)
        return None
    reason = ended.message if ended.code else _broken(cell)
    cell.folder.mkdir(parents=True, exist_ok=True)
    record = {"reason": reason, "exit_code": ended.code, "command": words, "stderr": ended.stderr[-TAIL:]}
    write_atomically(cell.folder / FAILURE, json.dumps(record, indent=1).encode())
    return reason


def _broken(cell: Cell) -> str:
    found = read_run(cell.folder)
    return found.reason if isinstance(found, BrokenRun) else "left no result"
