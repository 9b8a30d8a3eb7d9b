"""The checkpoints in a run's folder: which there are, the first whole one, and which may go.

Called by a run that resumes, by results/saver.py after each save, and by `uneven state`. Invariant: the newest
checkpoint is never removed, and a folder that is removed loses its name first, so that a half-removed one is never
taken for a checkpoint.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from uneven.errors import InputError
from uneven.results.record import RECORD, has_all_files, read_record

T = TypeVar("T")
_NAME = re.compile(r"(step|epoch)-(\d+)")
HIDDEN = re.compile(r"\.(.+)\.(partial|failed|old|removed)-\w+")  # what killed runs leave
_SLOT = re.compile(r'"slot": (\d+)')


def find_checkpoints(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, newest first: whole ones, and damaged ones that are named as such.

    Where `run` is itself a checkpoint it is the only one.
    """
    entries = [entry for entry in _entries(run) if _is_candidate(entry)]
    if not entries and is_checkpoint(run):
        return [run]
    slots = {entry: slot_of(entry) for entry in entries}
    per_epoch = max((slot / number for entry, slot in slots.items() if slot and (number := _epoch(entry))), default=1.0)

    def place(entry: Path) -> tuple[float, float]:
        from_name = _number(entry) * (per_epoch if _epoch(entry) else 1.0)
        slot = slots[entry]
        return from_name if slot is None else slot, entry.stat().st_mtime

    return sorted(entries, key=place, reverse=True)


def first_whole(candidates: Iterable[Path], read: Callable[[Path], T]) -> tuple[T | None, list[str]]:
    """What `read` gives for the first folder that it does not refuse, and why it refused those before, a line each."""
    refused: list[str] = []
    for folder in candidates:
        try:
            return read(folder), refused
        except InputError as error:  # noqa: PERF203  a handful of folders
            refused.append(str(error))
    return None, refused


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is, or was meant to be, one checkpoint and not a run's folder."""
    return folder.is_dir() and (_kind(folder) == "checkpoint" or any(folder.glob("rank-*.json")))


def prune(run: Path, keep_last: int | None, keep_best: int | None, monitor: str | None, mode: str) -> list[Path]:
    """Remove all but the `keep_last` newest checkpoints, the `keep_best` best and the one written last; returns those
    removed.

    The best are those whose last evaluation has the least ("min") or largest ("max") value of `monitor`; of several
    after the same evaluation only the first counts. Damaged ones are neither counted nor removed. With both None all
    are kept.
    """
    if keep_last is None and keep_best is None:
        return []
    records = {}
    for folder in find_checkpoints(run):
        with suppress(InputError, OSError):
            record = read_record(folder)
            if has_all_files(folder, record):
                records[folder] = record
    if not records:
        return []
    # After a resume from an older checkpoint the one just written may be behind those of the run before.
    just_written = max(records, key=lambda folder: (folder / RECORD).stat().st_mtime_ns)
    newest = list(records)[: max(keep_last or 1, 1)]
    kept = {just_written, *newest, *_best(records, keep_best or 0, monitor, mode)}
    doomed = [folder for folder in records if folder not in kept]
    for folder in doomed:
        _remove(folder)
    return doomed


def _best(records: Mapping[Path, Mapping[str, Any]], count: int, monitor: str | None, mode: str) -> list[Path]:
    first_after: dict[int, tuple[float, Path]] = {}  # number of evaluations -> (value, folder); oldest folder wins
    for folder, record in records.items():
        values = [entry[monitor] for entry in record.get("history", []) if isinstance(entry.get(monitor), int | float)]
        if values and not math.isnan(values[-1]):
            first_after[len(values)] = (-values[-1] if mode == "max" else values[-1], folder)
    return [folder for _, folder in sorted(first_after.values(), key=lambda found: found[0])[:count]]


def remove_partial(run: Path) -> list[Path]:
    """Remove what killed runs left half-written or half-removed, before a run starts; returns what was removed.

    A checkpoint that was being replaced gets its name back where the new one had not taken its place.
    """
    removed = []
    for entry in sorted(run.iterdir()) if run.is_dir() else ():
        hidden = HIDDEN.fullmatch(entry.name)
        if hidden is None or not (hidden[1] == "state" or _NAME.fullmatch(hidden[1])):
            continue
        if hidden[2] == "old" and not (run / hidden[1]).exists():
            entry.rename(run / hidden[1])
        else:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
            removed.append(entry)
    return removed


def set_aside(run: Path, entries: Sequence[Path]) -> Path | None:
    """Move what a run that goes on further back must not find to a new folder superseded-N; none where nothing is."""
    if not entries:
        return None
    number = 1
    while (aside := run / f"superseded-{number}").exists():
        number += 1
    aside.mkdir()
    for entry in entries:
        entry.rename(aside / entry.name)
    return aside


def _remove(folder: Path) -> None:
    with suppress(OSError):  # another process may have removed it; a folder that cannot be renamed stays whole
        hidden = folder.rename(folder.with_name(f".{folder.name}.removed-{uuid4().hex[:8]}"))
        shutil.rmtree(hidden, ignore_errors=True)


def _folders(run: Path) -> list[Path]:
    return sorted(entry for entry in run.iterdir() if entry.is_dir()) if run.is_dir() else []


def _entries(run: Path) -> Iterable[Path]:
    """The folders that may be checkpoints; one that was being replaced counts while its place is empty."""
    for entry in _folders(run):
        hidden = HIDDEN.fullmatch(entry.name)
        if hidden is None or (hidden[2] == "old" and not (run / hidden[1]).exists()):
            yield entry


def _is_candidate(folder: Path) -> bool:
    kind = _kind(folder)
    return kind == "checkpoint" or (kind is None and _NAME.fullmatch(_own_name(folder)) is not None)


def _kind(folder: Path) -> str | None:
    """ "checkpoint" or "result"; None where the record cannot be read."""
    try:
        kind = read_record(folder).get("kind")
    except InputError:
        return None
    return None if kind is None else str(kind)


def slot_of(folder: Path) -> int | None:
    """Where on the axis a checkpoint was taken, also from a record that is cut off."""
    with suppress(OSError):
        text = (folder / RECORD).read_text(errors="replace")
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            return int(json.loads(text)["slot"])
        if found := _SLOT.search(text):
            return int(found[1])
    return None


def _own_name(folder: Path) -> str:
    hidden = HIDDEN.fullmatch(folder.name)
    return hidden[1] if hidden else folder.name


def _number(folder: Path) -> int:
    name = _NAME.fullmatch(_own_name(folder))
    return int(name[2]) if name else 0


def _epoch(folder: Path) -> int:
    """N of epoch-N, else 0."""
    return _number(folder) if _own_name(folder).startswith("epoch-") else 0
