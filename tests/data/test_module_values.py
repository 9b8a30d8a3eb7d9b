"""Which values of a module count as settings that a script has changed, and how another process gets them."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from uneven.data import module_values
from uneven.data.module_values import read_changed, set_changed

SOURCE = """
import os
hidden = 4
rate: float = 0.1
shape = (1, 2)
table = {"a": 1, "b": [2]}
names = ["x"]
nothing = None
minus = -1
declared: int
twice = 1
twice = 2
computed = int(os.environ.get("SOME_RANK", 0))
seen = {}
_private = 1
ready = False
by_condition = 1
if computed:
    by_condition = 2
for looped in range(3):
    pass

class Config:
    hidden = 4
    other = object()

def init(hidden=3):
    global ready
    ready, rate = True, 2
    return hidden, rate
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module_values, "_given", None)
    names: list[str] = []

    def make(source: str) -> ModuleType:
        names.append(f"made_for_a_test_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(names[-1])

    yield make
    for name in names:
        sys.modules.pop(name, None)


def changed(module: ModuleType) -> dict[str, Any]:
    return read_changed().get(module.__name__, {})


def test_nothing_has_changed(imported: Callable[[str], ModuleType]) -> None:
    assert changed(imported(SOURCE)) == {}


def test_settings_are_literals_that_were_assigned_once(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported(SOURCE)
    settings = {
        "hidden": 16,
        "rate": 1,
        "shape": (1, 3),
        "table": {"a": 1, "b": [3]},
        "names": [],
        "nothing": "x",
        "minus": -2,
        "Config.hidden": 8,
    }
    for path, value in settings.items():
        owner, _, name = path.rpartition(".")
        setattr(module if not owner else getattr(module, owner), name, value)
    module.twice = module.computed = module.by_condition = module.looped = module.declared = module._private = 9
    module.seen["x"] = 1
    module.Config.other = 5
    module.init()
    assert changed(module) == settings


@pytest.mark.parametrize("value", [object(), print, [object()], {"a": object()}, {(1, 2): 3}, "x" * 100_000])
def test_objects_and_data_are_left_alone(value: Any, imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported("value = 1\n")
    module.value = value
    assert changed(module) == {}


def test_equal_numbers_of_another_type_are_a_change(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported("count = 1\nflag = True\n")
    module.count, module.flag = 1.0, 1
    assert changed(module) == {"count": 1.0, "flag": 1}


def test_another_process_gets_them(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported(SOURCE)
    table, names = module.table, module.names
    set_changed({module.__name__: {"hidden": 16, "table": {"c": 3}, "names": ["y"], "Config.hidden": 8}})
    assert (module.hidden, module.Config.hidden) == (16, 8)
    assert (table, names) == ({"c": 3}, ["y"]), "who holds the same dict or list has the new values, too"
    set_changed({module.__name__: {"gone.name": 1}})


def test_a_module_gets_them_when_it_is_imported_and_not_before(
    imported: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    name = imported(SOURCE).__name__
    del sys.modules[name]
    set_changed({name: {"hidden": 16, "Config.hidden": 8}, "never.there": {"x": 1}})
    assert name not in sys.modules
    assert read_changed()[name] == {"hidden": 16, "Config.hidden": 8}, "a rank hands it on to its loader processes"
    reader: Any = imported(f"from {name} import hidden as taken, Config")
    assert (reader.taken, reader.Config.hidden) == (16, 8)
    with pytest.raises(ModuleNotFoundError, match="never"):
        importlib.import_module("never.there")


def test_installed_packages_and_broken_files_are_left_out(imported: Callable[[str], ModuleType]) -> None:
    found = read_changed()
    assert not any(name.partition(".")[0] in ("torch", "numpy", "uneven", "json", "pytest") for name in found)
    module: Any = imported("value = 1\n")
    Path(str(module.__file__)).write_text("value = (")
    module.value = 2
    assert changed(module) == {}
