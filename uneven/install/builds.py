"""Several builds of torch side by side: a folder of virtual environments, at most one of them active.

Each build is a folder NAME below `builds_folder()`. RECORD in it says what the torch there is; it is written last, by
the environment's own Python, so that a folder with it is complete and listing needs no torch. MARK is written first: it
says that the folder is ours, and while there is no RECORD, that its installation was interrupted. Nothing is ever
deleted that carries neither. Called by `uneven torch`, `uneven diagnose` and the start of every verb (switch.py).
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from uneven.errors import InputError, MachineError
from uneven.files import folder_error, home_folder, read_json, write_atomically
from uneven.hardware.gpus import Gpu
from uneven.hardware.torchbuild import Support, arch_support
from uneven.install.environment import folder_size
from uneven.install.fields import from_values

RECORD = "uneven-build.json"
MARK = "uneven-installing.json"
_ACTIVE = "active"  # a file beside the builds, with the name of one of them
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
NO_BUILD = "none"  # what UNEVEN_TORCH may say in place of a name
_CHOOSE = "UNEVEN_HOME=/some/folder"

# Isolated from PYTHONPATH; the environment has the same uneven, so the facts are those of `uneven diagnose` there.
_ASK = (
    "import dataclasses, json, platform\n"
    "from uneven.hardware.torchbuild import read_torch\n"
    "print(json.dumps({'python_version': platform.python_version(), **dataclasses.asdict(read_torch())}))"
)


@dataclass(frozen=True)
class Build:
    """One torch in an environment of its own. `python` runs it; `source` says where the torch came from."""

    name: str
    version: str
    cuda: str | None
    hip: str | None
    archs: tuple[str, ...]
    size_bytes: int
    python: str
    source: str
    python_version: str | None = None
    is_active: bool = False

    @property
    def kind(self) -> str:
        """'CUDA 12.6', 'ROCm 6.4' or 'CPU'."""
        return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU"


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where uneven keeps what it installs: $UNEVEN_HOME, else below the user's data folder."""
    if environ.get("UNEVEN_HOME"):
        return Path(environ["UNEVEN_HOME"]).expanduser().absolute()
    data = environ.get("XDG_DATA_HOME", "")
    # The standard asks to ignore a relative path there.
    base = Path(data) if data.startswith("/") else Path(environ.get("HOME") or home_folder()) / ".local" / "share"
    return base / "uneven"


def builds_folder() -> Path:
    return home() / "torch"


def check_name(name: str) -> str:
    """A name that is safe as a folder's; InputError else."""
    if not _NAME.fullmatch(name) or name in (_ACTIVE, NO_BUILD):
        raise InputError(
            f"build {name!r}: a name has letters, digits and . _ + -, begins with a letter or digit, "
            f"and is neither {_ACTIVE!r} nor {NO_BUILD!r}; as in cu126 or sm61-sm120"
        )
    return name


def python_of(folder: Path) -> Path:
    """The Python of an environment; not resolved, since the link itself is what makes it that environment's."""
    return folder / "bin" / "python"


def list_builds() -> list[Build]:
    """Every complete build, by name. Reads small files only: needs no torch and starts no process."""
    active = active_name()
    found = [_read(folder, active) for folder in _folders()]
    return [build for build in found if build is not None]


def unfinished_builds() -> list[str]:
    """The names of environments whose installation or removal was interrupted."""
    return [folder.name for folder in _folders() if not (folder / RECORD).is_file() and (folder / MARK).is_file()]


