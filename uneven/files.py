"""Atomic file writes, the folder of a run's results, and why a write failed in plain words.

Called wherever results are written. Invariant: a file under its final name is complete, also after a crash.
"""

import errno
import json
import math
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import UnionType
from typing import IO, Any, Union, get_args, get_origin, get_type_hints

from uneven.errors import InputError, MachineError

MARK = ".uneven"  # in every folder that a run writes to
# What runs and benchmarks write to such a folder; a folder of that name is ours where it holds a state of ours.
RUN_FILES = (
    *(MARK, "state.json", "state.safetensors", "optimizer.safetensors", "log.json", "epoch-*", "step-*", "best"),
    "superseded-*",  # what a run that was resumed further back has moved aside
    *(".epoch-*", ".step-*"),  # a checkpoint that a killed run was writing or removing
    *("timeline.json", "timeline.csv", "timeline.html", "trace.json"),
    *("config.json", "metrics.jsonl", "summary.json", "failure.json", "plan.json"),
    "logs",  # what its processes printed
)
LOGS = ("rank-*.log", "rank-*.log.1", "launcher.log", "launcher.log.1")  # in that folder
_OURS = str(Path(__file__).parent) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = ("site-packages", "dist-packages")
NO_STATE = "holds no state of a run: there is no state.json and no step-N or epoch-N folder in it"


def home_folder() -> Path:
    """The user's home folder; / where nobody knows one, as of a user id without a name."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def temporary_folder() -> Path:
    """Where temporary files go; MachineError where no such folder can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        why = "no folder for temporary files can be written to"
        raise MachineError(f"{why}: set TMPDIR to one with some room (export TMPDIR=/some/folder)") from error


def read_json(path: Path) -> Any:
    """A file's content; None if it is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # the last of brackets in brackets
        return None


def is_users_code(file: str) -> bool:
    """Whether source code is neither uneven's own nor of an installed package or the standard library."""
    return not file.startswith((_OURS, _LIBRARY)) and not any(part in _INSTALLED for part in Path(file).parts)


ABSENT = {"absent": True}  # the metadata of a dataclass's field that is left out of its JSON while it is None


