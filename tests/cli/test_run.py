"""The command line of `uneven run`: settings stand before and after the script."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from uneven.cli.main import app
from uneven.launch.find_script import Script


def test_the_command_line_takes_settings_before_and_after_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("uneven.launch.script.run_script", lambda *order: seen.append(order))
    line = ["run", "--seed", "4", "t.py", "data", "--shares", "5,2", "--policy", "balanced", "--", "--epochs", "x"]
    assert CliRunner().invoke(app, line).exit_code == 0
    (order,) = seen
    script = Script(Path("t.py"), ("data", "--epochs", "x"))
    assert order == (script, {"seed": 4, "shares": (5.0, 2.0), "policy": "balanced"})
    assert CliRunner().invoke(app, ["run", "t.py", "--no-such-setting", "3"]).exit_code == 2


def test_a_module_is_named_as_python_names_it_with_its_own_run_toml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("uneven.launch.script.run_script", lambda *order: seen.append(order))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "train.py").write_text("")
    (tmp_path / "shop" / "run.toml").write_text("epochs = 7\n")
    for line in (["run", "-m", "shop.train", "data"], ["run", "shop.train", "--module", "data"]):
        assert CliRunner().invoke(app, line).exit_code == 0
    assert seen == [(Script(tmp_path / "shop" / "train.py", ("data",), "shop.train"), {"epochs": 7})] * 2
    missing = CliRunner().invoke(app, ["run", "-m", "shop.trian"])
    assert "-m shop.trian: there is no such module" in str(missing.exception)
