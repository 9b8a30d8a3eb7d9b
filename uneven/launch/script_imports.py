"""Does a script use uneven at all? Read from its source, before processes are started for it.

Called by launch/script.py. A script that does not would be run once per device, each on all of the data, and nothing
would be shared: `uneven run` refuses it. The answer is "no" only where it is certain; where imports cannot be followed
(computed names, modules that are not found) the script runs, and the ranks report at its end whether they were used.
"""

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from uneven.launch.find_script import Script

MOST_FILES = 300  # of the user's own that are read; a larger project is not judged by its source
COMPUTED = ("__import__", "import_module", "exec", "eval", "run_path", "run_module", "spec_from_file_location")
# Packages that training scripts import and that do not use uneven: asking each for its requirements takes time.
WELL_KNOWN = (
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "matplotlib", "PIL", "cv2", "sklearn", "tqdm"),
    *("transformers", "datasets", "tokenizers", "accelerate", "lightning", "timm", "einops", "wandb", "tensorboard"),
)


def uses_uneven(script: Script) -> bool:
    """False where neither the script nor a module of the user's that it imports can import uneven; else True."""
    folder = script.folder
    pending = [script.path.resolve()]
    if script.package is not None:  # which relative imports stay in
        pending += sorted((folder / script.package).rglob("*.py"))
    seen = set(pending)
    while pending:
        if len(seen) > MOST_FILES:
            return True
        path = pending.pop()
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return True  # Python itself says better what is wrong with it
        for name in _imported(tree):
            if name is None or name == "uneven":
                return True
            found = _files_of(name, folder)
            if found is None:
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


def _files_of(name: str, folder: Path) -> list[Path] | None:
    """The user's own files that an import reaches; None where it may lead to uneven and cannot be followed."""
    # The script's own modules stand before all others.
    is_beside = (folder / f"{name}.py").exists() or (folder / name).is_dir()
    if not is_beside and (name in WELL_KNOWN or name in sys.stdlib_module_names):
        return []
    for root in dict.fromkeys([folder, *(Path(entry or ".").resolve() for entry in sys.path)]):
        package = root / name
        if root.name in ("site-packages", "dist-packages"):
            if package.exists() or any(root.glob(f"{name}.*")):
                return None if _requires_uneven(name) else []
        elif package.with_suffix(".py").is_file():
            return [package.with_suffix(".py")]
        elif package.is_dir():
            return sorted(package.rglob("*.py"))[: MOST_FILES + 1]
    return None


def _requires_uneven(name: str) -> bool:
    with suppress(PackageNotFoundError):
        needed = [entry for one in packages_distributions().get(name, ()) for entry in requires(one) or ()]
        return any(entry.lower().startswith("uneven") for entry in needed)
    return True