def json_text(document: Any) -> str:
    """A document as JSON; its objects are dataclasses or dicts."""
    return json.dumps(finite(document), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """The value as JSON has it: None for NaN and infinity, which it has no names for. `from_` is the key from."""
    if is_dataclass(value):
        entries = {field: getattr(value, field.name) for field in fields(value)}
        there = {field.name: entry for field, entry in entries.items() if entry is not None or field.metadata != ABSENT}
        return {name.rstrip("_"): finite(entry) for name, entry in there.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def read_as(kind: Any, value: Any) -> Any:
    """The inverse of `finite`: JSON as a dataclass, or a list, tuple or dict of some; TypeError says what does not fit.

    A key that the dataclass does not have is passed over; one that has a default may be missing. Numbers are finite.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        for one in inner:
            with suppress(TypeError):
                return read_as(one, value)
    elif is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(kind, value)
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(read_as(inner[0], one) for one in value)
    elif origin is dict and isinstance(value, dict):
        return {name: read_as(inner[1], one) for name, one in value.items()}
    elif kind in (int, float) and isinstance(value, (int, kind)) and not isinstance(value, bool):
        if math.isfinite(value):
            return value
    elif kind not in (int, float) and isinstance(kind, type) and isinstance(value, kind):
        return value
    raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")


def _read_fields(kind: Any, value: dict[str, Any]) -> Any:
    hints, known = get_type_hints(kind), fields(kind)
    entries = {}
    lacking = [one.name for one in known if one.default is MISSING and one.default_factory is MISSING]
    lacking = [name for name in lacking if name not in value]
    if lacking:
        raise TypeError(f"lacks {', '.join(lacking)}")
    for name in [one.name for one in known if one.name in value]:
        with _named(name):
            entries[name] = read_as(hints[name], value[name])
    return kind(**entries)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except TypeError:
        raise TypeError(f"has no usable {name}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content. A device or a pipe, such as /dev/stdout, is written into and stays what it is."""
    if _is_special(path):
        path.write_bytes(content)
        return
    with replacing(path) as file:
        file.write(content)


_closed: list[Path] = []  # folders that this process writes no results to


def close_folder(folder: Path) -> None:
    """On a machine that joined: `out` of the leader, which is not below the folder where `uneven join` was typed."""
    _closed.append(folder)


def is_closed(path: Path) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in _closed)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that takes the place of `path` at the end: that holds all of the new content, or after a failure the
    old one. `file.name` is its path until then, in the same folder."""
    if is_closed(path):
        raise PermissionError(errno.EACCES, "it is outside of the folder in which uneven join was typed", str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~umask())  # it is made private; results are for whom the user lets read them
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    with suppress(FileNotFoundError):  # renamed by who waited for this file, and syncs what it renames
        sync_folder(path.parent)


def umask() -> int:
    """What new files are not to be. As the kernel has it: os.umask tells it by changing it, for all threads."""
    try:
        found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return 0o077 if found is None else int(found[1], 8)  # private on a system that does not say


def _is_special(path: Path) -> bool:
    """Whether renaming a file to this path would replace a device or a pipe; root may do that even to /dev/null."""
    # /dev/stdout is a link, which a shell may have led to a plain file.
    return path.parent == Path("/dev") or (path.exists() and not path.is_file() and not path.is_dir())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    # The rename itself is only durable once the folder is synced: a power cut could otherwise lose the new name.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def partial_folder(folder: Path, token: str) -> Path:
    """Where a checkpoint is written until it is whole; all ranks of a run share the token."""
    return folder.with_name(f".{folder.name}.partial-{token}")


def failure_mark(partial: Path) -> Path:
    """The file by which a rank that could not write its part tells the others; its text says why."""
    return partial.with_name(partial.name.replace(".partial-", ".failed-"))


def leave_mark(mark: Path, why: str, writer: str) -> None:
    """Write a failure mark, as far as the disk lets us; `writer` is a name that no other writer of it has."""
    # In one piece: another rank reads it as soon as it is there, and an empty one would not tell it why.
    draft = mark.with_name(f"{mark.name}_{writer.replace('.', '_').replace('-', '_')}")
    try:
        draft.write_text(why)
        draft.rename(mark)
    except OSError:
        with suppress(OSError):  # on a full disk often an empty file fits, and that is enough
            draft.unlink(missing_ok=True)
            mark.touch()


def read_mark(mark: Path) -> str | None:
    """Why a save was given up: empty where nobody could write that; None where it was not."""
    try:
        return mark.read_text()
    except FileNotFoundError:
        return None
    except OSError:
        return ""


def make_out_folder(path: Path, overwrite: bool = False) -> Path | None:
    """Make the folder of a run's results and mark it as ours; returns where an earlier run's files were moved to.

    Invariant: only files of ours are moved, replaced or removed. An earlier run's files go to NAME.1, NAME.2, ...; with
    `overwrite` they are removed. A folder with other files in it is refused without `overwrite` and kept with it.
    Writing the mark shows at once whether the folder can be written to: that must fail before training, not after it.
    """
    if is_closed(path):
        raise InputError(
            f"out={str(path)!r} is not below the folder in which uneven join was typed; give a relative one"
        )
    try:
        if path.is_symlink() and not path.exists():
            raise InputError(f"out={str(path)!r} is a symbolic link to nothing; remove it, or choose another folder")
        if path.exists() and not path.is_dir():
            raise InputError(f"out={str(path)!r} is a file; name a folder, as in out='runs/my-run'")
        earlier = _files_of_ours(path, overwrite) if path.is_dir() else []
        if {entry.name for entry in earlier} <= {MARK, "logs", "plan.json"}:
            # Of a run that ended before it wrote anything, or a plan for this one.
            for entry in earlier:
                shutil.rmtree(entry) if entry.is_dir() else None
            earlier = []
        moved = _move_aside(path, earlier) if earlier and not overwrite else None
        for entry in earlier if overwrite else ():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        made = sum(not folder.exists() for folder in (path, *path.parents))
        make_run_folder(path)
        mark_as_run(path, made)
    except OSError as error:
        raise folder_error(path, error) from error
    return moved


def make_run_folder(path: Path) -> None:
    """For this user alone: logs and data are in it. One that is there already stays as it is."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


def mark_as_run(folder: Path, made: int = 0, run_id: str = "") -> None:
    """Mark a folder as one that runs write their results to; `made` of its path's folders did not exist before.

    `run_id` is of the run whose copies are in it.
    """
    copies = {"copies": run_id} if run_id else {}
    content = {"written by": "uneven", "pid": os.getpid(), "made": made, **copies}
    write_atomically(folder / MARK, json.dumps(content).encode())


def mark_of_run(folder: Path) -> str | None:
    """The id of the run whose copies are in a folder; None where it holds none."""
    found = read_json(folder / MARK)
    return str(found["copies"]) if isinstance(found, dict) and "copies" in found else None


def release_out_folder(path: Path) -> None:
    """Remove the folder of a run that failed before it wrote anything, as far as `make_out_folder` made it."""
    with suppress(OSError, ValueError, KeyError):
        if [entry.name for entry in path.iterdir()] == [MARK]:
            made = json.loads((path / MARK).read_text())["made"]
            (path / MARK).unlink()
            for folder in [path, *path.parents][:made]:
                folder.rmdir()


def _files_of_ours(path: Path, overwrite: bool) -> list[Path]:
    """What earlier runs wrote to a folder; InputError where the folder is not a run's own or empty."""
    entries = sorted(path.iterdir())
    named_as_ours = [entry for entry in entries if any(fnmatch(entry.name, name) for name in RUN_FILES)]
    if (path / MARK).is_file() or _is_state(path / "state.json"):
        return [entry for entry in named_as_ours if not entry.is_dir() or _is_ours(entry)]
    if not entries:
        return []
    if not overwrite:
        raise InputError(
            f"out={str(path)!r} holds files that no run of uneven wrote ({_listed(entries)}): choose an empty or new "
            "folder, or pass overwrite=True (--overwrite) to write beside them"
        )
    if named_as_ours := [entry for entry in named_as_ours if entry.name != "logs"]:  # anybody's: ours go beside them
        raise InputError(
            f"out={str(path)!r} holds {named_as_ours[0].name}, which no run of uneven wrote: it would be replaced; "
            "move it away, or choose another folder"
        )
    return []


def check_resumed_folder(path: Path) -> None:
    """InputError where a run cannot be resumed from this path: no folder, or nothing of a run in it."""
    what = f"resume={str(path)!r}"
    if not path.is_dir():
        found = "it is a file" if path.exists() else "there is no such folder"
        raise InputError(f"{what}: {found}; name a run's folder, or resume='auto'")
    if not may_hold_states(path):
        raise InputError(f"{what}: no checkpoint in it; a run writes them with save_every=... and when stopped")


def may_hold_states(folder: Path) -> bool:
    """Whether states of a run may be in a folder: a result, checkpoints, or what is left of one.

    A quick look by names, for the command line: reading the states needs torch, and loading that takes seconds.
    """
    names = ("state.json", "rank-*.json", "step-*", "epoch-*", ".*-*")
    is_named = any(fnmatch(entry.name, name) for entry in folder.iterdir() for name in names)
    return is_named or any(folder.glob("*/state.json"))


def _is_ours(folder: Path) -> bool:
    """Whether a folder below a run's own is a state or checkpoint, also a damaged one, or holds some (superseded-N)."""
    if folder.name == "logs":
        return all(any(fnmatch(entry.name, name) for name in LOGS) for entry in folder.iterdir())
    is_state = _is_state(folder / "state.json") or any(folder.glob("rank-*.safetensors"))
    return is_state or any(_is_ours(entry) for name in ("step-*", "epoch-*") for entry in folder.glob(name))


def _is_state(path: Path) -> bool:
    """Whether a state.json is one that a run of uneven wrote."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"slot", "samples", "param_groups"} <= record.keys()


def _move_aside(path: Path, entries: Sequence[Path]) -> Path:
    """Move an earlier run's files to a new folder NAME.1, NAME.2, ... beside `path`."""
    place = path.resolve()
    number = 1
    while (aside := place.with_name(f"{place.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for entry in entries:
        entry.rename(aside / entry.name)
    return aside


def _listed(entries: Sequence[Path]) -> str:
    names = ", ".join(entry.name for entry in entries[:3])
    return f"{names} and {len(entries) - 3} more" if len(entries) > 3 else names


def folder_error(path: Path, error: OSError, option: str = "out=... (--out FOLDER)") -> MachineError:
    """The error to raise where a folder for results cannot be made or written to."""
    return MachineError(f"cannot write to {path}: {why_not_written(error)}; choose another folder with {option}")


def why_not_written(error: OSError) -> str:
    """The reason of a failed write, in plain words."""
    return {
        errno.EACCES: "no permission to write",
        errno.EPERM: "no permission to write",
        errno.EROFS: "the file system is read-only",
        errno.ENOSPC: "no space left",
        errno.EDQUOT: "the disk quota is used up",
        errno.ENOTDIR: "a part of the path is a file",
        errno.EEXIST: "it is a file, not a folder",
        errno.ELOOP: "it is a symbolic link to itself",
        errno.ENAMETOOLONG: "the name is too long",
    }.get(error.errno or 0, error.strerror or str(error))
