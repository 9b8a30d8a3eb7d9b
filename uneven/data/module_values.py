"""Values that a script has changed in other modules (`config.hidden = 16`), for processes that import these anew.

The ranks of `fit` and the loader processes of a rank do not run the script, so that they would go on with what is
written in the file: another model than the script means, without a word. Read where a process is described
(launch/payload.py, data/keyed_dataset.py), set in it before anything is made.

A setting is what the file assigns once, as a literal, to a public name of the module or of a class in it. What a module
computes for its own process (a rank, a path, a time), and what its functions change themselves (by `global`, or in a
container that is empty at first: a cache, a flag that something is initialised), is that process's and stays so.
Objects are left alone, too: docs/limits.md.
"""

import ast
import importlib.util
import pickle
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from uneven.files import is_users_code

Changed = dict[str, dict[str, Any]]  # module -> name, or Class.name -> value

MOST_BYTES = 1 << 16  # of a value; a larger one is data, and no setting
_SIMPLE = (int, float, complex, bool, str, bytes, type(None))
_GLOBAL = re.compile(r"^\s*global\s+(.*)", re.MULTILINE)  # a walk through the whole tree takes as long as to parse it

_literals: dict[str, dict[str, Any]] = {}  # by file, as it was when first read
_given: Changed | None = None  # what `set_changed` was called with


def read_changed() -> Changed:
    """What was changed in the modules that this process has imported, installed packages left out.

    A process that was given such values itself hands them on: a rank to its loader processes.
    """
    if _given is not None:
        return _given
    found: Changed = {}
    for name, module in list(sys.modules.items()):
        if name == "__main__" or not _is_users(module):
            continue
        if values := dict(_changed(module)):
            found[name] = values
    return found


def set_changed(changed: Changed) -> None:
    """Give these values to the modules of this process: to one that is not imported yet, as soon as it is."""
    global _given
    _given = changed
    later: Changed = {}
    for name, values in changed.items():
        if name in sys.modules:
            _give(sys.modules[name], values)
        else:
            later[name] = values
    if later:
        sys.meta_path.insert(0, _Finder(later))


class _Finder(MetaPathFinder):
    """Finds modules as ever, and sees to it that they get their values when their code has run."""

    def __init__(self, values: Changed) -> None:
        self._values = values

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        del path, target
        values = self._values.pop(name, None)
        spec = None if values is None else importlib.util.find_spec(name)  # asks the others: the name is not here now
        if spec is None or spec.loader is None or values is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _give(module, values)

        loader.exec_module = exec_module
        return spec


def _give(module: ModuleType, values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        with suppress(Exception):  # the file is another one by now
            _set(getattr(module, owner) if owner else module, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    """In place where it can be: others may hold the same dict or list."""
    held = getattr(owner, name, None)
    if isinstance(held, dict | set) and type(held) is type(value):
        held.clear()
        held.update(value)
    elif isinstance(held, list) and isinstance(value, list):
        held[:] = value
    else:
        setattr(owner, name, value)


def _changed(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for path, literal in _literals_of(str(module.__file__)).items():
        owner_name, _, name = path.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        if owner is None or (owner_name and getattr(owner, "__module__", None) != module.__name__):
            continue
        value = vars(owner).get(name, literal)
        if not _is_same(value, literal) and _can_travel(value):
            yield path, value


def _is_same(value: Any, literal: Any) -> bool:
    """Of the same type, too: 1, 1.0 and True are equal."""
    return type(value) is type(literal) and repr(value) == repr(literal)


def _can_travel(value: Any) -> bool:
    if not _is_plain(value):
        return False
    with suppress(Exception):
        return len(pickle.dumps(value)) <= MOST_BYTES
    return False


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) in _SIMPLE and _is_plain(entry) for key, entry in value.items())
    if kind in (list, tuple, set):
        return all(map(_is_plain, value))
    return kind in _SIMPLE


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    is_source = isinstance(module, ModuleType) and isinstance(file, str) and file.endswith(".py")
    return is_source and is_users_code(str(file))


def _literals_of(file: str) -> dict[str, Any]:
    """The settings in a file, with the values that are written there."""
    if file not in _literals:
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            source = importlib.util.decode_source(Path(file).read_bytes())
            tree = ast.parse(source)
            own = {name for names in _GLOBAL.findall(source) for name in re.findall(r"\w+", names)}
            found.update({name: value for name, value in _assigned_once(tree.body) if name not in own})
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    found.update({f"{node.name}.{name}": value for name, value in _assigned_once(node.body)})
        _literals[file] = found
    return _literals[file]


def _assigned_once(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    times = Counter(_stored(body))
    for statement in body:
        target: Any = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        if not isinstance(target, ast.Name) or times[target.id] > 1 or target.id.startswith("_"):
            continue
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            if value or not isinstance(value, dict | list | set):
                yield target.id, value


def _stored(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that are assigned in this scope, once for each time; functions and classes have scopes of their own."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _stored(ast.iter_child_nodes(node))
