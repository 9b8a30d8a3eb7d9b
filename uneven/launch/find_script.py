"""What `uneven run` runs in every process: a script by its path, or with -m a module by its name, as Python does.

A module is found, and whether a script uses uneven is read, without importing anything: the launcher runs nothing of
the user's.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from uneven.errors import InputError
from uneven.machines.code import MOST_FILES, files_of

COMPUTED = ("__import__", "import_module", "exec", "eval", "run_path", "run_module", "spec_from_file_location")
WELL_KNOWN = (  # packages that training scripts import, and that do not use uneven
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "matplotlib", "PIL", "cv2", "sklearn", "tqdm"),
    *("transformers", "datasets", "tokenizers", "accelerate", "lightning", "timm", "einops", "wandb", "tensorboard"),
)


@dataclass(frozen=True)
class Script:
    """A file with its arguments. `module`: its full name, where it is run as a module (of a package: with __main__)."""

    path: Path
    args: tuple[str, ...] = ()
    module: str | None = None

    def __str__(self) -> str:
        """As it stands behind `python`."""
        return " ".join(self.words)

    @property
    def words(self) -> list[str]:
        """What names it on a command line, without its arguments."""
        return [str(self.path)] if self.module is None else ["-m", self.module.removesuffix(".__main__")]

    @cached_property
    def folder(self) -> Path:
        """The one that its imports begin at."""
        depth = 0 if self.module is None else self.module.count(".")
        return self.path.resolve().parents[depth]

    @property
    def package(self) -> str | None:
        """The top package of a module that is in one."""
        return self.module.partition(".")[0] if self.module is not None and "." in self.module else None

    @property
    def inner_path(self) -> Path:
        """Below `folder`."""
        return self.path.resolve().relative_to(self.folder)

    def to_json(self) -> dict[str, Any]:
        """What a process is told that runs it on this machine."""
        return {"path": str(self.path.resolve()), "args": list(self.args), "module": self.module}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Script":
        return cls(Path(record["path"]), tuple(record["args"]), record.get("module"))


def find_script(name: Path, args: Sequence[str], is_module: bool) -> Script:
    """A script as the command line names it; InputError where a module is not there."""
    return find_module(str(name), args) if is_module else Script(name, tuple(args))


def find_module(name: str, args: Sequence[str] = ()) -> Script:
    """The module that `python -m NAME` would run in this folder, with the same search path."""
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        raise InputError(f"-m {name}: a module is named without its folder and '.py', as in -m {dotted}")
    top, *inner = name.split(".")
    where = "in this folder or on Python's path"
    spec = _find_top(top)
    for depth, part in enumerate(inner):
        if spec is None or spec.submodule_search_locations is None:
            missing = ".".join([top, *inner[:depth]])
            raise InputError(f"-m {name}: there is no package {missing} {where}")
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None:
        raise InputError(f"-m {name}: there is no such module {where}")
    if spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec("__main__", list(spec.submodule_search_locations))
        if spec is None:
            raise InputError(f"-m {name}: a package without __main__.py; name a module in it, as in -m {name}.train")
        name = f"{name}.__main__"
    if spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        raise InputError(f"-m {name} has no source to run; name a module with a .py file")
    return Script(Path(spec.origin), tuple(args), name)


def _find_top(name: str) -> ModuleSpec | None:
    """Beside what Python would find by itself: the search path of this process begins at the folder of `uneven`."""
    try:
        return PathFinder.find_spec(name, [str(Path.cwd())]) or find_spec(name)
    except ValueError:  # an empty name, or __main__
        return None


def refuse_no_file(script: Path) -> None:
    """InputError for a script that is not there, or is a folder."""
    if script.is_dir():
        raise InputError(f"script {str(script)!r} is a folder; name the script in it, as in {script / 'train.py'}")
    if not script.is_file():
        raise InputError(f"script {str(script)!r}: there is no such file; give its path, as in ./train.py")


def uses_uneven(script: Script) -> bool:
    """False where neither the script nor a module beside it that it imports can import uneven; else True.

    A script that does not would be trained once per device, each time on all of the data. Where imports cannot be
    followed it runs, and the ranks report at its end whether they were used.
    """
    folder = script.folder
    pending = [script.path.resolve(), *([] if script.package is None else files_of(folder, script.package))]
    seen = set(pending)
    while pending:
        try:
            tree = ast.parse(pending.pop().read_bytes())
        except (OSError, SyntaxError, ValueError):
            return True  # Python itself says better what is wrong with it
        for name in _imported(tree):
            found = [] if name is None or name == "uneven" else files_of(folder, name)
            is_known = found or name in WELL_KNOWN or name in sys.stdlib_module_names
            if not is_known or len(seen) > MOST_FILES:  # a larger project is not judged by its source
                return True
            pending += [file for file in found if file not in seen]
            seen.update(found)
    return False


def _imported(tree: ast.Module) -> Iterator[str | None]:
    """The top-level names that a module imports; None where a name is computed. Relative imports stay in a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            package, *modules = (node.module or "").split(".")
            if (package, modules[:1]) != ("uneven", ["data"]):  # it only reads data sets, as the plain examples do
                yield package
        elif isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute)
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in COMPUTED and not (is_method and called == "eval" and not node.args):  # model.eval()
                yield None
