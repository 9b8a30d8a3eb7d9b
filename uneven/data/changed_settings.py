"""Refuses to start processes where the script has changed a setting in another module (`config.hidden = 16`).

The ranks of `fit` and the loader processes of a rank do not run the script: they import the user's modules anew, and
would go on with what is written in the file, without a word. A changed width shows in the model; a value like
`config.label_smoothing` shows nowhere. Asked where a process is described (launch/payload.py, data/keyed_dataset.py).

A setting is what the file assigns once, as a literal, to a public name of the module or of a class in it. What a module
computes for its own process (a rank, a path, a time), and what its functions change themselves (by `global`, or in a
container that is empty at first: a cache, a flag that something is initialised), is that process's own.
Objects are not compared: docs/limits.md.
"""

import ast
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from uneven.errors import InputError
from uneven.files import is_users_code

_SIMPLE = (int, float, complex, bool, str, bytes, type(None))
MOST_SHOWN = 60  # characters of a value
_GLOBAL = re.compile(r"^\s*global\s+(.*)", re.MULTILINE)  # a walk through the whole tree takes as long as to parse it

_literals: dict[str, dict[str, Any]] = {}  # by file, as it was when first read


def refuse_changed_settings(who: str, fix: str) -> None:
    """InputError that names the first setting that differs from its module's file, for processes (`who`) to start."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "") == "__main__" or not _is_users(module):
            continue
        for path, literal, value in _changed(module):
            file = Path(str(module.__file__)).name
            raise InputError(
                f"{module.__name__}.{path} = {_shown(value)}, set by the script, where {file} has {_shown(literal)}: "
                f"{who} import your modules anew and would not see it; {fix}"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def _changed(module: ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in the file, value now)."""
    for path, literal in _literals_of(str(module.__file__)).items():
        owner_name, _, name = path.rpartition(".")
        owner = getattr(module, owner_name, None) if owner_name else module
        if owner is None or (owner_name and getattr(owner, "__module__", None) != module.__name__):
            continue
        value = vars(owner).get(name, literal)
        if _is_plain(value) and _form(value) != _form(literal):
            yield path, literal, value


def _form(value: Any) -> Any:
    """Equal for the same values of the same types: 1, 1.0 and True are equal, and sets that are print differently."""
    if isinstance(value, dict):
        return [(repr(key), _form(entry)) for key, entry in value.items()]
    if isinstance(value, set):
        return {*map(repr, value)}
    if isinstance(value, list | tuple):
        return type(value), [_form(entry) for entry in value]
    return repr(value)


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
