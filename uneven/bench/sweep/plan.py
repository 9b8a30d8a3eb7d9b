"""The plan of `uneven bench sweep`: a list of runs, one for each model, allowed mode and seed.

Pure computation; run.py makes the runs that are missing. A simulated slow device trains the same params as the fast
one, so its solo run is for its speed only: one seed and one epoch, of a slice of a GPU five.

[Note: runs at equal time] A joint run is faster than one device alone, so at the end of its epochs time is left. What
it reaches in the single device's time is told by another run, with as many epochs as fit and a schedule that ends with
them. Their number follows from the seconds of finished runs, so these runs are planned last.

[Note: several runs at once] Most of a short run on a GPU is its start, so seeds cost more than their training. With
`jobs` the first seed of every mode runs alone, for its speed, and the others beside each other, for their quality:
their speeds are marked as those of disturbed runs, and no figure of speed is made of them. Where the ranks of a mode
take turns on a GPU its speed means nothing, so that its first seed runs beside others, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uneven.bench import models
from uneven.bench.modes import JOINT, OWN_LOOP, resolve_mode, run_folder
from uneven.bench.orders import SweepOrder
from uneven.bench.single.folders import (
    EFFICIENCY,
    EQUAL_TIME,
    RunRecord,
    for_speed,
    median_of,
    read_run,
    read_runs,
    single_device,
)
from uneven.bench.single.process import flags
from uneven.errors import InputError
from uneven.hardware.device import Device, is_lesser_copy, parse_devices, takes_turns

QUICK_MODELS = ("lenet", "gpt-nano")
QUICK = {"gpt-nano": {"samples": 256, "batch": 8, "eval": 128}}  # fits half a minute on two cores
QUICK_EPOCHS = 2
SEEDS = 5
SPEED_EPOCHS = {"cpu": 1, "cuda": 5}  # an epoch of a small model takes less than a second on a GPU
SAFE = 0.98  # of the single device's time: the next run may be slower than the last one by chance


@dataclass(frozen=True)
class Cell:
    """One run: its folder, and the settings of `uneven bench run` (or `efficiency`) by their names."""

    model: str
    mode: str
    seed: int
    folder: Path
    settings: dict[str, Any]  # a finished run is kept only if its own are equal
    is_efficiency: bool = False
    is_for_speed: bool = False  # a simulated slow device alone
    is_equal_time: bool = False  # its epochs follow from measured times, so they differ from sweep to sweep

    @property
    def arguments(self) -> list[str]:
        if self.is_efficiency:
            return ["efficiency", *flags(self.settings)]
        return ["run", *flags({**self.settings, "out": self.folder.parents[2]})]

    @property
    def result(self) -> Path | None:
        """The file for the printed JSON of a measurement that writes no folder."""
        return self.folder / EFFICIENCY if self.is_efficiency else None

    @property
    def name(self) -> str:
        what = "efficiency" if self.is_efficiency else f"seed {self.seed}"
        return f"{self.model} {self.mode} {what}{' at equal time' if self.is_equal_time else ''}"

    @property
    def is_whole(self) -> bool:
        """It trains all epochs of the order: not for its speed, and not at equal time."""
        return not self.is_equal_time and not self.is_for_speed

    @property
    def is_for_quality(self) -> bool:
        """A further seed, or a run whose ranks take turns on a GPU, so without a speed: it may run beside others."""
        is_in_turns = not self.mode.startswith("solo-") and takes_turns(parse_devices(self.settings["devices"]))
        return not self.is_efficiency and (self.seed > 0 or is_in_turns)

    @property
    def data(self) -> str:
        """The name of its data set."""
        return str(self.settings["data"] or models.get(self.model).data)

    @property
    def is_done(self) -> bool:
        if self.result is not None:
            return self.result.is_file()
        return isinstance(read_run(self.folder), RunRecord)


@dataclass(frozen=True)
class Skipped:
    """A mode that the devices or the order do not allow."""

    mode: str
    reason: str


def plan_sweep(order: SweepOrder) -> tuple[list[Cell], list[Skipped]]:
    """All runs of the order, and the modes that it skips; InputError for an unknown model or mode."""
    devices = parse_devices(order.devices)
    names = order.models or (QUICK_MODELS if order.is_quick else models.NAMES)
    for name in names:
        models.get(name)
    if order.jobs > 1 and any(device.kind == "cpu" for device in devices):
        raise InputError(
            f"--jobs {order.jobs} on {order.devices!r}: runs at once would share cores; it is for GPUs only"
        )
    wanted = order.modes or (*(f"solo-{place}" for place in range(len(devices))), *OWN_LOOP, *JOINT)
    reasons = {mode: _reason_to_skip(mode, devices, order) for mode in wanted}
    skipped = [Skipped(mode, reason) for mode, reason in reasons.items() if reason is not None]
    if order.modes and skipped:
        raise InputError(f"mode {skipped[0].mode!r} on {order.devices!r}: {skipped[0].reason}")
    allowed = [mode for mode in wanted if reasons[mode] is None]
    return list(_cells(order, names, allowed, devices)), skipped


def plan_equal_time(order: SweepOrder, cells: Sequence[Cell]) -> list[Cell]:
    """The runs at equal time that the finished ones of `cells` allow; see the note above."""
    if not order.has_equal_time:
        return []
    found = []
    records = read_runs(order.out)[0] if order.out.is_dir() else []
    for model in dict.fromkeys(cell.model for cell in cells):
        by_mode: dict[str, list[RunRecord]] = {}
        for run in (run for run in records if run.model == model):
            by_mode.setdefault(run.mode, []).append(run)
        for cell in cells:
            is_joint = cell.model == model and cell.result is None and cell.mode in JOINT
            if is_joint and cell.is_done and (epochs := _epochs_that_fit(cell.mode, by_mode)) is not None:
                settings = {**cell.settings, "epochs": epochs, "eval_every": max(1, epochs // 10)}
                folder = run_folder(order.out / EQUAL_TIME, cell.model, cell.mode, cell.seed)
                found.append(replace(cell, folder=folder, settings=settings, is_equal_time=True))
    return found


def _epochs_that_fit(mode: str, by_mode: Mapping[str, Sequence[RunRecord]]) -> int | None:
    """Into the time of the fastest device alone, for all seeds of a mode; None where they are no more than it had."""
    runs, single = by_mode[mode], single_device(by_mode)
    if single is None or runs[0].takes_turns:
        return None
    allowed_s, own_s = (median_of("train_seconds", for_speed(some)) for some in (by_mode[single], runs))
    own = runs[0].summary.epochs
    epochs = int(SAFE * allowed_s * own / own_s)
    return epochs if epochs > own else None


def _reason_to_skip(mode: str, devices: Sequence[Device], order: SweepOrder) -> str | None:
    kinds = {device.kind for device in devices}
    if mode.startswith("nccl") and kinds != {"cuda"}:
        return "NCCL joins CUDA devices only"
    if mode.startswith("nccl") and any(device.percent for device in devices):
        return "NCCL does not run between slices of one GPU under MPS; use devices cuda:0,cuda:0 for its quality"
    if mode == "torch-ddp" and len(kinds) > 1:
        return "PyTorch's DDP does not train a GPU and a CPU together"
    if mode == "torch-ddp" and order.precision != "fp32":
        return "PyTorch's DDP is run in fp32"
    if mode.startswith("solo-") and not (mode[5:].isascii() and mode[5:].isdigit()):
        return f"solo-N means the N-th device, from 0 to {len(devices) - 1}"
    if mode.startswith("solo-") and int(mode[5:]) >= len(devices):
        return f"there are {len(devices)} devices, solo-0 to solo-{len(devices) - 1}"
    if not mode.startswith("solo-"):
        resolve_mode(mode, order.devices)
    return None


def _cells(order: SweepOrder, names: Sequence[str], wanted: Sequence[str], devices: Sequence[Device]) -> Iterator[Cell]:
    for model in names:
        for mode in wanted:
            is_for_speed = mode.startswith("solo-") and is_lesser_copy(devices[int(mode[5:])], devices)
            seeds = order.seeds or (1 if order.is_quick else SEEDS)
            for seed in range(1 if is_for_speed else seeds):
                yield _cell(order, model, mode, seed, is_for_speed)
            if order.has_efficiency and not mode.startswith(("solo-", "nccl-", "sync")):
                yield _efficiency_cell(order, model, mode)


def _cell(order: SweepOrder, model: str, mode: str, seed: int, is_for_speed: bool) -> Cell:
    recipe = models.get(model)
    epochs = order.epochs or (QUICK_EPOCHS if order.is_quick else recipe.epochs)
    if is_for_speed:
        epochs = min(epochs, SPEED_EPOCHS[parse_devices(order.devices)[int(mode[5:])].kind])
    quick = QUICK.get(model, {}) if order.is_quick else {}
    batch, is_global = _batch(order, mode)
    settings = {
        "model": model,
        "mode": mode,
        "devices": order.devices,
        "seed": seed,
        "epochs": epochs,
        "samples": order.samples or quick.get("samples"),
        "eval_samples": quick.get("eval"),
        "data": _data(order, recipe.data),
        "batch_size": None if is_global else batch or quick.get("batch"),
        "global_batch_size": batch if is_global else None,
        "precision": order.precision,
        "compile": _compile(order, mode),
        "lr_scale": order.lr_scale if _is_exact(mode) else None,
        "eval_every": None if mode in OWN_LOOP else epochs if order.is_quick else max(1, epochs // 10),
    }
    folder = run_folder(order.out, model, mode, seed)
    return Cell(model, mode, seed, folder, settings, is_for_speed=is_for_speed)


def _efficiency_cell(order: SweepOrder, model: str, mode: str) -> Cell:
    recipe = models.get(model)
    settings = {
        "model": model,
        "policy": mode.removeprefix("cpu-"),
        "devices": order.devices,
        "data": _data(order, recipe.data),
        "batch_size": order.batch_size,
        "precision": order.precision,
        "compile": _compile(order, mode),
        "backend": None if mode == "torch-ddp" else "cpu",
    }
    return Cell(model, mode, 0, order.out / model / mode, settings, is_efficiency=True)


def _is_exact(mode: str) -> bool:
    """Whether a step of this mode is one of all devices together."""
    return mode in OWN_LOOP or mode == "torch-ddp" or mode.endswith(("-sync", "-balanced"))


def _compile(order: SweepOrder, mode: str) -> str:
    """PyTorch's DDP runs eagerly, and a loop of the user's own cannot be captured."""
    is_eager = mode == "torch-ddp" or (mode in OWN_LOOP and order.compile == "graph")
    return "off" if is_eager else order.compile


def _batch(order: SweepOrder, mode: str) -> tuple[int | None, bool]:
    """The batch size of a run, and whether it is the global one."""
    if order.global_batch_size is not None and _is_exact(mode):
        if mode == "torch-ddp":  # it takes the size of each device's batch
            return max(1, order.global_batch_size // len(parse_devices(order.devices))), False
        return order.global_batch_size, True
    return order.batch_size, False


def _data(order: SweepOrder, own: str) -> str | None:
    if own != "mnist":
        return None
    return order.data or ("mnist-mini" if order.is_quick else None)
