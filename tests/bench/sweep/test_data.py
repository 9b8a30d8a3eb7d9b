"""The data that a sweep gets before its first run."""

from typing import Any

import pytest

from uneven.bench.orders import SweepOrder
from uneven.bench.sweep import run as module
from uneven.bench.sweep.run import provide
from uneven.data.datasets import Event, Presence
from uneven.errors import InputError, MachineError


class Shelf:
    """Stands for the data on this machine and what the network has."""

    def __init__(self, here: set[str], available: set[str]) -> None:
        self.here, self.available, self.messages = here, available, list[str]()

    def presence(self) -> list[Presence]:
        return [Presence(name, name, "free", 1, True, ()) for name in self.here]

    def get(self, name: str, progress: Any) -> None:
        progress(Event(f"getting {name}"))
        progress(Event(name, 1, 2))
        if name not in self.available:
            raise MachineError(f"cannot get {name}")
        self.here.add(name)


def provided(monkeypatch: pytest.MonkeyPatch, shelf: Shelf, order: SweepOrder) -> None:
    monkeypatch.setattr(module, "datasets", shelf)
    provide(order, shelf.messages.append)


def test_what_is_missing_is_got_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf({"mnist-mini"}, {"shakespeare"})
    provided(monkeypatch, shelf, SweepOrder(is_quick=True))
    assert shelf.here == {"mnist-mini", "shakespeare"}
    assert shelf.messages == ["getting shakespeare"]


def test_what_cannot_be_got_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf({"mnist"}, set())
    provided(monkeypatch, shelf, SweepOrder(models=("lenet", "gpt-nano")))
    assert shelf.messages[-1] == "cannot get shakespeare"


def test_devices_that_are_not_here_are_refused_before_data_is_got(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(set(), {"mnist-mini", "shakespeare"})
    with pytest.raises(InputError, match="cuda:98"):
        provided(monkeypatch, shelf, SweepOrder(is_quick=True, devices="cuda:98,cuda:99"))
    assert shelf.messages == []
