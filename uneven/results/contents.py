"""What a run's folder holds: its result and checkpoints, whole or not and why. Printed by `uneven state show`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from uneven.config import results_of
from uneven.errors import InputError
from uneven.files import NO_STATE
from uneven.results.checkpoint_folders import HIDDEN, find_checkpoints, slot_of
from uneven.results.record import RECORD, read_record
from uneven.results.saved_state import open_state


def run_contents(run: Path) -> list[dict[str, Any]]:
    """An entry for each state in a folder, oldest first, and for what a killed run left half-written."""
    checkpoints = find_checkpoints(run)
    if checkpoints == [run]:
        return [_entry(run, run.name)]
    entries = [_entry(folder, folder.name) for folder in reversed(checkpoints)]
    if (run / RECORD).exists():
        entries.append(_entry(run, "result"))
    for folder in sorted(run.iterdir()):
        hidden = HIDDEN.fullmatch(folder.name)
        if hidden and folder.is_dir() and folder not in checkpoints:
            fault = "left by a killed run, or being written now; the next run removes it"
            entries.append(
                {"name": folder.name, "kind": hidden[2], "whole": False, "fault": fault, "bytes": _size(folder)}
            )
    if not entries:
        raise InputError(f"{run} {NO_STATE}")
    return entries


def _entry(folder: Path, name: str) -> dict[str, Any]:
    fault, sizes = None, list[int]()
    try:
        state = open_state(folder)
        names = state.record.get("params", state.tensors)
        sizes = [state.tensors[key].numel() for key in names if key in state.tensors]
    except InputError as error:
        fault = str(error)
    try:
        record = read_record(folder)
    except InputError:
        record = {"slot": slot_of(folder)}
    config, samples, epoch_samples = record.get("config", {}), record.get("samples"), record.get("dataset_samples")
    return {
        "name": name,
        "path": str(folder),
        "kind": record.get("kind", "result" if fault is None or name == "result" else "checkpoint"),
        "whole": fault is None,
        "fault": fault,
        "slot": record.get("slot"),
        "samples": samples,
        "epochs": round(samples / epoch_samples, 3) if samples is not None and epoch_samples else None,
        "finished": record.get("finished"),
        "stopped": record.get("stopped"),
        "cause": record.get("cause"),
        "ledger": record.get("ledger"),
        "metrics": _metrics(record),
        "params": sum(sizes),
        "tensors": len(sizes),
        "bytes": _size(folder, record.get("files")),
        "files": record.get("files", {}),
        "ranks": record.get("world_size"),
        "devices": record.get("devices", config.get("devices")),
        "policy": config.get("policy"),
        "version": record.get("version"),
        "versions": record.get("versions", {}),
        "date": record.get("date"),
    }


def _metrics(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of the last evaluation, else of the last epoch."""
    entries = [
        {name: value for name, value in results_of(entry).items() if isinstance(value, int | float)}
        for entry in record.get("history", [])
    ]
    return next((entry for entry in reversed(entries) if set(entry) - {"train_loss"}), entries[-1] if entries else {})


def _size(folder: Path, files: Iterable[str] | None = None) -> int:
    """Bytes of a record and the files that it lists, else of all files in the folder."""
    paths = folder.iterdir() if files is None else (folder / name for name in (*files, RECORD))
    return sum(path.stat().st_size for path in paths if path.is_file())
