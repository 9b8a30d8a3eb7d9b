"""Scripts to be visited in this process, as if `uneven` had been started in a folder of their own."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No run and no path of an earlier script is left, and the folder is the test's own."""
    monkeypatch.setattr("uneven.launch.context._contexts", [])
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.argv", ["uneven"])
    monkeypatch.chdir(tmp_path)


def script(text: str) -> Path:
    Path("train.py").write_text(text)
    return Path("train.py")
