"""What a script has set: torch's modes are read and set; values of a module that it has changed are refused by name."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from uneven import InputError
from uneven.data.script_settings import TorchModes, refuse_changed_settings

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
    names: list[str] = []

    def make(source: str) -> ModuleType:
        names.append(f"made_for_a_test_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(names[-1])

    yield make
    for name in names:
        sys.modules.pop(name, None)


def check() -> None:
    refuse_changed_settings("ranks", "pass it as an argument")


def test_nothing_has_changed(imported: Callable[[str], ModuleType]) -> None:
    imported(SOURCE)
    check()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("hidden", 16),
        ("rate", 1),
        ("shape", (1, 3)),
        ("table", {"a": 1, "b": [3]}),
        ("names", []),
        ("nothing", "x"),
        ("minus", -2),
        ("Config.hidden", 8),
    ],
)
def test_settings_are_literals_that_were_assigned_once(
    path: str, value: Any, imported: Callable[[str], ModuleType]
) -> None:
    module: Any = imported(SOURCE)
    owner, _, name = path.rpartition(".")
    setattr(module if not owner else getattr(module, owner), name, value)
    with pytest.raises(InputError) as caught:
        check()
    assert str(caught.value).startswith(f"{module.__name__}.{path} = {value!r}")


def test_a_set_in_another_order_has_not_changed(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported("names = {8, 0, 16}\n")
    for order in ([8, 0, 16], [0, 8, 16], [16, 8, 0]):
        module.names = set(order)
        check()


def test_what_is_a_process_s_own_is_left_alone(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported(SOURCE)
    module.twice = module.computed = module.by_condition = module.looped = module.declared = module._private = 9
    module.seen["x"] = 1
    module.Config.other = 5
    module.init()
    check()


ITSELF = """
kinds = {"base": ["name"]}
kinds["more"] = kinds["base"] + ["file"]
names = ["a"]
names.append("b")
loaders = {"text": 1}
def register(name, value):
    loaders[name] = value

class Net:
    made = 0
    hooks = ["first"]
    def __init__(self):
        Net.made += 1
        self.hooks.append("second")
"""


def test_what_the_code_of_a_module_changes_is_its_own(imported: Callable[[str], ModuleType]) -> None:
    """Registries and counters of instances; a table of pytest is one, and every run beside it was refused."""
    module: Any = imported(ITSELF)
    module.register("image", 2)
    module.Net()
    assert (module.Net.made, len(module.loaders)) == (1, 2)
    check()


INSTANCES = """
class Config:
    hidden = 4
    def __init__(self, hidden=None):
        if hidden is not None:
            self.hidden = hidden
"""


def test_what_instances_set_for_themselves_leaves_the_class_a_setting(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported(INSTANCES)
    module.Config(8)
    check()
    module.Config.hidden = 16
    with pytest.raises(InputError, match=r"Config\.hidden"):
        check()


@pytest.mark.parametrize("value", [object(), print, [object()], {"a": object()}, {(1, 2): 3}])
def test_objects_are_left_alone(value: Any, imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported("value = 1\n")
    module.value = value
    check()


@pytest.mark.parametrize(("name", "value"), [("count", 1.0), ("flag", 1)])
def test_equal_numbers_of_another_type_are_a_change(
    name: str, value: Any, imported: Callable[[str], ModuleType]
) -> None:
    module: Any = imported("count = 1\nflag = True\n")
    setattr(module, name, value)
    with pytest.raises(InputError, match=name):
        check()


def test_a_long_value_is_cut(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported("value = 1\n")
    module.value = "x" * 100_000
    with pytest.raises(InputError, match="value") as caught:
        check()
    assert len(str(caught.value)) < 400


def test_broken_files_are_left_out(imported: Callable[[str], ModuleType]) -> None:
    module: Any = imported("value = 1\n")
    Path(str(module.__file__)).write_text("value = (")
    module.value = 2
    check()


@pytest.fixture
def plain() -> TorchModes:
    return TorchModes.read()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ],
)
def test_every_mode_is_read_and_set(change: Callable[[], object], plain: TorchModes) -> None:
    try:
        change()
        changed = TorchModes.read()
        assert changed != plain
        plain.set()
        assert TorchModes.read() == plain
        changed.set()
        assert TorchModes.read() == changed
    finally:
        plain.set()
