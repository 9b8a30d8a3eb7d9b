"""The folder of a disturbed run: kept where it was named, else removed, and said so."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from uneven.bench.chaos import run as module
from uneven.bench.chaos.report import ChaosReport
from uneven.bench.chaos.run import ChaosOrder, run_chaos


class Stopped:
    """Stands for a run that Ctrl-C has stopped, which saves."""

    def __init__(self, order: ChaosOrder, out: Path, say: object) -> None:
        self.report, self._out = ChaosReport(order.seed), out
        self.report.exit_code = 130

    def __enter__(self) -> "Stopped":
        return self

    def __exit__(self, *_: object) -> None:
        self._out.mkdir(parents=True)

    def watch(self) -> None:
        pass


@pytest.mark.parametrize("is_named", [True, False])
def test_a_folder_that_is_removed_is_told(is_named: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_Chaos", Stopped)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    run_chaos(ChaosOrder(arguments=("train.py",), out=tmp_path / "kept" if is_named else None), said.append)
    assert [path.name for path in tmp_path.iterdir()] == (["kept"] if is_named else [])
    assert len(said) == (not is_named)
    assert all("was temporary and is removed; --out FOLDER keeps" in line for line in said)
