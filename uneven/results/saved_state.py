"""SavedState: a result or checkpoint opened for a look, without the script that made it; all its files are verified.

Used by `uneven state`: what a run's folder holds, the export of a model, and the comparison of two (comparison.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from uneven.config import results_of
from uneven.errors import InputError
from uneven.files import NO_STATE, folder_error, replacing
from uneven.results.checkpoint import STATE, read_checkpoint
from uneven.results.checkpoint_folders import HIDDEN, find_checkpoints, first_whole, slot_of
from uneven.results.record import RECORD, check_files, read_record
from uneven.results.state_tree import join_tree
from uneven.results.tensor_file import open_tensors, write_tensors

RESULT = "result"


@dataclass(frozen=True)
class SavedState:
    """What a folder holds: params and buffers, and the tensors of each rank; of a result those of rank 0 alone."""

    folder: Path
    kind: str  # "result" or "checkpoint"
    record: dict[str, Any]
    tensors: Mapping[str, Tensor]
    ranks: list[Mapping[str, Tensor]]

    @property
    def title(self) -> str:
        return f"{self.folder} ({self.kind}, slot {self.record.get('slot')})"


def open_state(folder: Path) -> SavedState:
    """A result or checkpoint; InputError in one line where it is not whole."""
    what = f"state {folder}"
    record = read_record(folder, what)
    if record.get("kind") == "checkpoint":
        found = read_checkpoint(folder)
        return SavedState(folder, "checkpoint", found.record, found.tensors, [part.tensors for part in found.ranks])
    check_files(folder, record, what)
    optimizer = open_tensors(folder / "optimizer.safetensors", what)
    plain = ("random.", "extra.")
    renamed = {name if name.startswith(plain) else f"optimizer.{name}": name for name in optimizer}
    own = {name: optimizer[stored] for name, stored in renamed.items()}
    return SavedState(folder, RESULT, record, open_tensors(folder / STATE, what), [own])


def newest_state(run: Path) -> tuple[SavedState, list[str]]:
    """The furthest whole state of a run: its result or a checkpoint; and a line for each further one that is damaged.

    `run` may also be a checkpoint itself, which is then the only one.
    """
    candidates = find_checkpoints(run)
    if candidates == [run]:
        return open_state(run), []
    if (run / RECORD).is_file():
        place = next((n for n, folder in enumerate(candidates) if _slot(folder) <= _slot(run)), len(candidates))
        candidates.insert(place, run)
    if not candidates:
        raise InputError(f"{run} {NO_STATE}")
    found, faults = first_whole(candidates, open_state)
    if found is None:
        raise InputError(f"{run} holds no whole state; {faults[0]}")
    return found, faults


def _slot(folder: Path) -> int:
    slot = slot_of(folder)
    return -1 if slot is None else slot


def export_model(state: SavedState, to: Path, overwrite: bool = False) -> int:
    """Write params and buffers to a .safetensors or .pt file, whole or not at all; returns its bytes.

    A .pt file is a state_dict that `torch.load(..., weights_only=True)` reads, with the tied names. A .safetensors
    file holds every tensor once and notes the tied names, as `safetensors.torch.load_model` expects it.
    """
    if to.suffix not in (".safetensors", ".pt", ".pth"):
        raise InputError(f"--to {to}: the name must end in .safetensors or .pt")
    if to.is_dir():
        raise InputError(f"--to {to} is a folder; name a file, as in {to}/model.safetensors")
    if to.exists() and not overwrite:
        raise InputError(f"--to {to} exists; add --overwrite to replace it, or choose another name")
    names = [*state.record.get("params", ()), *state.record.get("buffers", ())]
    tensors = {name: state.tensors[name] for name in names if name in state.tensors}
    tensors |= {name: state.tensors[name] for name in state.tensors if name not in tensors}
    tied = {name: source for name, source in state.record.get("tied", {}).items() if source in tensors}
    extra = join_tree(state.record.get("extra", {}), state.ranks[0])
    tensors |= {name: entry for name, entry in extra.items() if isinstance(entry, Tensor)}
    other = next((name for name in extra if name not in tensors), None)
    if other is not None and to.suffix == ".safetensors":
        raise InputError(f"--to {to}: the model's {other} is no tensor, which such a file must hold; name a .pt file")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with replacing(to) as file:
            if to.suffix == ".safetensors":
                write_tensors(Path(file.name), tensors, tied)
            else:
                torch.save({**tensors, **{name: tensors[source] for name, source in tied.items()}, **extra}, file)
    except OSError as error:
        raise folder_error(to.parent, error, "--to FILE") from error
    return to.stat().st_size


class HalfWritten(TypedDict):
    """What a killed run has left has these keys alone."""

    name: str
    kind: str  # checkpoint or result
    whole: bool
    fault: str | None  # why it is not whole
    bytes: int


class Entry(HalfWritten, total=False):
    """One state."""

    path: str
    slot: int | None
    samples: int | None
    epochs: float | None
    finished: bool | None
    stopped: str | None
    cause: str | None  # why it was saved
    ledger: dict[str, Any] | None
    metrics: dict[str, float | None]
    params: int | None
    tensors: int | None
    files: dict[str, Any] | None
    ranks: int | None
    devices: Any
    policy: str | None
    version: int | None
    versions: dict[str, str]
    date: str | None


class Contents(TypedDict):
    """What a run's folder holds."""

    folder: str
    newest_whole: str | None
    states: list[Entry]


