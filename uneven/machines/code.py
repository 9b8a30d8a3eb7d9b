"""The code of a run: digests of the script, of the files beside it that it imports, and of the installed uneven.

Read by machines/facts.py on every machine and compared by machines/parity.py. A file beside the script that it does
not import may differ: a scratch file on one machine is no reason to refuse a run. On a machine that joins, its ranks
run what was compared, and nothing else (launch/script.py).
"""

import ast
import os
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

import uneven

MOST_FILES = 300  # a larger project is compared as far as these
MOST_BYTES = 32 << 20  # of one file
UNREADABLE = "unreadable: "  # in the place of a digest


def script_digests(script: Path, folder: Path, package: str | None = None) -> dict[str, str]:
    """Digest by path relative to the folder: the script first, then what it imports from there, sorted.

    `package`: the one that the script is a module of.
    """
    script = script.resolve()
    found = {script.relative_to(folder).as_posix(): _digest(script)}
    for path in sorted(_imported_files(script, folder, package))[:MOST_FILES]:
        found[path.relative_to(folder).as_posix()] = _digest(path)
    return found


@cache
def package_digest() -> str:
    """Of every Python file of the installed uneven."""
    folder = Path(uneven.__file__).parent
    whole = sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def read_code(path: Path) -> bytes:
    """The content of a plain file, read once; OSError for anything else: a pipe would be waited for without end."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no plain file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(0, f"it is larger than {MOST_BYTES >> 20} MB")
    return content


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The files whose digests differ, or that one side lacks or cannot read."""
    names = dict.fromkeys((*ours, *theirs))
    return [name for name in names if ours.get(name) != theirs.get(name) or ours[name].startswith(UNREADABLE)]


def _digest(path: Path) -> str:
    try:
        return digest(read_code(path))
    except OSError as error:
        return f"{UNREADABLE}{error.strerror}"


def _imported_files(script: Path, folder: Path, package: str | None) -> set[Path]:
    """The Python files below the folder that the script's imports reach, without the script itself."""
    pending = [script, *([] if package is None else files_of(folder, package))]
    seen = set(pending)
    while pending and len(seen) <= MOST_FILES:
        for name in _imported_names(pending.pop()):
            new = set(files_of(folder, name)) - seen
            seen |= new
            pending += new
    return seen - {script}


def _imported_names(path: Path) -> Iterator[str]:
    """The top-level names that a module imports; a relative import stays in its package, which is read as a whole."""
    try:
        tree = ast.parse(read_code(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # Python itself says what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def files_of(folder: Path, name: str) -> list[Path]:
    """The Python files below the folder that an import of this name reaches."""
    module, package = folder / f"{name}.py", folder / name
    files = [module] if module.is_file() else []
    if package.is_dir() and name != "uneven":  # a checkout of uneven is compared by `package_digest`
        files += sorted(package.rglob("*.py"))[: MOST_FILES + 1]
    return files
