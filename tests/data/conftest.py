"""Fixtures: a local web server, and the table of data sets with tiny ones in it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data.stand_ins import Site, serve
from uneven.data import datasets
from uneven.data.datasets import DataSet


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    with serve() as running:
        yield running


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`known(set, ...)` puts tiny sets in place of the real ones; the data folder is tmp_path."""
    monkeypatch.setenv("UNEVEN_DATA", str(tmp_path))

    def put(*entries: DataSet) -> None:
        monkeypatch.setattr(datasets, "DATA_SETS", {entry.name: entry for entry in entries})

    return put
