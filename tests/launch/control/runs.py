"""A machine on which no other run is on, and what the ranks of a run say of themselves."""

from pathlib import Path
from typing import Any

import pytest

from uneven.launch import cleanup


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder for private folders. And the user has run nothing."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(cleanup, "SHARED_MEMORY", folder)
    monkeypatch.setattr(cleanup.tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setenv("UNEVEN_HOME", str(tmp_path / "state"))
    return folder


HEARD: list[dict[str, Any]] = [
    {"slot": 12, "phase": "compute", "own": 300, "seconds": 2.0, "samples": 400, "loss": 0.5, "total": 4000,
     "epochs": 4, "steps": 100, "epoch": 1, "policy": "async", "out": "runs/a", "rounds": {"round": 3.0}},
    {"slot": 10, "phase": "wait", "own": 100, "seconds": 2.0, "loss": float("nan")},
]  # fmt: skip
