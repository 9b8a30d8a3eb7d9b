"""Fixtures: a local web server, and fake npm and pip commands."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.stand_ins import FakeClient, Site, serve


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    with serve() as running:
        yield running


@pytest.fixture
def fake_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """`fake_client("npm", script)`: put a fake command on PATH; for pip also where `python -m pip` finds it."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> None:
        for command in ("npm",) if name == "npm" else ("pip", "pip3"):
            path = binaries / command
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        if name == "pip":
            package = tmp_path / "modules" / "pip"
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
            (package / "__main__.py").write_text(
                f"import os, sys\nos.execv({str(binaries / 'pip')!r}, ['pip', *sys.argv[1:]])\n"
            )
            monkeypatch.setenv("PYTHONPATH", str(package.parent))

    return make
