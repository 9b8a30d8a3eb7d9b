"""What a script has set in its process, for those that do not run it: ranks of `fit`, and loader processes of ranks.

They import the user's modules anew. What is set for all of torch, such as the default dtype, goes with them: without it
a model made in float64 was trained in float32, without a word. A setting that the script has changed in another module
(`config.hidden = 16`) is refused: a changed width shows in the model; a value like `config.label_smoothing` shows
nowhere. Both are asked where a process is described (launch/payload.py, data/loader_process.py).

A setting is what the file assigns once, as a literal, to a public name of the module or of a class in it. What a module
computes for its own process (a rank, a path, a time), and what its own code changes (by `global`, in a container: a
cache, a registry; in a class: a counter), is that process's own: the file's code does the same in the others.
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
from typing import Any, NamedTuple

import torch

from uneven.errors import InputError
from uneven.files import is_users_code

_SIMPLE = (int, float, complex, bool, str, bytes, type(None))
_CHANGING = "add|append|clear|discard|extend|insert|pop|popitem|remove|reverse|setdefault|sort|update"
# What follows the name of a container that is changed, and that of an attribute which is assigned.
_IS_CHANGED = rf"(\s*\[.*\]\s*[-+*/|&^%]?=(?!=)|\.({_CHANGING})\()"
_IS_ASSIGNED = r"\s*[-+*/|&^%]?=(?!=)"
_UNREADABLE = (OSError, ValueError, SyntaxError, RecursionError, MemoryError)  # a file that is no Python any more
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
        if _is_plain(value) and _form(value) != _form(literal) and not _changes_itself(str(module.__file__), path):
            yield path, literal, value


def _changes_itself(file: str, path: str) -> bool:
    """Whether code of the file, by its text, changes this container, or this value of a class (not of an instance)."""
    owner, _, name = path.rpartition(".")
    source = ""
    with suppress(*_UNREADABLE):
        source = importlib.util.decode_source(Path(file).read_bytes())
    is_assigned = owner and re.search(rf"(?<!\bself)\.{name}{_IS_ASSIGNED}", source)
    is_changed = re.search(rf"\b{name}{_IS_CHANGED}|\bdel .*\b{name}\[", source)
    return bool(is_assigned or is_changed)


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
        with suppress(*_UNREADABLE):
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


class TorchModes(NamedTuple):
    """Seeds, threads and the default device are not among them: each rank has its own."""

    default_dtype: torch.dtype
    is_deterministic: bool
    only_warns: bool  # where something has no deterministic form
    has_deterministic_cudnn: bool
    detects_anomalies: bool
    checks_nan: bool  # in doing so

    @classmethod
    def read(cls) -> "TorchModes":
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            bool(torch.backends.cudnn.deterministic),
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
        )

    def set(self) -> None:
        """What differs and nothing else: use_deterministic_algorithms imports torch's compiler, which takes seconds."""
        now = TorchModes.read()
        if self.default_dtype != now.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if (self.is_deterministic, self.only_warns) != (now.is_deterministic, now.only_warns):
            torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        if self.has_deterministic_cudnn != now.has_deterministic_cudnn:
            torch.backends.cudnn.deterministic = self.has_deterministic_cudnn
        if (self.detects_anomalies, self.checks_nan) != (now.detects_anomalies, now.checks_nan):
            torch.autograd.set_detect_anomaly(self.detects_anomalies, self.checks_nan)
