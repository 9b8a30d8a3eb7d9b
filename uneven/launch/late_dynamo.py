"""torch._dynamo is loaded where something is compiled, and not by the first optimizer.

Every optimizer of torch imports it, when it is made and at each step, to say that nothing is to be traced there. It is
800 modules and takes two thirds of the time of torch itself, in each rank and in the trial before them, although
nothing traces where nobody has loaded it for its own sake. So in processes of ours (launch/rank.py, checks/trial.py) it
stands there unloaded and answers those calls. Whatever else is asked of it, by torch.compile or by the user's own code,
loads it first, into the same module object. A caller's own process and a rank of another launcher are left as they are.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"

_lock = threading.RLock()  # held while it is loaded


def load_dynamo_late() -> None:
    """From now on in this process; nothing changes where it is loaded already."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == NAME else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(Loader):
    """Puts the unloaded module in its place; `loader` can load it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> None:
        """As Python makes it."""

    def exec_module(self, module: ModuleType) -> None:
        _become(module, _Unloaded)


class _Unloaded(ModuleType):
    """Life cycle: from the first import until somebody asks for more than `_ANSWERS`."""

    def __getattribute__(self, name: str) -> Any:
        # The import system reads such names at every import, and __path__ to import what is inside.
        if name.startswith("__") and name not in ("__path__", "__all__"):
            return super().__getattribute__(name)
        if name in _ANSWERS:
            return _ANSWERS[name]
        _load(self)
        return getattr(self, name)


class _Loading(ModuleType):
    """Life cycle: while its code runs, then it is a module like any other. Other threads wait for what is missing."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if type(self) is _Loading:  # in the thread that loads it
                raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        return getattr(self, name)


class _Disabled:
    """A function of torch that is not to be traced. It is kept for good, so it changes once somebody may trace."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._function = self._call = function
        self._args, self._kwargs = args, kwargs
        _disabled.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def disable(self, dynamo: Any) -> None:
        self._call = dynamo.disable(self._function, *self._args, **self._kwargs)


class _NoRules:
    """`trace_rules`, whose caches torch.distributed empties before every default group: there are none."""

    def clear_lru_cache(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(_loaded().trace_rules, name)


def _graph_break(*_: Any, **__: Any) -> None:
    """There is no graph to break."""


def _disable(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("wrapping", True):  # the user's own, by torch.compiler.disable; torch wraps its functions itself
        return _loaded().disable(function, *args, **kwargs)
    return _Disabled(function, *args, **kwargs)


_disabled: list[_Disabled] = []
_ANSWERS = {"graph_break": _graph_break, "disable": _disable, "trace_rules": _NoRules()}


def _loaded() -> Any:
    module = sys.modules[NAME]
    _load(module)
    return module


def _load(module: ModuleType) -> None:
    with _lock:
        if type(module) is not _Unloaded:
            return  # another thread was faster
        spec = module.__spec__
        assert spec is not None
        late = spec.loader
        assert isinstance(late, _LateLoader)
        spec.loader = module.__loader__ = late.loader
        _become(module, _Loading)
        try:
            late.loader.exec_module(module)
        except BaseException:
            spec.loader = late
            _become(module, _Unloaded)
            raise
        _become(module, ModuleType)
        for one in _disabled:
            one.disable(module)
        _disabled.clear()


def _become(module: ModuleType, kind: type[ModuleType]) -> None:
    module.__class__ = kind  # they differ in what they answer alone
