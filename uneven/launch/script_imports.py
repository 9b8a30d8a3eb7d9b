"""Does a script use uneven at all? Read from its source, before processes are started for it.

Called by launch/script.py and plan/script.py. A script that does not would be run once per device, each on all of the
data, and nothing would be shared: `uneven run` refuses it. The answer is "no" only where it is certain; where imports
cannot be followed (computed names, packages that are not well known) the script runs, and the ranks report at its end
whether they were used.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from uneven.launch.find_script import Script

MOST_FILES = 300  # of the user's own that are read; a larger project is not judged by its source
COMPUTED = ("__import__", "import_module", "exec", "eval", "run_path", "run_module", "spec_from_file_location")
WELL_KNOWN = (  # packages that training scripts import, and that do not use uneven
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "matplotlib", "PIL", "cv2", "sklearn", "tqdm"),
    *("transformers", "datasets", "tokenizers", "accelerate", "lightning", "timm", "einops", "wandb", "tensorboard"),
)


def uses_uneven(script: Script) -> bool:
    """False where neither the script nor a module beside it that it imports can import uneven; else True."""
    folder = script.folder
    pending = [script.path.resolve()]
    if script.package is not None:  # which relative imports stay in
        pending += (folder / script.package).rglob("*.py")
    seen = set(pending)
    while pending:
        if len(seen) > MOST_FILES:
            return True
        try:
            tree = ast.parse(pending.pop().read_bytes())
        except (OSError, SyntaxError, ValueError):
            return True  # Python itself says better what is wrong with it
        for name in _imported(tree):
            found = _files_of(name, folder) if name is not None and name != "uneven" else None
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
    module, package = folder / f"{name}.py", folder / name  # they stand before all others
    if module.is_file():
        return [module]
    if package.is_dir():
        return sorted(package.rglob("*.py"))
    return [] if name in WELL_KNOWN or name in sys.stdlib_module_names else None
