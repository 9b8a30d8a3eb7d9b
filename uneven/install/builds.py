"""Several builds of torch side by side: a folder of virtual environments, at most one of them active.

Each build is a folder NAME below `builds_folder()`. RECORD in it says what the torch there is; it is written last, by
the environment's own Python, so that a folder with it is complete and listing needs no torch. MARK is written first: it
says that the folder is ours, and while there is no RECORD, that its installation was interrupted. Nothing is ever
deleted that carries neither. Called by `uneven torch`, `uneven diagnose` and the start of every verb (switch.py).
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import uneven
from uneven.errors import InputError, MachineError
from uneven.files import folder_error, home_folder, read_json, write_atomically
from uneven.hardware.gpus import Gpu
from uneven.hardware.preflight import OLDEST_TORCH
from uneven.hardware.torchbuild import Support, TorchBuild, arch_support, release
from uneven.install.advice import advise, check_tag, read_machine
from uneven.install.steps import Step, environment_step, install_step, python_of, run_step

RECORD = "uneven-build.json"
MARK = "uneven-installing.json"
_ACTIVE = "active"  # a file beside the builds, with the name of one of them
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
NO_BUILD = "none"  # what UNEVEN_TORCH may say in place of a name
_CHOOSE = "UNEVEN_HOME=/some/folder"

# Isolated from PYTHONPATH; the environment has the same uneven, so the facts are those of `uneven diagnose` there.
_ASK = (
    "import dataclasses, json\n"
    "from uneven.hardware.torchbuild import read_torch\n"
    "print(json.dumps(dataclasses.asdict(read_torch())))"
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
    is_active: bool = False

    @property
    def kind(self) -> str:
        """'CUDA 12.6', 'ROCm 6.4' or 'CPU'."""
        return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU"

    def coverage(self, gpus: Sequence[Gpu]) -> dict[str, str] | None:
        """Support for each architecture of these GPUs, OK, JIT or MISSING; None where it cannot be said.

        That is: no GPU, ROCm (whose archs have other names), or a CUDA build whose archs are not known.
        """
        sms = sorted({gpu.sm for gpu in gpus if gpu.sm})
        if not sms or self.hip or (self.cuda and not self.archs):
            return None
        return {sm: (arch_support(sm, self.archs) if self.cuda else Support.MISSING).value for sm in sms}


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
    known = {part.name: record[part.name] for part in fields(Build) if part.name in record}
    try:
        return Build(**{**known, "archs": tuple(map(str, record["archs"])), **place})
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


def check_absent(name: str) -> None:
    """InputError where a complete build of this name is there."""
    for build in list_builds():
        if build.name == name:
            raise InputError(
                f"build {name!r} is there (torch {build.version}): choose --name, or run: uneven torch remove {name}"
            )


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
    """Delete a build, complete or not, where `check_removable` allows it."""
    folder = check_removable(name, force)
    try:
        if name == active_name():
            activate(None)
        # From here on it is an interrupted one, which can be removed again, until its mark goes as the last file.
        (folder / MARK).touch()
        (folder / RECORD).unlink(missing_ok=True)
        for entry in folder.iterdir():
            if entry.name != MARK:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        shutil.rmtree(folder)
    except OSError as error:
        raise MachineError(f"cannot delete {error.filename or folder}: {error.strerror or error}") from error


@dataclass(frozen=True)
class BuildPlan:
    """What `uneven torch install` would do: `steps` may all be repeated, since pip and uv keep what they have."""

    name: str
    source: str
    steps: tuple[Step, ...]

    @property
    def folder(self) -> Path:
        return builds_folder() / self.name


def plan_build(
    variant: str, name: str | None = None, version: str | None = None, index_url: str | None = None
) -> BuildPlan:
    """What to install for a variant; InputError for one that does not exist, MachineError where 'auto' finds none.

    `variant` is a tag of PyTorch's indexes, the file of a wheel, or 'auto': what `uneven setup` advises. `index_url` is
    an index in place of PyTorch's own.
    """
    if variant == "auto":
        # Whatever torch is here does not matter, and importing it takes seconds.
        advice = advise(read_machine(torch=TorchBuild(installed=False)))
        if advice.build is None:
            raise MachineError(f"{advice.why}; {advice.action}")
        variant = advice.build
    if version is not None and (release(version) or (0, 0)) < OLDEST_TORCH:
        raise InputError(f"--version {version}: a version of torch from 2.8 on, such as 2.13.0")
    tag: str | None = None
    if variant.endswith(".whl"):
        match = re.fullmatch(r"torch-([^-]+)-.*", Path(variant).name)
        if match is None or version is not None or not Path(variant).is_file():
            raise InputError(f"{variant}: allowed is the file of a wheel, torch-VERSION-...whl, without --version")
        package, chosen = str(Path(variant).absolute()), match[1]
        source = Path(variant).name
    else:
        tag = variant
        package = check_tag(tag).torch if version is None else f"torch=={version}"
        chosen = tag if version is None else f"{tag}-{version}"
        source = f"{package} of {tag}"
    folder = builds_folder() / check_name(name or chosen)
    python = python_of(folder)
    steps = (
        environment_step(folder),
        install_step(python, [package], tag, index_url),
        install_step(python, own_package()),
    )
    return BuildPlan(folder.name, source, steps)


def make_build(plan: BuildPlan, say: Callable[[str], None]) -> Build:
    """Make the environment, install torch and then uneven into it, and write down what it is."""
    check_absent(plan.name)
    with installing(plan.name) as folder:
        for step in plan.steps:
            say(step.line)
            run_step(step, say)
        return record(folder, plan.source)


def own_package() -> tuple[str, ...]:
    """What installs the same uneven elsewhere: the checkout this one runs from, where it came from, its version.

    The very same code, since machines of a run compare every line of it.
    """
    checkout = Path(uneven.__file__).absolute().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return ("-e", str(checkout))
    try:
        origin = json.loads(distribution("uneven").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url, vcs = origin.get("url"), origin.get("vcs_info")
    if vcs:
        return (f"uneven @ {vcs['vcs']}+{url}@{vcs['commit_id']}",)
    return (f"uneven @ {url}",) if url else (f"uneven=={uneven.__version__}",)


@contextmanager
def installing(name: str) -> Iterator[Path]:
    """The folder of a build while it is made: marked as ours; a build that is there is not complete now.

    An interrupted installation leaves the mark: the next one of the same name goes on in the folder.
    """
    folder = builds_folder() / check_name(name)
    is_ours = any((folder / mark).is_file() for mark in (RECORD, MARK))
    if folder.is_symlink() or (folder.exists() and not is_ours and any(folder.iterdir())):
        raise InputError(f"{folder} was not made by uneven: choose another name with --name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
        (folder / RECORD).unlink(missing_ok=True)
    except OSError as error:
        raise folder_error(folder, error, _CHOOSE) from error
    yield folder


def record(folder: Path, source: str) -> Build:
    """Ask a finished environment what its torch is, and write it down: from here on the build is complete."""
    facts = _ask(python_of(folder))
    if not facts.get("installed") or facts.get("error") or not facts.get("version"):
        why = facts.get("error") or "it is not installed there"
        raise MachineError(f"torch does not work in {folder}: {why}; see 'uneven torch remove {folder.name}'")
    files = (path.lstat() for path in folder.rglob("*"))
    sizes = {(file.st_dev, file.st_ino): file.st_size for file in files}  # what is linked twice counts once
    build = Build(
        name=folder.name,
        version=facts["version"],
        cuda=facts.get("cuda"),
        hip=facts.get("hip"),
        archs=tuple(facts.get("archs") or ()),
        size_bytes=sum(sizes.values()),
        python=str(python_of(folder)),
        source=source,
        is_active=folder.name == active_name(),
    )
    written = {key: value for key, value in asdict(build).items() if key not in ("name", "python", "is_active")}
    write_atomically(folder / RECORD, json.dumps(written, indent=1).encode())
    with suppress(OSError):
        (folder / MARK).unlink()
    return build


def _ask(python: Path) -> dict[str, Any]:
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
