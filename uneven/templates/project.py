"""Makes a new project: its files, from a template and what this machine tells, and where they may be written.

Called by `uneven init`. Invariant: a file that is there already is never replaced unless that was asked for, and no
other file is touched; what is wrong is found before the first file is written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from uneven.errors import InputError, MachineError
from uneven.files import why_not_written, write_atomically
from uneven.templates.machine import Machine
from uneven.version import __version__

SHARED = "common"
# Where a file goes, if not under its own name: tools would obey a .gitignore or pyproject.toml inside the package.
PLACES = {
    "pyproject": "pyproject.toml",
    "gitignore": ".gitignore",
    "dockerignore": ".dockerignore",
    "test_train.py": "tests/test_train.py",
}
TAKEN = ("uneven", "torch")  # the project would depend on itself
ALLOWED = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # of a distribution, that begins with a letter
SHOWN = 5  # of the files that are in the way


@dataclass(frozen=True)
class Template:
    """What its README says: what is trained, and where data of one's own goes."""

    about: str
    data: str


TEMPLATES = {
    "vision": Template(
        "A small convolutional network (LeNet) that reads handwritten digits.",
        "Return data sets of your own in `load_data`: any map-style data set, as those of torchvision.",
    ),
    "text": Template(
        "A small GPT that continues a text, character by character.",
        "Put your own text into `text.txt`. What is in it now: sonnets by Shakespeare, in the public domain.",
    ),
    "own-loop": Template(
        "A training loop of your own on all devices, by `Ddp.setup`.",
        "Return data sets of your own in `load_data`: any map-style data set or `DataLoader`.",
    ),
    "plain": Template(
        "The smallest script: a network, two tensors, one call of `fit`.",
        "Return your own tensors in `make_data`, or pass any data set or `DataLoader` to `fit`.",
    ),
}


def read_name(folder: Path) -> str:
    """The name of a project by its folder; InputError where no package could have it."""
    name = folder.resolve().name
    if ALLOWED.fullmatch(name) and name.lower() not in TAKEN:
        return name
    if name.lower() in TAKEN:
        raise InputError(f"NAME {name!r} is taken by a package that the project needs; choose another, as in my-{name}")
    better = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._0123456789") or "demo"
    raise InputError(
        f"NAME {name!r} must have letters, digits, '-', '_' and '.' alone, and begin with a letter, as in {better}"
    )


def make_files(name: str, template: str, machine: Machine) -> dict[str, str]:
    """The content of every file of a project by its path; pure but for reading the package's own files."""
    if template not in TEMPLATES:
        raise InputError(f"--template {template}: allowed are {', '.join(TEMPLATES)}")
    values = _values(name, template, machine)
    found = {}
    for folder in (template, SHARED):
        for entry in files("uneven.templates").joinpath("files").joinpath(folder).iterdir():
            if entry.is_file():
                content = entry.read_text(encoding="utf-8")
                found[PLACES.get(entry.name, entry.name)] = _fill(content, values) if folder == SHARED else content
    return dict(sorted(found.items()))


def check_folder(folder: Path, paths: Mapping[str, str], force: bool) -> None:
    """InputError where the project cannot be written there without touching what somebody else wrote; MachineError
    where the folder cannot even be looked at."""
    try:
        _refuse_folder(folder, paths, force)
    except OSError as error:  # the name is too long, a folder above it may not be searched
        raise _folder_error(folder, error) from error


def _refuse_folder(folder: Path, paths: Mapping[str, str], force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; choose another name")
    if force:
        blocked = [path for path in paths if (folder / path).is_dir()]
        if blocked:
            raise InputError(
                f"{folder} has folders where files of the project go: {', '.join(blocked)}; move them away"
            )
        above = {parent for path in paths for parent in Path(path).parents if parent.name}
        stopped = sorted(str(name) for name in above if _is_there(folder / name) and not (folder / name).is_dir())
        if stopped:
            raise InputError(
                f"{folder} has files where folders of the project go: {', '.join(stopped)}; move them away"
            )
        return
    ours = [path for path in paths if _is_there(folder / path)]
    if ours:
        raise InputError(
            f"{folder} has {', '.join(ours)} already: nothing was written; choose another name, or --force to replace "
            f"{'it' if len(ours) == 1 else 'them'}"
        )
    others = sorted(entry.name for entry in folder.iterdir() if entry.name[0] != ".") if folder.is_dir() else []
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise InputError(
            f"{folder} is not empty ({', '.join(others[:SHOWN])}{more}): nothing was written; choose another name, or "
            "--force to write beside them"
        )


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def write_project(folder: Path, contents: Mapping[str, str]) -> None:
    """Write every file, whole or not at all; MachineError where the folder cannot be written to."""
    try:
        for path, content in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / path, content.encode())
    except OSError as error:
        raise _folder_error(folder, error) from error


def _folder_error(folder: Path, error: OSError) -> MachineError:
    return MachineError(f"cannot write to {folder}: {why_not_written(error)}; choose another folder")


def _values(name: str, template: str, machine: Machine) -> dict[str, str]:
    about = TEMPLATES[template]
    return {
        "name": name,
        "image": name.lower(),
        "about": about.about,
        "data": about.data,
        "template": template,
        "versions": machine.versions,
        "uneven": __version__,
        "python": machine.python,
        "executable": machine.executable,
        "devices": ", ".join(machine.devices),
        "install": _docker_install(machine),
    }


def _docker_install(machine: Machine) -> str:
    """No GPU is visible while an image is built, so `uneven setup` is told which torch build to take."""
    install = "RUN pip install --no-cache-dir uneven && uneven setup -y"
    if not machine.has_gpu:
        return install
    found = f"# For {', '.join(machine.devices[:-1])}; while an image is built, no GPU can be looked at.\n"
    if machine.build is None:
        return f"{found}# {machine.advice}\n{install}"
    return f"{found}{install} --build {machine.build}"


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Put values in the place of {{name}}."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)