def run_contents(run: Path) -> Contents:
    entries = _entries(run)
    newest = newest_whole(entries)
    return {"folder": str(run), "newest_whole": None if newest is None else newest["path"], "states": entries}


def newest_whole(entries: list[Entry]) -> Entry | None:
    """The furthest whole one; of a result and a checkpoint at the same slot the result, which comes last."""
    whole = [entry for entry in reversed(entries) if entry["whole"]]
    return max(whole, key=lambda entry: entry["slot"] or 0, default=None)


def _entries(run: Path) -> list[Entry]:
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


def _entry(folder: Path, name: str) -> Entry:
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
    config = record.get("config", {})
    samples, epoch_samples = record.get("samples"), record.get("dataset_samples")
    return {
        "name": name,
        "path": str(folder),
        "kind": record.get("kind", "result" if name == "result" else "checkpoint"),
        "whole": fault is None,
        "fault": fault,
        "slot": record.get("slot"),
        "samples": samples,
        "finished": record.get("finished"),
        "stopped": record.get("stopped"),
        "cause": record.get("cause"),
        "ledger": record.get("ledger"),
        "epochs": round(samples / epoch_samples, 3) if samples is not None and epoch_samples else None,
        "metrics": _metrics(record),
        "params": sum(sizes),
        "tensors": len(sizes),
        "bytes": _size(folder, record.get("files")),
        "files": record.get("files", {}),
        "ranks": record.get("world_size"),
        "devices": record.get("devices", config.get("devices")),
        "policy": config.get("policy"),
        "version": record.get("version"),
        "date": record.get("date"),
        "versions": record.get("versions", {}),
    }


def _metrics(record: dict[str, Any]) -> dict[str, float | None]:
    """The numbers of the last evaluation, else of the last epoch."""
    entries: list[dict[str, float | None]] = [
        {name: value for name, value in results_of(entry).items() if isinstance(value, int | float)}
        for entry in record.get("history", [])
    ]
    return next((entry for entry in reversed(entries) if set(entry) - {"train_loss"}), entries[-1] if entries else {})


def _size(folder: Path, files: Iterable[str] | None = None) -> int:
    """Bytes of a record and the files that it lists, else of all files in the folder."""
    paths = folder.iterdir() if files is None else (folder / name for name in (*files, RECORD))
    return sum(path.stat().st_size for path in paths if path.is_file())
