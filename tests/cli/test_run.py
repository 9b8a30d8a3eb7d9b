"""The command line of `uneven run`: settings stand before and after the script."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from uneven.cli.main import app


def test_the_command_line_takes_settings_before_and_after_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("uneven.launch.script.run_script", lambda *order: seen.append(order))
    line = ["run", "--seed", "4", "t.py", "data", "--shares", "5,2", "--policy", "balanced", "--", "--epochs", "x"]
    assert CliRunner().invoke(app, line).exit_code == 0
    (order,) = seen
    assert order == (Path("t.py"), ["data", "--epochs", "x"], {"seed": 4, "shares": (5.0, 2.0), "policy": "balanced"})
    assert CliRunner().invoke(app, ["run", "t.py", "--no-such-setting", "3"]).exit_code == 2