def _folders() -> list[Path]:
    try:
        return sorted(path for path in builds_folder().iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return []


def _read(folder: Path, active: str | None) -> Build | None:
    record = read_json(folder / RECORD)
    if not isinstance(record, dict):
        return None
    place = {"name": folder.name, "python": str(python_of(folder)), "is_active": folder.name == active}
    try:
        return from_values(Build, {**record, "archs": record.get("archs") or (), **place})
    except (KeyError, TypeError):  # written by a version that knew fewer fields, or changed by hand
        return None


def find_build(name: str) -> Build:
    """The build of this name; InputError with those there are."""
    builds = list_builds()
    for build in builds:
        if build.name == name:
            return build
    if name in unfinished_builds():
        raise InputError(f"build {name!r} is not complete: install it again, or run: uneven torch remove {name}")
    there = ", ".join(build.name for build in builds)
    known = f"there is {there}" if there else "there is none yet: uneven torch install"
    raise InputError(f"no torch build {name!r}: {known}")


def active_name() -> str | None:
    """The name in the file `active`, whether or not that build is there."""
    try:
        return (builds_folder() / _ACTIVE).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def activate(name: str | None) -> None:
    """Make one build the active one, atomically; None: the current environment is used again.

    MachineError where the folder of the builds does not let us.
    """
    if name is not None:
        find_build(name)
    try:
        if name is None:
            (builds_folder() / _ACTIVE).unlink(missing_ok=True)
        else:
            write_atomically(builds_folder() / _ACTIVE, f"{name}\n".encode())
    except OSError as error:
        raise folder_error(builds_folder(), error, _CHOOSE) from error


def check_removable(name: str, force: bool = False) -> Path:
    """The folder that `remove` would delete; InputError for the active one without `force`, and for any folder that
    uneven has not made."""
    folder = builds_folder() / check_name(name)
    if folder.is_symlink() or not any((folder / mark).is_file() for mark in (RECORD, MARK)):
        if folder.exists() or folder.is_symlink():
            raise InputError(f"{folder} was not made by uneven: it is left alone; delete it yourself if you want to")
        find_build(name)
    if name == active_name() and not force:
        raise InputError(f"{name} is the active build: first uneven torch activate --none, or add --force")
    return folder


def remove(name: str, force: bool = False) -> None:
    """Delete a build, complete or not, where `check_removable` allows it; MachineError while it is being installed."""
    folder = check_removable(name, force)
    try:
        with (folder / MARK).open("a+") as mark:
            _lock(mark, name)
            if name == active_name():
                activate(None)
            # From here on it is an interrupted one, which can be removed again, until its mark goes as the last file.
            _write_mark(mark, {"removing": name})
            (folder / RECORD).unlink(missing_ok=True)
            for entry in folder.iterdir():
                if entry.name != MARK:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            shutil.rmtree(folder)
    except OSError as error:
        raise MachineError(f"cannot delete {error.filename or folder}: {error.strerror or error}") from error


def _lock(mark: IO[str], name: str) -> None:
    """Hold a build's mark until it is closed; MachineError where another process does.

    The mark is only ever changed in place: a lock is of the file, not of its name.
    """
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MachineError(f"build {name!r} is being installed or removed by another process") from None


def _write_mark(mark: IO[str], values: Mapping[str, Any]) -> None:
    mark.truncate(0)
    mark.write(json.dumps(dict(values)))
    mark.flush()


@contextmanager
def installing(name: str, plan: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of a build while it is made: marked as ours and locked; a build that is there is not complete now.

    An interrupted installation leaves the mark: the next one of the same name goes on in the folder.
    """
    folder = builds_folder() / check_name(name)
    is_ours = any((folder / mark).is_file() for mark in (RECORD, MARK))
    if folder.is_symlink() or (folder.exists() and not is_ours and any(folder.iterdir())):
        raise InputError(f"{folder} was not made by uneven: choose another name with --name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = (folder / MARK).open("a+")
    except OSError as error:
        raise folder_error(folder, error, _CHOOSE) from error
    with mark:
        _lock(mark, name)
        _write_mark(mark, plan)
        (folder / RECORD).unlink(missing_ok=True)
        yield folder


def record(folder: Path, source: str) -> Build:
    """Ask a finished environment what its torch is, and write it down: from here on the build is complete."""
    facts = ask(python_of(folder))
    if not facts.get("installed") or facts.get("error") or not facts.get("version"):
        why = facts.get("error") or "it is not installed there"
        raise MachineError(f"torch does not work in {folder}: {why}; see 'uneven torch remove {folder.name}'")
    build = Build(
        name=folder.name,
        version=facts["version"],
        cuda=facts.get("cuda"),
        hip=facts.get("hip"),
        archs=tuple(facts.get("archs") or ()),
        size_bytes=folder_size(folder),
        python=str(python_of(folder)),
        source=source,
        python_version=facts.get("python_version"),
        is_active=folder.name == active_name(),
    )
    written = {key: value for key, value in asdict(build).items() if key not in ("python", "is_active")}
    write_atomically(folder / RECORD, json.dumps(written, indent=1).encode())
    with suppress(OSError):
        (folder / MARK).unlink()
    return build


def ask(python: Path) -> dict[str, Any]:
    """What read_torch() says in another environment; MachineError with the last line of what went wrong there."""
    try:
        done = subprocess.run([str(python), "-I", "-c", _ASK], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return facts
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        why = str(error)
    raise MachineError(f"{python} cannot say which torch it has: {why}")


def coverage(cuda: str | None, hip: str | None, archs: Sequence[str], gpus: Sequence[Gpu]) -> dict[str, str] | None:
    """Support for each architecture of these GPUs, OK, JIT or MISSING; None where it cannot be said.

    That is: no GPU, ROCm (whose archs have other names), or a CUDA build whose archs are not known.
    """
    sms = sorted({gpu.sm for gpu in gpus if gpu.sm})
    if not sms or hip or (cuda and not archs):
        return None
    return {sm: (arch_support(sm, archs) if cuda else Support.MISSING).value for sm in sms}
