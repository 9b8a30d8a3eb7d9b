"""A script with every entry point, and what one process trains with it."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.api.entries import EVERYTHING
from tests.api.starts import start


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    (folder / "beside.py").write_text("")
    (folder / "train.py").write_text(EVERYTHING)
    return folder / "train.py"


@pytest.fixture(scope="module")
def plain(script: Path) -> dict[str, dict[str, torch.Tensor]]:
    """A single process with the whole global batch: what every other start must equal."""
    out = script.parent / "plain"
    out.mkdir()
    done = start([sys.executable, script, out, "32", "two"], out)
    assert done.returncode == 0, done.stderr
    (folder,) = out.glob("r0")
    results: dict[str, dict[str, torch.Tensor]] = torch.load(folder)
    results["two"] = torch.load(out / "two")
    assert json.loads((out / "r0.json").read_text())["size"] == 1
    return results
